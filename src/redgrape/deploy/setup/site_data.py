"""A party's own data, checked against the agreement of all: class names, shape, and something to learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from redgrape.data import user_data
from redgrape.data.examples import Examples
from redgrape.data.sources import Source
from redgrape.data.table import SUFFIXES, is_table, listed, read
from redgrape.deploy.setup.folder import DataAgreement, SiteFolder
from redgrape.errors import DataError
from redgrape.runs import durable

_SEED = 0  # for a site's held-out test set; the same in every run, so that none trains on another's test set


def of_site(folder: SiteFolder, path: Path) -> tuple[Examples, Examples]:
    """A site's training and test examples; DataError if it cannot take part with them."""
    options = folder.options
    train, test = load(path, folder.cache, options.data, hold_out=options.evaluates)
    if not len(train):
        raise DataError(f"'{path}' holds no training example; a site needs at least one to take part")
    if options.evaluates and not len(test):
        raise DataError(
            f"'{path}' holds no test example, and models are evaluated at the sites; a class with two examples gives "
            "one"
        )
    return train, test


def load(path: Path, cache: Path, agreement: DataAgreement, *, hold_out: bool) -> tuple[Examples, Examples]:
    """Training and test examples with the numbers of the agreed classes. Data without a test set gives some examples
    for one if `hold_out`, else it has none."""
    if not path.exists():
        raise DataError(f"there is no '{path}'; name a folder with a sub-folder a class, or an .npz with x and y")
    if agreement.label is not None:
        source = _table(path, agreement, hold_out)
    else:
        size = agreement.image_size if path.is_dir() else None
        with durable.storage_errors("write", cache):  # decoded images and features are as private as the data
            cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            cache.chmod(0o700)
        source = user_data.load(path, cache, seed=_SEED, image_size=size, hold_out=hold_out, fewest_classes=1)
    return _agreed(source.train, source, agreement, path), _agreed(source.test, source, agreement, path)


def load_all(path: Path, cache: Path, agreement: DataAgreement) -> Examples:
    """All examples of a set that nobody trains on, or that belongs to the server."""
    if path.suffix == ".npz" or path.is_dir() or is_table(path.name):
        train, test = load(path, cache, agreement, hold_out=False)
        return test if len(test) else train
    raise DataError(f"'{path}' is neither a folder of images nor an .npz file nor a table")


def _table(path: Path, agreement: DataAgreement, hold_out: bool) -> Source:
    """The rows of a table, unscaled: how, is known when all sites have sent their sums."""
    if path.is_dir() or not is_table(path.name):
        raise DataError(f"'{path}' is no table, and one was agreed on; name a file ({', '.join(SUFFIXES)})")
    columns, table = agreement.columns(), read(path)
    for name, agreed in agreement.categories.items():
        if unknown := [value for value in table[name].values if value and value not in agreed]:
            raise DataError(
                f"'{path}' holds '{unknown[0][:40]}' in column '{name}', which is none of the categories agreed on: "
                f"{listed(agreed)}; leave the cell empty, or agree on it in deploy.toml and every site.toml"
            )
    class_names, labels = table.names(columns.label, "class")
    test = user_data.held_out_rows(labels, len(class_names), _SEED) if hold_out else np.zeros(0, np.int64)
    inputs: Any = columns.inputs(table, np.float64)
    everything = Examples(inputs, labels)  # type: ignore[arg-type]  # takes arrays
    train = everything.take(np.setdiff1d(np.arange(len(table)), test))
    return Source(path.stem, train, everything.take(test), class_names)


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
        resized = "; resize the images, or set data.image_size in deploy.toml and every site.toml"
        hint = resized if len(shape) == 3 and path.is_dir() else ""
        raise DataError(f"'{path}' holds inputs of shape {list(shape)}, and agreed is {list(agreement.shape)}{hint}")
    if kind != agreement.input and agreement.label is None:
        raise DataError(f"'{path}' holds {examples.x.dtype}, and agreed is {agreement.input}; convert it")
    agreed = Examples(examples.x, table[examples.y], examples.pixels, examples.augment, examples.rows, examples.source)
    agreed.check(len(agreement.classes), str(path))
    return agreed
