"""Data: sources, long tails, partitions, and the federation made from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redgrape.data.federation import Federation


def load(source: Any, *, seed: int = 0, root: Path | None = None, **options: Any) -> Federation:
    """A federation from the options of an experiment's section [data]: `load("digits", ir=50.0, clients=10)`.

    `source`: the name of a data set, a folder of images, an .npz file, a table, or a DataFrame:
    `load(frame, label="diagnosis", site="hospital")`. `root`: the folder of the data sets.
    """
    from pydantic import ValidationError

    from redgrape.data import table, user_data
    from redgrape.data.prepare import DataOptions, divide, prepare
    from redgrape.validation import one_line

    is_frame = not isinstance(source, str | Path)
    try:
        checked = DataOptions(source="frame.csv" if is_frame else str(source), **options)
    except ValidationError as error:
        raise one_line(error, DataOptions, "data") from error
    if is_frame:
        return divide(user_data.of_table(table.of_frame(source), checked.roles, seed, "frame"), checked, seed)
    return prepare(checked, seed, root)
