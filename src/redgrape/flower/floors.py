"""What a deployment holds the server's experiment to. The server's command looks at it before a run, and every site
again before it answers, by its own site.toml.

    min_count      no site tells of a class of which it holds fewer examples, neither how many nor a gradient
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
    if options.secure_aggregation:  # sites tell nothing but parts of sums
        return None
    if options.min_count > 1 and (reason := method.why_class_counts()):
        return (
            f"{reason}, and sites tell of no class of which they hold fewer than {options.min_count} examples; or use "
            "secure aggregation, or set min_count=1 in deploy.toml and every site.toml"
        )
    return None
