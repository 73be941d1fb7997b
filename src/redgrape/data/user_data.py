"""A user's own data: images (see images.py), an .npz file of arrays, or a table (see table.py).

Data is mapped, not loaded, if possible. The uncompressed arrays of an .npz file are mapped in place, so they may be
larger than memory.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from redgrape.data import images
from redgrape.data.columns import Roles, raw
from redgrape.data.examples import Examples
from redgrape.data.federation import check_class_names
from redgrape.data.longtail import choose
from redgrape.data.sources import Source, one_line
from redgrape.data.table import SUFFIXES, Table, is_table, not_read
from redgrape.errors import ConfigError, DataError, did_you_mean
from redgrape.runs import durable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]

TEST_SHARE = 0.2
ARRAYS = ("x", "y", "client", "client_test", "class_names", "test", "x_test", "y_test")  # of an .npz file
AS_PLAIN = "numbers as array.astype(np.float32), names as array.astype(str)"
LARGE, UNLIKELY = 1 << 30, 200  # bytes, and a compression ratio that no honest array of that size reaches


def load(
    path: Path,
    root: Path,
    *,
    seed: int,
    image_size: int | None = None,
    letterbox: bool = False,
    hold_out: bool = True,
    fewest_classes: int = 2,
) -> Source:
    """The data at this path. The cache of decoded images is under `root`. Data without a test set gives some of its
    rows for one if `hold_out`. `fewest_classes`: a part of the data may have a single class folder."""
    if durable.ordinary(path, DataError).is_dir() or images.is_manifest(path):
        return _from_images(path, root, seed, image_size, letterbox, hold_out, fewest_classes)
    if path.suffix != ".npz":
        table = "; a table cannot be used here" if is_table(path.name) else f" nor a table ({', '.join(SUFFIXES)})"
        raise ConfigError(not_read(str(path)) or f"{path} is neither a folder of images nor an .npz file{table}")
    if image_size is not None or letterbox:
        name = "letterbox" if image_size is None else "image_size"
        raise ConfigError(f"{name} is for folders of images; the arrays of {path} are not resized, so leave it out")
    return from_arrays(Arrays(path), path, seed, hold_out)


def of_table(table: Table, roles: Roles, seed: int, name: str) -> Source:
    """The rows of a table. Their inputs are fitted when it is known which rows the clients have."""
    inputs = raw(table, roles)
    class_names, labels = table.names(inputs.label, "class")
    check_class_names(class_names, f"{table.where}: column '{inputs.label}'")
    if len(class_names) < 2:
        raise DataError(f"{table.where}: column '{inputs.label}' has one class, '{class_names[0]}'; two are needed")
    test_rows = held_out_rows(labels, len(class_names), seed) if roles.test is None else table.test_rows(roles.test)
    stand_ins: Any = np.zeros((len(table), 1), np.float32)
    train_rows, train, test = _split(Examples(stand_ins, labels), test_rows)  # type: ignore[arg-type]  # takes arrays
    if not len(train) or not len(test):
        raise DataError(
            f"{table.where} gives {len(train)} training and {len(test)} test examples; both need at least one"
        )
    if roles.site is None:
        return Source(name, train, test, class_names, raw=inputs)
    sites, owner = table.names(roles.site, "site")
    whole = all(site.isdecimal() and site == str(int(site)) and len(site) < 10 for site in sites)  # 1 and 01 are two
    clients = np.array([int(site) for site in sites] if whole else sites)[owner]
    return Source(name, train, test, class_names, clients[train_rows], inputs, clients[test_rows])


def held_out_rows(labels: Rows, num_classes: int, seed: int) -> Rows:
    """The test rows of data without a test set: 20 % of each class, at least one example and at most half of them."""
    counts = np.bincount(labels, minlength=num_classes).tolist()
    return choose(labels, [min(max(1, round(TEST_SHARE * n)), n // 2) for n in counts], seed, "held-out test")


def _split(everything: Examples, test_rows: Rows) -> tuple[Rows, Examples, Examples]:
    """The training rows, and both sets as views of the same arrays. They share no row."""
    train_rows = np.setdiff1d(np.arange(len(everything)), test_rows)
    return train_rows, everything.take(train_rows), everything.take(test_rows)


def _from_images(
    path: Path, root: Path, seed: int, image_size: int | None, letterbox: bool, hold_out: bool, fewest_classes: int
) -> Source:
    pictures = images.read(path, root, image_size, letterbox, fewest_classes)
    labels: Any = pictures.labels
    if pictures.test is not None:
        test_rows = np.flatnonzero(pictures.test)
    else:
        test_rows = held_out_rows(labels, len(pictures.class_names), seed) if hold_out else np.zeros(0, np.int64)
    x: Any = pictures.images
    train_rows, train, test = _split(Examples(x, labels), test_rows)
    if pictures.sites is None:
        return Source(path.stem, train, test, pictures.class_names)
    clients, test_clients = (pictures.sites[rows] for rows in (train_rows, test_rows))
    return Source(path.stem, train, test, pictures.class_names, clients, test_clients=test_clients)


def from_arrays(arrays: Any, path: Path | str, seed: int, hold_out: bool) -> Source:
    """The arrays of an .npz file, or a mapping like it whose `path` is its name."""
    apart = "x_test" in arrays or "y_test" in arrays
    (y, *more), names = labels_of(arrays, "y", *(["y_test"] if apart else []))
    x = as_inputs(arrays["x"], f"{path}: x")
    if len(x) == 0:
        raise DataError(f"{path}: x holds no examples")
    _same_length(path, "y", y, x)
    for name in arrays:
        if name not in ARRAYS:
            hint = did_you_mean(name, ARRAYS) or f"remove it; an array is one of {', '.join(ARRAYS)}"
            raise DataError(f"{path} has an array '{name}', which is not read; {hint}")
    _check_finite(x, f"{path}: x")
    clients = _numbers_or_names(arrays["client"], f"{path}: client") if "client" in arrays else None
    test_clients = None
    if clients is not None:
        _same_length(path, "client", clients, x)
    if apart:
        if "test" in arrays:
            raise DataError(f"{path} has both `test` and `x_test`, `y_test`; give the test set in one way only")
        x_test, y_test = as_inputs(arrays["x_test"], f"{path}: x_test"), more[0]
        _same_length(path, "y_test", y_test, x_test)
        if (x_test.shape[1:], x_test.dtype) != (x.shape[1:], x.dtype):
            raise DataError(
                f"{path}: a row of x_test is {x_test.dtype} {x_test.shape[1:]}, a row of x {x.dtype} {x.shape[1:]}"
            )
        _check_finite(x_test, f"{path}: x_test")
        train, test = Examples(x, y), Examples(x_test, y_test)
        if "client_test" in arrays:
            test_clients = _numbers_or_names(arrays["client_test"], f"{path}: client_test")
            _same_length(path, "client_test", test_clients, x_test)
    else:
        if "test" in arrays:
            test_rows = rows_for_test(arrays, len(y))
        else:
            test_rows = held_out_rows(y, len(names), seed) if hold_out else np.zeros(0, np.int64)
        train_rows, train, test = _split(Examples(x, y), test_rows)
        if clients is not None:
            clients, test_clients = clients[train_rows], clients[test_rows]
    if len(train) == 0 or (len(test) == 0 and hold_out):
        raise DataError(f"{path} gives {len(train)} training and {len(test)} test examples; both need at least one")
    return Source(Path(path).stem, train, test, names, clients, test_clients=test_clients)


class Arrays:
    """The arrays of an .npz file by name: mapped if stored uncompressed, read if compressed."""

    def __init__(self, path: Path) -> None:
        self.path = durable.ordinary(path, DataError)
        try:
            with zipfile.ZipFile(path) as archive:
                self.members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        except Exception as error:  # a damaged file can raise nearly anything
            raise DataError(f"{path} cannot be read as an .npz file ({one_line(error)})") from error

    def __contains__(self, name: str) -> bool:
        return name in self.members

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __getitem__(self, name: str) -> Any:
        if name not in self.members:
            raise DataError(f"{self.path} has no array `{name}`; it has {', '.join(sorted(self.members)) or 'none'}")
        member = self.members[name]
        try:
            if member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1:
                return self._mapped(member)
            if member.file_size > LARGE and member.file_size > UNLIKELY * member.compress_size:
                raise ValueError(f"it unpacks to {member.file_size >> 30} GB; save it with np.savez, uncompressed")
            with zipfile.ZipFile(self.path) as archive, archive.open(member) as file:
                if _npy_header(cast("BinaryIO", file))[2].hasobject:
                    raise ValueError(f"it holds Python objects; save {AS_PLAIN}")
            with zipfile.ZipFile(self.path) as archive, archive.open(member) as file:
                return np.lib.format.read_array(file, allow_pickle=False)
        except Exception as error:
            raise DataError(f"{self.path}: array `{name}` cannot be read ({one_line(error)})") from error

    def _mapped(self, member: zipfile.ZipInfo) -> Any:
        """A local file header has 30 bytes. Bytes 26-27 and 28-29 hold the lengths of the name and the extra field that
        follow it. Then comes the .npy file."""
        with self.path.open("rb") as file:
            file.seek(member.header_offset)
            header = file.read(30)
            if len(header) < 30 or header[:4] != b"PK\x03\x04":
                raise ValueError("damaged zip header")
            start = file.seek(
                int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), os.SEEK_CUR
            )
            shape, column_major, dtype = _npy_header(file)
            if dtype.hasobject:
                raise ValueError(f"it holds Python objects; save {AS_PLAIN}")
            offset = file.tell()
        if min(shape, default=0) < 0 or offset + dtype.itemsize * math.prod(shape) > start + member.file_size:
            raise ValueError("its header asks for more than the file holds")
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.memmap(self.path, dtype, "r", offset, shape, "F" if column_major else "C")


def _npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"unknown version {version} of the .npy format")


def as_inputs(x: Any, what: str) -> Any:
    """Floats unchanged; images of uint8 or uint16 with the channels first."""
    if not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
    if 0 in x.shape[1:]:
        raise DataError(f"{what} has shape {x.shape}; an example must hold at least one number")
    if x.dtype in (np.uint8, np.uint16):
        if x.ndim == 3:
            return x[:, None]
        if x.ndim == 4 and x.shape[1] in (1, 3):
            return x
        if x.ndim == 4 and x.shape[3] in (1, 3):
            return np.moveaxis(x, 3, 1)
        raise DataError(f"{what} has shape {x.shape}; images are [n, h, w], [n, c, h, w] or [n, h, w, c], c 1 or 3")
    if x.dtype not in (np.float16, np.float32, np.float64):
        raise DataError(f"{what} holds {x.dtype}; pass images as uint8 or uint16, anything else as float32")
    if x.ndim < 2:
        raise DataError(f"{what} has shape {x.shape}; it needs a row for each example and at least one column")
    if x.dtype == np.float64:
        _check_range(x, what)
    return x


def _check_range(x: Any, what: str) -> None:
    """Raise DataError for a number that overflows float32, in which nets compute."""
    for start in range(0, len(x), 4096):  # in blocks: x may be larger than memory
        block = x[start : start + 4096]
        beyond = np.argwhere(np.isfinite(block) & (np.abs(block) > np.finfo(np.float32).max))
        if len(beyond):
            value = block[tuple(beyond[0])]
            raise DataError(f"{what} has {value:g} in row {start + beyond[0][0]}, which no float32 can hold; scale x")


def _check_finite(x: Any, what: str) -> None:
    """Raise DataError for NaN and infinity, by the row of the file: after the split, rows have other numbers."""
    for start in range(0, len(x) if x.dtype.kind == "f" else 0, 4096):  # in blocks: x may be larger than memory
        wrong = np.argwhere(~np.isfinite(x[start : start + 4096]))
        if len(wrong):
            raise DataError(
                f"{what}[{start + wrong[0][0]}] has a value that is NaN or infinite; fill it in or remove the row"
            )


def labels_of(arrays: Any, *which: str) -> tuple[list[Any], list[str]]:
    """The class numbers in these arrays, and the names of the classes. Arrays of strings name classes themselves: those
    of `class_names`, or all of them in sorted order."""
    named = [arrays[name] for name in which]
    if any(y.dtype.kind != "U" or y.ndim != 1 for y in named):
        numbers = [as_labels(y, f"{arrays.path}: {name}") for y, name in zip(named, which, strict=True)]
        highest = max((int(y.max()) for y in numbers if len(y)), default=-1)
        return numbers, names_of_classes(arrays, highest, len(numbers[0]))
    found = sorted({str(name) for y in named for name in np.unique(y)})
    names = names_of_classes(arrays, -1, 0) if "class_names" in arrays else found
    check_class_names(names, f"{arrays.path}: {which[0]}")
    if unnamed := set(found) - set(names):
        raise DataError(f"{arrays.path}: {which[0]} has the class '{min(unnamed)}', which class_names does not name")
    number = {name: c for c, name in enumerate(names)}
    return [np.array([number[str(name)] for name in y], np.int64) for y in named], names


def as_labels(y: Any, what: str) -> Any:
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(
            f"{what} holds {y.dtype} of shape {y.shape}; it must be one row of whole numbers, or of strings"
        )
    y = y.astype(np.int64)
    if len(y) and y.min() < 0:
        raise DataError(f"{what} has the label {y.min()}; labels are whole numbers from 0")
    return y


def _numbers_or_names(values: Any, what: str) -> Any:
    if values.ndim != 1 or values.dtype.kind not in "iuU":
        raise DataError(
            f"{what} holds {values.dtype} of shape {values.shape}; it must be one row of whole numbers or of strings"
        )
    return values


def _same_length(path: Path | str, name: str, values: Any, x: Any) -> None:
    if len(values) != len(x):
        raise DataError(
            f"{path}: {name} has {len(values)} entries for {len(x)} rows of inputs; there must be one for each"
        )


def names_of_classes(arrays: Any, highest: int, examples: int) -> list[str]:
    if "class_names" not in arrays:
        if highest >= examples:
            raise DataError(
                f"{arrays.path}: label {highest} among {examples} examples; labels number the classes 0 .. C-1 "
                f"(pass class_names if there are that many)"
            )
        return [str(c) for c in range(highest + 1)]
    names = arrays["class_names"]
    if names.ndim != 1 or names.dtype.kind != "U":
        raise DataError(
            f"{arrays.path}: class_names holds {names.dtype} of shape {names.shape}; pass one row of strings"
        )
    if highest >= len(names):
        raise DataError(f"{arrays.path}: label {highest} is outside the {len(names)} classes that class_names gives")
    check_class_names(names := [str(name) for name in names], f"{arrays.path}: class_names")
    return names


def rows_for_test(arrays: Any, n: int) -> Rows:
    test = arrays["test"]
    if test.dtype != np.bool_ or test.shape != (n,):
        raise DataError(
            f"{arrays.path}: test holds {test.dtype} of shape {test.shape}; pass a bool for each of {n} rows"
        )
    return np.flatnonzero(test)
