"""Image files: folders with one sub-folder per class, the same in a folder per site, and lists of images in a manifest.

Images are decoded once into a cache file, which is mapped and may be larger than memory.
"""

from __future__ import annotations

import csv
import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from redgrape.data import array_cache, table
from redgrape.data.sources import one_line
from redgrape.errors import ConfigError, DataError, StorageError, install
from redgrape.runs import durable

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMATS = ["PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF"]  # others may run programs, as PostScript does
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
LARGEST_SIDE = 4096  # pixels
MANIFEST = "manifest.csv"
SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation", "dev"}  # in small letters
Mode = Literal["L", "RGB", "16 bits"]
_GREY, _DEEP = ("L", "1"), ("I;16", "I;16B", "I;16L", "I;16N", "I")  # Pillow's modes
Listed = tuple[Path, str, str, str]  # an image, its class, its site ("" if none), and "train", "test" or ""


@dataclass(frozen=True)
class Pictures:
    """images: [n, channels, height, width], uint8 or uint16. test: which are for testing; None if nobody said. sites:
    where each comes from; None if nobody said."""

    images: NDArray[Any]
    labels: NDArray[np.int64]
    class_names: list[str]
    test: NDArray[np.bool_] | None
    sites: NDArray[np.str_] | None


def is_manifest(path: Path) -> bool:
    return path.name.endswith(MANIFEST)


def manifest_of(path: Path) -> Path | None:
    """The manifest that this is, or that lies in this folder. None if there is none."""
    if is_manifest(path):
        return path
    return path / MANIFEST if (path / MANIFEST).is_file() else None


def read(path: Path, root: Path, image_size: int | None, letterbox: bool, fewest_classes: int) -> Pictures:
    """The images of a folder, or of a manifest. Their cache is under `root`."""
    if image_size is not None and not 1 <= image_size <= LARGEST_SIDE:
        raise ConfigError(f"image_size is {image_size}; it must be at least 1 and at most {LARGEST_SIDE}")
    if letterbox and image_size is None:
        raise ConfigError("letterbox keeps the proportions of resized images; give their new size by image_size")
    try:
        manifest = manifest_of(path)
        folder = path if manifest is None else manifest.parent
        listed = _from_folder(path, fewest_classes) if manifest is None else _from_manifest(manifest)
        images = _decoded([image for image, *_ in listed], folder, root, image_size, letterbox)
    except OSError as error:
        raise StorageError(f"cannot read or write {error.filename or path}: {error.strerror or error}") from error
    _, classes, sites, splits = (np.array(column) for column in zip(*listed, strict=True))
    names, labels = np.unique(classes, return_inverse=True)
    return Pictures(
        images,
        labels.astype(np.int64),
        [str(name) for name in names],
        (splits == "test") if (splits != "").any() else None,
        sites if (sites != "").any() else None,
    )


def for_evaluation(path: Path, is_split: bool) -> list[Listed]:
    """The images of the test set if the data names one, else all. `is_split`: whether folders `train` and `test` are
    parts of the data, and no classes."""
    if (manifest := manifest_of(path)) is not None:
        listed = _from_manifest(manifest)
        return [entry for entry in listed if entry[3] == "test"] or listed
    return _in_part(path, _splits_of(path)[-1] if is_split else "")


def _from_folder(folder: Path, fewest_classes: int) -> list[Listed]:
    """class/image or site/class/image, in `train` and `test` or without them."""
    splits = _splits_of(folder)
    listed = [entry for split in splits for entry in _in_part(folder, split)]
    classes = [{name for _, name, _, of in listed if of == split} for split in splits]
    if len(classes[0]) < fewest_classes:
        raise DataError(
            f"{folder / splits[0]} holds {len(classes[0])} class folders; it needs one sub-folder for each class"
        )
    if differing := sorted(classes[0] ^ classes[-1]):
        raise DataError(
            f"{folder}: train and test must have the same class folders; only one of them has {differing[0]}"
        )
    return listed


def _in_part(folder: Path, split: str) -> list[Listed]:
    """class/image or site/class/image in this part of a folder, which is the folder itself if `split` is empty."""
    inner = visible_folders(folder / split)
    sites = {entry.name: entry for entry in inner} if _are_sites(inner) else {"": folder / split}
    return [
        (image, class_folder.name, site, split)
        for site, place in sites.items()
        for class_folder in visible_folders(place)
        for image in images_of_class(class_folder, folder)
    ]


def _splits_of(folder: Path) -> list[str]:
    """The folders `train` and `test` if there are just these two, else only the folder itself."""
    inner = visible_folders(folder)
    names = [entry.name for entry in inner]
    if names == ["test", "train"]:
        return ["train", "test"]
    if any(entry.name.lower() in SPLITS and visible_folders(entry) for entry in inner):  # a class has no folders
        raise DataError(
            f"{folder} holds the folders {table.listed(names)}; name them train and test, and move or merge all others "
            "(examples for validation are held out of train by data.validation)"
        )
    return [""]


def _are_sites(folders: list[Path]) -> bool:
    """Whether these folders hold class folders, and no images of their own."""
    return bool(folders) and all(visible_folders(folder) and not _images_in(folder) for folder in folders)


def visible_folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _images_in(folder: Path) -> list[Path]:
    return sorted(
        entry for entry in folder.iterdir() if entry.suffix.lower() in SUFFIXES and not entry.name.startswith(".")
    )


def images_of_class(class_folder: Path, folder: Path) -> list[Path]:
    if inner := visible_folders(class_folder):
        raise DataError(
            f"{inner[0]} is a folder inside a class folder; images must lie directly in the folder of their class"
        )
    found = _images_in(class_folder)
    if not found:
        raise DataError(f"{class_folder} holds no images; remove the folder or add images of its class")
    for path in found:
        _check_place(path, folder)
    return found


def _check_place(path: Path, folder: Path) -> None:
    if not path.is_file():
        raise DataError(f"{path} is not a file, or a broken link; remove it")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{path} is a link to a place outside {folder}; replace it by a copy")


def _from_manifest(path: Path) -> list[Listed]:
    """A CSV file with the columns path (from its own folder) and label, and site and split if it has them."""
    try:
        with durable.ordinary(path, DataError).open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({one_line(error)})") from error
    if not rows or not {"path", "label"} <= rows[0].keys():
        raise DataError(f"{path} needs a line of titles with `path` and `label`, and a line for each image")
    listed: list[Listed] = []
    seen: set[Path] = set()
    for number, row in enumerate(rows, start=2):
        name, label, site, split = ((row.get(column) or "").strip() for column in _COLUMNS)
        image = path.parent / name
        if not label:
            raise DataError(f"{path}, line {number}: the label is empty")
        if split not in ("train", "test") and "split" in row:
            raise DataError(f"{path}, line {number}: the split is '{split}'; write train or test")
        if not site and split != "test" and "site" in row:
            raise DataError(f"{path}, line {number}: the site is empty; name one for every image for training")
        if not image.is_file() or not image.resolve().is_relative_to(path.parent.resolve()):
            raise DataError(f"{path}, line {number}: no file '{name}' in the folder of the manifest")
        if image.resolve() in seen:
            raise DataError(f"{path}, line {number}: '{name}' is listed twice; list every image once")
        seen.add(image.resolve())
        listed.append((image, label, site, split))
    return listed


_COLUMNS = ("path", "label", "site", "split")


def _decoded(
    paths: list[Path], folder: Path, root: Path, image_size: int | None, letterbox: bool
) -> NDArray[np.generic]:
    """The images, mapped from a cache file that is named after their listing."""
    key = hashlib.sha256(f"2 {image_size}{' letterbox' if letterbox else ''}\n".encode())
    for path in paths:
        status = path.stat()
        key.update(f"{path.relative_to(folder)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    cache = root / "decoded" / f"{key.hexdigest()[:32]}.npy"
    kinds = (np.uint8, np.uint16)
    try:
        return array_cache.mapped(cache, len(paths), 4, kinds)
    except (OSError, ValueError, EOFError):  # missing or damaged
        _decode(paths, cache, image_size, letterbox)
        return array_cache.mapped(cache, len(paths), 4, kinds)


def _decode(paths: list[Path], cache: Path, image_size: int | None, letterbox: bool) -> None:
    """Decode every image into the cache file, which appears only when complete."""
    modes_and_sizes = list(_each(paths, lambda image: (image.mode, image.size)))
    modes = [mode for mode, _ in modes_and_sizes]
    deep = modes[0] in _DEEP
    mode: Mode = "16 bits" if deep else "L" if all(found in _GREY for found in modes) else "RGB"
    width, height = modes_and_sizes[0][1] if image_size is None else (image_size, image_size)
    for path, (found, size) in zip(paths, modes_and_sizes, strict=True):
        if (found in _DEEP) != deep:
            raise DataError(f"{paths[0]} and {path} differ: one has 8 bits per pixel and one 16; convert one kind")
        if image_size is None and size != (width, height):
            raise DataError(
                f"images differ in size: {paths[0]} is {width}x{height} and {path} is {size[0]}x{size[1]}; "
                "resize all to one size, as with -c data.image_size=64, or 224 for a pretrained encoder "
                "(embed and deploy: --image-size 64)"
            )
    shape = (len(paths), 3 if mode == "RGB" else 1, height, width)
    blocks = _each(paths, lambda image: pixels(image, mode, (width, height), letterbox)[None])
    array_cache.write(cache, shape, np.uint16 if deep else np.uint8, blocks)


class UnreadableImage(DataError):
    pass


def _each(paths: list[Path], use: Any) -> Iterator[Any]:
    """What `use` makes of each image. After the last, raise one error for all that cannot be read."""
    wrong: dict[Path, UnreadableImage] = {}
    for path in paths:
        try:
            used = open_image(path, use)
        except UnreadableImage as error:
            wrong[path] = error
        else:
            yield used
    if wrong:
        first, *others = wrong
        more = f"; the same with {len(others)} more of {len(paths)} images: {table.listed(map(str, others), 3)}"
        raise UnreadableImage(f"{wrong[first]}{more if others else ''}") from wrong[first]


def pixels(image: Any, mode: Mode, size: tuple[int, int], letterbox: bool) -> NDArray[Any]:
    """One image as [channels, height, width]. An image of another size is stretched, or, with `letterbox`, keeps its
    proportions between black bars."""
    if (image.mode in _DEEP) != (mode == "16 bits"):
        raise ValueError(f"its mode is {image.mode}, but it must have {mode if mode == '16 bits' else '8 bits'}")
    image = image.convert("F" if mode == "16 bits" else mode)  # Pillow resizes 16 bits only as floats
    if image.size != size:
        from PIL import Image, ImageOps

        how = Image.Resampling.BILINEAR
        image = ImageOps.pad(image, size, how) if letterbox else image.resize(size, how)
    array: NDArray[Any] = np.asarray(image).reshape(size[1], size[0], -1).transpose(2, 0, 1)
    if mode != "16 bits":
        return array
    if array.min() < 0 or array.max() > 65535:
        raise ValueError("it has pixels below 0 or above 65535")
    deep: NDArray[Any] = np.rint(array).astype(np.uint16)
    return deep


def open_image(path: Path, use: Any) -> Any:
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise DataError(f"reading images needs Pillow; {install('images')}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # such as on the transparency of a palette
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(durable.ordinary(path, DataError), formats=FORMATS) as image:
                if image.mode == "F":
                    raise ValueError("its pixels are floats; convert them to 8 or 16 bits")
                if image.format != "PNG":  # no camera writes it, and Pillow would decode all of it for this
                    ImageOps.exif_transpose(image, in_place=True)  # a photo taken with the camera turned
                return use(image)
    except Exception as error:  # decoders raise anything for damaged files
        raise UnreadableImage(f"{path} cannot be read as an image ({one_line(error)}); replace or remove it") from error
