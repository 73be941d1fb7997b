"""Data: sources, long tails, partitions, and the federation made from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redgrape.data.federation import Federation


def load(source: Any, *, seed: int = 0, root: Path | None = None, **options: Any) -> Federation:
    """A federation from the options of an experiment's section [data]: `load("digits", ir=50.0, clients=10)`.

    `source`: the name of a data set, a folder of images, an .npz file, `file.py:function`; or the data itself: (x, y),
    ((x, y), (x_test, y_test)), or a data set of torch or Hugging Face. `root`: the folder of the data sets.
    """
    from pydantic import ValidationError

    from redgrape.data.own import as_source
    from redgrape.data.prepare import DataOptions, prepare
    from redgrape.validation import one_line

    given = None if isinstance(source, str | Path) else as_source(source, "the data", seed)
    try:
        checked = DataOptions(source=str(source) if given is None else given.name, **options)
    except ValidationError as error:
        raise one_line(error, DataOptions, "data") from error
    return prepare(checked, seed, root, given)
