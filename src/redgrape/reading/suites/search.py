"""Hyper-parameter search with Optuna on the validation set. The test set is not used.

The sampler is seeded, and its proposals depend only on earlier results. So a killed search resumes without a database:
the same proposals come again, and their runs are already finished.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redgrape.errors import ConfigError, needed
from redgrape.reading.suites import grid
from redgrape.reading.suites.cells import Label

_RANGE = re.compile(r"(?P<low>[^,]+?)\.\.(?P<high>[^,]+?)(?P<log>:log)?")


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, on a linear or log scale. If both ends are integers, only integers."""

    low: int | float
    high: int | float
    log: bool


Space = Mapping[str, "Range | list[Label]"]


def space(assignments: Sequence[str]) -> Space:
    """Parse the search space. `method.lam=0.01..1:log` is a range, `method.norm=joint,per_tensor` a choice."""
    found: dict[str, Range | list[Label]] = {}
    for assignment in assignments:
        key = grid.new_key(assignment, found)
        match = _RANGE.fullmatch(assignment.partition("=")[2].strip())
        if match is None:
            found[key] = grid.labels(assignment)
            continue
        low, high = (grid.value(key, match[end]) for end in ("low", "high"))
        if not _is_number(low) or not _is_number(high) or not low < high:  # type: ignore[operator]  # both are numbers
            raise ConfigError(
                f"'{assignment}' is no range; write low..high, finite numbers, as in method.lam=0.01..1:log"
            )
        if match["log"] and not low > 0:  # type: ignore[operator]
            raise ConfigError(f"'{assignment}' cannot be searched by order of magnitude; its low end must be above 0")
        found[key] = Range(low, high, bool(match["log"]))  # type: ignore[arg-type]
    if not found:
        raise ConfigError("a search needs at least one key, for example method.lam=0.01..1:log")
    return found


def _is_number(value: Label) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def proposals(
    space: Space, trials: int, score: Callable[[Mapping[str, Label]], float | None]
) -> Iterator[dict[str, Label]]:
    """Yield each proposal after it is scored. A score of None is a failure, and the sampler ignores it."""
    optuna = needed("optuna", "--search needs Optuna", "search")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    for _ in range(trials):
        trial = study.ask()
        values = {key: _suggest(trial, key, choice) for key, choice in space.items()}
        found = score(values)
        if found is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            study.tell(trial, found)
        yield values


def _suggest(trial: Any, key: str, choice: Range | list[Label]) -> Label:
    if isinstance(choice, list):
        if any(isinstance(value, list) for value in choice):
            place: int = trial.suggest_int(key, 0, len(choice) - 1)
            return choice[place]
        value: Label = trial.suggest_categorical(key, choice)
        return value
    whole = isinstance(choice.low, int) and isinstance(choice.high, int)
    suggest = trial.suggest_int if whole else trial.suggest_float
    number: int | float = suggest(key, choice.low, choice.high, log=choice.log)
    return number if whole else float(f"{number:.4g}")  # as printed, so the best value can be typed again
