"""A party's own data, checked against the agreement of all: class names, shape, and something to learn from."""

from __future__ import annotations

from pathlib import Path

import torch

from redgrape.data import user_data
from redgrape.data.examples import Examples
from redgrape.data.sources import Source
from redgrape.deploy.setup.folder import DataAgreement
from redgrape.errors import DataError
from redgrape.runs import durable

_SEED = 0  # for a site's held-out test set; the same in every run, so that none trains on another's test set


def load(path: Path, cache: Path, agreement: DataAgreement, *, hold_out: bool) -> tuple[Examples, Examples]:
    """Training and test examples with the numbers of the agreed classes. Data without a test set gives some examples
    for one if `hold_out`, else it has none."""
    if not path.exists():
        raise DataError(f"there is no '{path}'; name a folder with a sub-folder a class, or an .npz with x and y")
    size = agreement.image_size if path.is_dir() else None
    if path.is_dir():
        with durable.storage_errors("write", cache):
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)  # decoded images are as private as the data
            cache.chmod(0o700)
    source = user_data.load(path, cache, seed=_SEED, image_size=size, hold_out=hold_out, fewest_classes=1)
    return _agreed(source.train, source, agreement, path), _agreed(source.test, source, agreement, path)


def load_all(path: Path, cache: Path, agreement: DataAgreement) -> Examples:
    """All examples of a set that nobody trains on, or that belongs to the server."""
    if path.suffix == ".npz" or path.is_dir():
        train, test = load(path, cache, agreement, hold_out=False)
        return test if len(test) else train
    raise DataError(f"'{path}' is neither a folder of images nor an .npz file")


def _agreed(examples: Examples, source: Source, agreement: DataAgreement, path: Path) -> Examples:
    numbers = {name: c for c, name in enumerate(agreement.classes)}
    held = torch.bincount(examples.labels, minlength=len(source.class_names))
    table = torch.zeros(len(source.class_names), dtype=torch.int64)
    for c, name in enumerate(source.class_names):
        if name in numbers:
            table[c] = numbers[name]
        elif held[c]:
            raise DataError(
                f"'{path}' holds the class '{name[:100]}', which is none of those agreed on: "
                f"{', '.join(agreement.classes[:20])}{' ...' if len(agreement.classes) > 20 else ''}"
            )
    shape, kind = tuple(examples.x.shape[1:]), "uint8" if examples.x.dtype == torch.uint8 else "float"
    if shape != agreement.shape:
        hint = "; data.image_size resizes images" if len(shape) == 3 and path.is_dir() else ""
        raise DataError(f"'{path}' holds inputs of shape {list(shape)}, and agreed is {list(agreement.shape)}{hint}")
    if kind != agreement.input:
        raise DataError(f"'{path}' holds {examples.x.dtype}, and agreed is {agreement.input}; convert it")
    agreed = Examples(examples.x, table[examples.y], examples.pixels, examples.augment, examples.rows, examples.source)
    agreed.check(len(agreement.classes), str(path))
    return agreed
