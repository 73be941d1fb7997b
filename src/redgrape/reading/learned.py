"""What each party could learn in a run, counted from the records in its folder.

The server sees every update unmasked, and with it the classes that a client reports. With secure aggregation it sees
the sum over a round's clients, and how many clients reported each class. Clients see what the server releases: the
model, and what the method computes from class rows. A report of a single example is that example's feature vector. A
gradient of n < C examples can be solved for all their feature vectors: it has n n unknowns in (C - 1) (n + 1) equations
(docs/privacy.md). A class released from one client is that client's report.
Counts are of reports (client, class, round) and releases (class, round).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redgrape.errors import StorageError
from redgrape.privacy.ledger import PrivacyLedger
from redgrape.reading import gap
from redgrape.reading.judged import clients_in
from redgrape.reading.run_view import RunView
from redgrape.runs.figures import unpacked


def recorded_disclosures(run: RunView) -> dict[str, Any]:
    """What a run discloses, as it recorded it."""
    environment, name = run.environment, run.experiment["method"]["name"]
    if environment is None:
        raise StorageError(f"'{run.path}' has not started; let it finish a round first")
    if "discloses" not in environment:
        raise StorageError(
            f"'{run.path}' does not record what its method '{name}' discloses; run it again with this redgrape"
        )
    return dict(environment["discloses"])


def disclosed(run: RunView) -> dict[str, Any]:
    """The figures of a run for `redgrape privacy`, in JSON types only."""
    discloses = recorded_disclosures(run)
    records, environment, baseline = run.metrics, run.environment or {}, gap.baseline(run.experiment)
    answers = [] if baseline else [len(record["answered"]) for record in records]
    facts: dict[str, Any] = {
        "run": str(run.path),
        "method": run.experiment["method"]["name"] + baseline,
        "baseline": baseline.removeprefix("@") or None,
        "preset": run.experiment.get("exchange", {}).get("preset", "plain"),
        "rounds": len(records),
        "clients": clients_in(environment) or None,
        "classes": len(environment["class_names"]),
        "answers": sum(answers),
        "secure_aggregation": bool(environment.get("secure_aggregation")),
        "fewest_answers": min(answers, default=None),
        "averages": discloses.get("averages", True),  # so did all methods of older runs
        "beyond_averaging": "" if baseline else discloses["beyond_averaging"],
        "evaluations_at_sites": _evaluations_at_sites(records, environment),
        "columns": _columns(environment),
        "class_reports": None,
        "noise": _noise(run, discloses["randomness"]),
    }
    if not baseline and (reports := discloses["class_reports"]) is not None:
        held = environment.get("client_counts")  # [clients, C]; with real sites only the sites know them
        counts = None if held is None else torch.tensor(held)
        rounds = [_Round(reports, record, counts, run.path) for record in records]
        facts["class_reports"] = {
            **{name: value for name, value in reports.items() if name != "fewest_contributors"},
            "server": _seen_by_server(reports, rounds, counts),
            "clients": _seen_by_clients(reports, rounds),
        }
        if facts["secure_aggregation"]:
            alone = sum(int((r.contributors == 1).sum()) for r in rounds)
            facts["class_reports"]["server"]["sums_of_one_client"] = alone
    return facts


def _evaluations_at_sites(
    records: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]
) -> dict[str, int] | None:
    """The number of evaluations, and the fewest training examples of a class in them; None if the server has a test
    set."""
    if environment.get("evaluated") != "sites":
        return None
    floor = 1 if environment.get("secure_aggregation") else environment.get("min_count", 1)
    return {"number": sum("test" in record for record in records), "min_count": floor}


def _columns(environment: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the run knows of the columns of its table; None if its data is no table."""
    if (table := environment.get("input", {}).get("table")) is None:
        return None
    values = {c["name"]: len(c["categories"]) for c in table["columns"] if c["categories"] is not None}
    most = max(values, key=values.__getitem__, default=None)
    return {
        "numbers": len(table["columns"]) - len(values),
        "categories": len(values),
        "most_values": None if most is None else {"column": most, "values": values[most]},
        "agreed": "sites" in environment,  # the sites of a deployment know the categories before they begin
    }


def _noise(run: RunView, randomness: str | None) -> dict[str, Any] | None:
    ledger = PrivacyLedger(run.path)
    if any("epsilon" in record for record in run.metrics):
        ledger.require(len(run.metrics))
    releases = ledger.releases()
    if not releases:
        return None
    last = releases[-1]
    return {
        "epsilon": last["epsilon"],
        "delta": last["delta"],
        "releases": len(releases),
        "most_rounds": last["most_rounds"],
        "mechanisms": last["mechanisms"],
        "randomness": randomness,
    }


class _Round:
    """One round's reports and releases, by class."""

    def __init__(self, reports: Mapping[str, Any], record: Mapping[str, Any], counts: Tensor | None, run: Path) -> None:
        self.answered: list[int] = record["answered"]
        self.examples: Tensor | None = None  # behind the reports of each class, if known
        reported: Tensor | None = None
        if counts is not None:
            counted = counts[[k for k in self.answered if k not in record.get("left_out", [])]]
            reported = counted >= reports["min_count"]
            self.examples = (counted * reported).sum(dim=0)
        if "class_contributors" in record:
            self.contributors = torch.tensor(unpacked(record["class_contributors"]))
        elif reported is not None:  # an older run, without this record
            self.contributors = reported.sum(dim=0)
        else:
            raise StorageError(f"'{run}' does not record who reported a class; run it again with this redgrape")
        released = self.contributors >= reports["fewest_contributors"]
        self.released = torch.tensor(unpacked(record["class_released"])) if "class_released" in record else released


def _seen_by_server(reports: Mapping[str, Any], rounds: Sequence[_Round], counts: Tensor | None) -> dict[str, Any]:
    if counts is None:
        return {"reports": sum(int(r.contributors.sum()) for r in rounds)}
    reported = counts >= reports["min_count"]
    took_part = torch.zeros(len(counts), dtype=torch.int64)
    for r in rounds:
        took_part[r.answered] += 1
    of_one, solvable = reported & (counts == 1), reported & (counts <= reports["solvable_up_to"])

    def in_all(pairs: Tensor) -> int:
        return int((pairs * took_part[:, None]).sum())

    def once(pairs: Tensor) -> int:
        return int((pairs & (took_part > 0)[:, None]).sum())

    return {
        "reports": in_all(reported),
        "pairs": once(reported),  # (client, class)
        "pairs_held_back": once((counts > 0) & ~reported),
        "single_example_reports": in_all(of_one),
        "single_examples": once(of_one),
        "solvable_pairs": once(solvable),
        "solvable_examples": int((counts * solvable)[took_part > 0].sum()),
        "classes_of_clients": {
            str(k): reported[k].nonzero().flatten().tolist() for k in took_part.nonzero().flatten().tolist()
        },
    }


def _seen_by_clients(reports: Mapping[str, Any], rounds: Sequence[_Round]) -> dict[str, Any]:
    alone = [r.released & (r.contributors == 1) for r in rounds]
    behind = [int(r.contributors[r.released].min()) for r in rounds if r.released.any()]
    known = [(r.released, r.examples) for r in rounds if r.examples is not None]  # all rounds, or none
    limit = reports["solvable_up_to"]
    return {
        "releases": sum(int(r.released.sum()) for r in rounds),
        "fewest_contributors": min(behind, default=None),
        "releases_from_one_client": sum(int(a.sum()) for a in alone),
        "releases_of_one_example": sum(int((r & (n == 1)).sum()) for r, n in known) if known else None,
        "solvable_releases": sum(int((r & (n <= limit) & (n > 0)).sum()) for r, n in known) if known else None,
        "held_back": sum(int((~r.released & (r.contributors > 0)).sum()) for r in rounds),
        "classes_released": sorted({c for r in rounds for c in r.released.nonzero().flatten().tolist()}),
    }
