"""Data from Python: arrays, torch data sets, Hugging Face data sets, and what a user's own function returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from redgrape.data.examples import Examples
from redgrape.data.sources import Source, one_line
from redgrape.errors import DataError

HOW = "pass (x, y), ((x, y), (x_test, y_test)), a mapping with x and y, or a data set of (input, label) pairs"


def as_source(value: Any, name: str, seed: int) -> Source:
    """A data set, or a pair of data sets for training and testing, as a source. Without a test set, a fifth of each
    class is held out."""
    from redgrape.data import user_data

    if isinstance(value, Source):
        return value
    if isinstance(value, tuple | list) and len(value) == 2 and _is_set(value[0]) and _is_set(value[1]):
        test = as_arrays(value[1], name)
        arrays = as_arrays(value[0], name) | {"x_test": test["x"], "y_test": test["y"]}
    else:
        arrays = as_arrays(value, name)
    return user_data.from_arrays(_Named(name, arrays), name, seed, hold_out=True)


def as_examples(value: Any, what: str) -> Examples:
    """Examples as they are, or from a pair (x, y) or a data set."""
    if isinstance(value, Examples):
        return value
    arrays = as_arrays(value, what)
    return Examples(arrays["x"], arrays["y"])


def as_arrays(value: Any, what: str) -> dict[str, Any]:
    """The arrays of an .npz file: x and y, and client, test and class_names if they are known."""
    if isinstance(value, Mapping):
        return {key: np.asarray(array) for key, array in value.items()}
    if isinstance(value, Examples):
        raise DataError(f"{what} are redgrape.Examples; make a redgrape.Federation of them")
    if isinstance(value, tuple | list) and len(value) == 2 and not _is_set(value[0]):
        return {"x": np.asarray(value[0]), "y": np.asarray(value[1])}
    if hasattr(value, "column_names") and hasattr(value, "features"):
        return _from_columns(value, what)
    if hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | np.ndarray):
        return _from_pairs(value, what)
    raise DataError(f"{what}: {type(value).__name__} cannot be read as a data set; {HOW}")


class _Named(dict[str, Any]):
    """Arrays with the name that messages give them."""

    def __init__(self, name: str, arrays: Mapping[str, Any]) -> None:
        super().__init__(arrays)
        self.path = name

    def __missing__(self, key: str) -> Any:
        raise DataError(f"{self.path} has no array `{key}`; it has {', '.join(sorted(self)) or 'none'}")


def _is_set(value: Any) -> bool:
    """Whether this is a data set or a pair of arrays, and no array itself."""
    if isinstance(value, tuple | list):
        return len(value) == 2 and hasattr(value[0], "shape")
    return not hasattr(value, "shape") and hasattr(value, "__getitem__")


def _from_pairs(examples: Any, what: str) -> dict[str, Any]:
    """A torch data set whose items are (input, label)."""
    try:
        pairs = [examples[i] for i in range(len(examples))]
        x, y = np.stack([_array(pair[0]) for pair in pairs]), np.array([int(pair[1]) for pair in pairs], np.int64)
    except Exception as error:  # a data set may raise anything
        raise DataError(
            f"{what}: {type(examples).__name__} gives no (input, label) pairs of one shape ({one_line(error)}); {HOW}"
        ) from error
    names = getattr(examples, "classes", None)
    return {"x": x, "y": y} | ({"class_names": np.array(names)} if _are_names(names) else {})


def _from_columns(table: Any, what: str) -> dict[str, Any]:
    """A Hugging Face data set with a column `label`, one of inputs, and perhaps one of sites (`site` or `client`)."""
    columns = list(table.column_names)
    label = next((name for name in ("label", "labels") if name in columns), None)
    site = next((name for name in ("site", "client") if name in columns), None)
    inputs = [name for name in columns if name not in (label, site)]
    chosen = next((name for name in ("image", "img", "x") if name in inputs), inputs[0] if len(inputs) == 1 else None)
    if label is None or chosen is None:
        raise DataError(f"{what} has the columns {', '.join(columns)}; rename one to `label` and one to `image` or `x`")
    try:
        arrays: dict[str, Any] = {
            "x": np.stack([_array(value) for value in table[chosen]]),
            "y": np.asarray(table[label]),
        }
    except Exception as error:  # inputs of several shapes, or no numbers
        raise DataError(f"{what}: column '{chosen}' has no inputs of one shape ({one_line(error)})") from error
    names = getattr(table.features[label], "names", None)
    return (
        arrays
        | ({"class_names": np.array(names)} if _are_names(names) else {})
        | ({} if site is None else {"client": np.asarray(table[site])})
    )


def _are_names(names: Any) -> bool:
    return isinstance(names, Sequence) and bool(names) and all(isinstance(name, str) for name in names)


def _array(value: Any) -> Any:
    """One input. Lists of Python floats become float32, in which nets compute."""
    array = np.asarray(value)
    return array.astype(np.float32) if isinstance(value, list) else array
