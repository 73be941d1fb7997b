"""A user's own data: a folder of images with one sub-folder per class, an .npz file of arrays, or a table.

Data is mapped, not loaded, if possible. Images are decoded once into a cache file, and the uncompressed arrays of an
.npz file are mapped in place, so both may be larger than memory.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np

from redgrape.data.examples import Examples
from redgrape.data.federation import check_class_names
from redgrape.data.longtail import choose
from redgrape.data.sources import Source, one_line
from redgrape.data.table import Roles, Table, raw
from redgrape.errors import ConfigError, DataError, StorageError
from redgrape.runs import durable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Rows = NDArray[np.int64]

IMAGE_FORMATS = ["PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF"]  # others may run programs, as PostScript does
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
TEST_SHARE = 0.2
LARGEST_SIDE = 4096  # pixels
SHA256 = 32  # bytes
AS_PLAIN = "numbers as array.astype(np.float32), names as array.astype(str)"
LARGE, UNLIKELY = 1 << 30, 200  # bytes, and a compression ratio that no honest array of that size reaches


def load(
    path: Path,
    root: Path,
    *,
    seed: int,
    image_size: int | None = None,
    hold_out: bool = True,
    fewest_classes: int = 2,
) -> Source:
    """The data at this path. The cache of decoded images is under `root`. Data without a test set gives some of its
    rows for one if `hold_out`. `fewest_classes`: a part of the data may have a single class folder."""
    if durable.ordinary(path, DataError).is_dir():
        return _from_folder(path, root, seed, image_size, hold_out, fewest_classes)
    if path.suffix != ".npz":
        raise ConfigError(f"{path} is neither a folder of images nor an .npz file; a table cannot be used here")
    if image_size is not None:
        raise ConfigError(f"image_size is for folders of images; the arrays of {path} are not resized, so leave it out")
    return _from_npz(path, seed, hold_out)


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
    clients = None
    if roles.site is not None:
        sites, owner = table.names(roles.site, "site")
        whole = all(site.isdecimal() and len(site) < 10 for site in sites)
        clients = np.array([int(site) for site in sites] if whole else sites)[owner][train_rows]
    return Source(name, train, test, class_names, clients, inputs)


def held_out_rows(labels: Rows, num_classes: int, seed: int) -> Rows:
    """The test rows of data without a test set: 20 % of each class, at least one example and at most half of them."""
    counts = np.bincount(labels, minlength=num_classes).tolist()
    return choose(labels, [min(max(1, round(TEST_SHARE * n)), n // 2) for n in counts], seed, "held-out test")


def _split(everything: Examples, test_rows: Rows) -> tuple[Rows, Examples, Examples]:
    """The training rows, and both sets as views of the same arrays. They share no row."""
    train_rows = np.setdiff1d(np.arange(len(everything)), test_rows)
    return train_rows, everything.take(train_rows), everything.take(test_rows)


@dataclass(frozen=True)
class _Listing:
    """The images of a folder in a fixed order, each with its class and whether it is in the test set."""

    folder: Path
    class_names: list[str]
    paths: list[Path]
    labels: Rows
    test: NDArray[np.bool_] | None


def _from_folder(
    folder: Path, root: Path, seed: int, image_size: int | None, hold_out: bool, fewest_classes: int
) -> Source:
    if image_size is not None and not 1 <= image_size <= LARGEST_SIDE:
        raise ConfigError(f"image_size is {image_size}; it must be at least 1 and at most {LARGEST_SIDE}")
    try:
        listing = _list_images(folder, fewest_classes)
        images: Any = _decoded(listing, root, image_size)
    except OSError as error:
        raise StorageError(f"cannot read or write {error.filename or folder}: {error.strerror or error}") from error
    labels: Any = listing.labels
    if listing.test is not None:
        test_rows = np.flatnonzero(listing.test)
    else:
        test_rows = held_out_rows(labels, len(listing.class_names), seed) if hold_out else np.zeros(0, np.int64)
    _, train, test = _split(Examples(images, labels), test_rows)
    return Source(folder.name, train, test, listing.class_names)


def _list_images(folder: Path, fewest_classes: int) -> _Listing:
    names = [entry.name for entry in visible_folders(folder)]
    splits = ["train", "test"] if set(names) == {"train", "test"} else ["."]
    classes = [[entry.name for entry in visible_folders(folder / split)] for split in splits]
    if len(classes[0]) < fewest_classes:
        raise DataError(
            f"{folder / splits[0]} holds {len(classes[0])} class folders; it needs one sub-folder for each class"
        )
    if classes[0] != classes[-1]:
        differing = sorted(set(classes[0]) ^ set(classes[-1]))
        raise DataError(
            f"{folder}: train and test must have the same class folders; only one of them has {differing[0]}"
        )
    paths: list[Path] = []
    labels: list[int] = []
    test: list[bool] = []
    for split in splits:
        for label, name in enumerate(classes[0]):
            found = images_of_class(folder / split / name, folder)
            paths += found
            labels += [label] * len(found)
            test += [split == "test"] * len(found)
    return _Listing(folder, classes[0], paths, np.array(labels, np.int64), np.array(test) if len(splits) == 2 else None)


def visible_folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def images_of_class(class_folder: Path, folder: Path) -> list[Path]:
    if inner := visible_folders(class_folder):
        raise DataError(
            f"{inner[0]} is a folder inside a class folder; images must lie directly in the folder of their class"
        )
    found = sorted(
        entry
        for entry in class_folder.iterdir()
        if entry.suffix.lower() in IMAGE_SUFFIXES and not entry.name.startswith(".")
    )
    if not found:
        raise DataError(f"{class_folder} holds no images; remove the folder or add images of its class")
    for path in found:
        if not path.is_file():
            raise DataError(f"{path} is not a file, or a broken link; remove it")
        if not path.resolve().is_relative_to(folder.resolve()):
            raise DataError(f"{path} is a link to a place outside {folder}; replace it by a copy")
    return found


def _decoded(listing: _Listing, root: Path, image_size: int | None) -> NDArray[np.uint8]:
    """The images as [n, channels, height, width], mapped from a cache file. The file is named after the listing it was
    made from and ends in the SHA-256 of its content."""
    key = hashlib.sha256(f"1 {image_size}\n".encode())
    for path in listing.paths:
        status = path.stat()
        key.update(f"{path.relative_to(listing.folder)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    cache = root / "decoded" / f"{key.hexdigest()[:32]}.npy"
    try:
        return _mapped_npy(cache, len(listing.paths))
    except (OSError, ValueError, EOFError):  # missing or damaged
        cache.parent.mkdir(parents=True, exist_ok=True)
        _decode(listing, cache, image_size)
        return _mapped_npy(cache, len(listing.paths))


def _mapped_npy(path: Path, n: int) -> NDArray[np.uint8]:
    with path.open("rb") as file:
        digest = _digest_of(file, path.stat().st_size - SHA256)
        if file.read() != digest:
            raise ValueError(f"{path} is damaged")
    images: NDArray[np.uint8] = np.load(path, mmap_mode="r", allow_pickle=False)
    if images.ndim != 4 or len(images) != n or images.dtype != np.uint8:
        raise ValueError(f"{path} does not hold {n} images")
    return images


def _digest_of(file: BinaryIO, size: int) -> bytes:
    """The digest of the next `size` bytes, read in blocks: they may exceed memory."""
    digest = hashlib.sha256()
    while size > 0 and (block := file.read(min(size, 1 << 20))):
        digest.update(block)
        size -= len(block)
    return digest.digest()


def _decode(listing: _Listing, cache: Path, image_size: int | None) -> None:
    """Decode every image into the cache file, which appears only when complete."""
    modes_and_sizes = [open_image(path, lambda image: (image.mode, image.size)) for path in listing.paths]
    mode = "L" if all(found in ("L", "1") for found, _ in modes_and_sizes) else "RGB"
    width, height = modes_and_sizes[0][1] if image_size is None else (image_size, image_size)
    for path, (found, size) in zip(listing.paths, modes_and_sizes, strict=True):
        if found[0] in "IF":
            raise DataError(f"{path} has pixels of more than 8 bits (mode {found}); convert it to 8 bits")
        if image_size is None and size != (width, height):
            raise DataError(
                f"images differ in size: {listing.paths[0]} is {width}x{height} and {path} is {size[0]}x{size[1]}; "
                f"pass image_size to resize all to one size"
            )

    def pixels(image: Any) -> NDArray[np.uint8]:
        image = image.convert(mode)
        if image.size != (width, height):
            from PIL import Image

            image = image.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(image).reshape(height, width, -1).transpose(2, 0, 1)

    partial = cache.with_name(f".{cache.stem}.{os.getpid()}.part")
    shape = (len(listing.paths), 1 if mode == "L" else 3, height, width)
    try:
        decoded = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=shape)
        with partial.open("r+b") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk must not kill a write into a map
                os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)
            for row, path in enumerate(listing.paths):
                decoded[row] = open_image(path, pixels)
            decoded.flush()
            file.write(_digest_of(file, partial.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(cache)
    finally:
        partial.unlink(missing_ok=True)


def open_image(path: Path, use: Any) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("reading images needs Pillow; run `pip install redgrape[images]`") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(durable.ordinary(path, DataError), formats=IMAGE_FORMATS) as image:
                return use(image)
    except Exception as error:  # decoders raise anything for damaged files
        raise DataError(f"{path} cannot be read as an image ({one_line(error)}); replace or remove it") from error


def _from_npz(path: Path, seed: int, hold_out: bool) -> Source:
    arrays = Arrays(path)
    apart = "x_test" in arrays or "y_test" in arrays
    (y, *more), names = labels_of(arrays, "y", *(["y_test"] if apart else []))
    x = as_inputs(arrays["x"], f"{path}: x")
    if len(x) == 0:
        raise DataError(f"{path}: x holds no examples")
    _same_length(path, "y", y, x)
    clients = _numbers_or_names(arrays["client"], f"{path}: client") if "client" in arrays else None
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
        train, test = Examples(x, y), Examples(x_test, y_test)
    else:
        if "test" in arrays:
            test_rows = rows_for_test(arrays, len(y))
        else:
            test_rows = held_out_rows(y, len(names), seed) if hold_out else np.zeros(0, np.int64)
        train_rows, train, test = _split(Examples(x, y), test_rows)
        clients = None if clients is None else clients[train_rows]
    if len(train) == 0 or (len(test) == 0 and hold_out):
        raise DataError(f"{path} gives {len(train)} training and {len(test)} test examples; both need at least one")
    return Source(path.stem, train, test, names, clients)


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
    """Floats unchanged; uint8 images with the channels first."""
    if not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
    if 0 in x.shape[1:]:
        raise DataError(f"{what} has shape {x.shape}; an example must hold at least one number")
    if x.dtype == np.uint8:
        if x.ndim == 3:
            return x[:, None]
        if x.ndim == 4 and x.shape[1] in (1, 3):
            return x
        if x.ndim == 4 and x.shape[3] in (1, 3):
            return np.moveaxis(x, 3, 1)
        raise DataError(
            f"{what} has shape {x.shape}; uint8 images are [n, h, w], [n, c, h, w] or [n, h, w, c], c 1 or 3"
        )
    if x.dtype not in (np.float16, np.float32, np.float64):
        raise DataError(f"{what} holds {x.dtype}; pass images as uint8, anything else as float32")
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


def labels_of(arrays: Arrays, *which: str) -> tuple[list[Any], list[str]]:
    """The class numbers in these arrays, and the names of the classes. Arrays of strings name classes themselves: those
    of `class_names`, or all of them in sorted order."""
    named = [arrays[name] for name in which]
    if any(y.dtype.kind != "U" or y.ndim != 1 for y in named):
        numbers = [as_labels(y, f"{arrays.path}: {name}") for y, name in zip(named, which, strict=True)]
        return numbers, names_of_classes(arrays, max(map(highest_label, numbers)), len(numbers[0]))
    found = sorted({str(name) for y in named for name in np.unique(y)})
    names = names_of_classes(arrays, -1, 0) if "class_names" in arrays else found
    check_class_names(names, f"{arrays.path}: {which[0]}")
    if unnamed := set(found) - set(names):
        raise DataError(f"{arrays.path}: {which[0]} has the class '{min(unnamed)}', which class_names does not name")
    number = {name: c for c, name in enumerate(names)}
    return [np.array([number[str(name)] for name in y], np.int64) for y in named], names


def as_labels(y: Any, what: str) -> Any:
    y = _integers(y, what)
    if len(y) and y.min() < 0:
        raise DataError(f"{what} has the label {y.min()}; labels are whole numbers from 0")
    return y


def _integers(values: Any, what: str) -> Any:
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise DataError(
            f"{what} holds {values.dtype} of shape {values.shape}; it must be one row of whole numbers, or of strings"
        )
    return values.astype(np.int64)


def _numbers_or_names(values: Any, what: str) -> Any:
    if values.ndim != 1 or values.dtype.kind not in "iuU":
        raise DataError(
            f"{what} holds {values.dtype} of shape {values.shape}; it must be one row of whole numbers or of strings"
        )
    return values


def _same_length(path: Path, name: str, values: Any, x: Any) -> None:
    if len(values) != len(x):
        raise DataError(
            f"{path}: {name} has {len(values)} entries for {len(x)} rows of inputs; there must be one for each"
        )


def highest_label(labels: Rows) -> int:
    return int(labels.max()) if len(labels) else -1


def names_of_classes(arrays: Arrays, highest: int, examples: int) -> list[str]:
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


def rows_for_test(arrays: Arrays, n: int) -> Rows:
    test = arrays["test"]
    if test.dtype != np.bool_ or test.shape != (n,):
        raise DataError(
            f"{arrays.path}: test holds {test.dtype} of shape {test.shape}; pass a bool for each of {n} rows"
        )
    return np.flatnonzero(test)
