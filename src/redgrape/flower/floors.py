"""What a deployment holds the server's experiment to. The server's command looks at it before a run, and every site
again before it answers, by its own site.toml.

    min_count      of a class of which it holds fewer examples no site sends how many, or a gradient; and where there is
                   such a floor, no gradient that can be solved for the examples behind it. The update of the model
                   itself may still tell of such a class
    min_clients    no class is released that fewer sites report
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redgrape.class_reports import ClassReports

if TYPE_CHECKING:
    from redgrape.flower.folder import DeployOptions, SiteOptions
    from redgrape.method import Method


def why_refused(method: Method, options: DeployOptions | SiteOptions) -> str | None:
    """Why the method tells, or lets out, more than these options allow; None where it does not."""
    if isinstance(method, ClassReports) and method.min_count < options.min_count:
        return (
            f"method.min_count is {method.min_count}, and no site reports a class of which it holds fewer than "
            f"{options.min_count} examples (min_count in deploy.toml and site.toml); raise it"
        )
    if isinstance(method, ClassReports) and method.reports_classes and method.min_clients < options.min_clients:
        return (
            f"method.min_clients is {method.min_clients}, and no class is released that fewer than "
            f"{options.min_clients} sites report (min_clients in deploy.toml and site.toml); raise it"
        )
    if options.secure_aggregation:  # sites tell nothing but parts of sums
        return None
    if isinstance(method, ClassReports) and method.reports_classes and options.min_count > 1:
        solvable = method.solvable(len(options.data.classes))
        if solvable >= method.min_count:
            return (
                f"class gradients of up to {solvable} examples can be solved for every one of them, and this method "
                f"sends them from {method.min_count} on; {method.less_solvable}raise method.min_count to "
                f"{solvable + 1}, or use secure aggregation"
            )
    if options.min_count > 1 and (reason := method.why_class_counts()):
        return (
            f"{reason}, and sites tell of no class of which they hold fewer than {options.min_count} examples; or use "
            "secure aggregation, or set min_count=1 in deploy.toml and every site.toml"
        )
    return None
