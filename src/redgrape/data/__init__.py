"""Data: sources, long tails, partitions, and the federation made from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redgrape.data.federation import Federation


def load(source: Any, *, seed: int = 0, root: Path | None = None, **options: Any) -> Federation:
    """A federation from the options of an experiment's section [data]: `load("digits", ir=50.0, clients=10)`.

    `source`: the name of a data set, a folder of images, an .npz file, a table, `file.py:function`; or the data itself:
    (x, y), ((x, y), (x_test, y_test)), a data set of torch or Hugging Face, or a DataFrame with its columns:
    `load(frame, label="diagnosis", site="hospital")`. `root`: the folder of the data sets.
    """
    from pydantic import ValidationError

    from redgrape.data import table, user_data
    from redgrape.data.own import as_source
    from redgrape.data.prepare import DataOptions, prepare
    from redgrape.validation import one_line

    given = None
    is_frame = not isinstance(source, str | Path) and (hasattr(source, "columns") or "label" in options)
    if not isinstance(source, str | Path) and not is_frame:
        given = as_source(source, "the data", seed)
    named = "frame.csv" if is_frame else str(source) if given is None else given.name
    try:
        checked = DataOptions(source=named, **options)
    except ValidationError as error:
        raise one_line(error, DataOptions, "data") from error
    if is_frame:
        given = user_data.of_table(table.of_frame(source), checked.roles, seed, named)
    return prepare(checked, seed, root, given)
