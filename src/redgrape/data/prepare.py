"""Makes a federation from options: load, hold out a validation set, make the long tail, divide among clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from redgrape.data import longtail
from redgrape.data.augment import Augment
from redgrape.data.columns import Columns, Roles
from redgrape.data.examples import WHITE, Examples, Pixels
from redgrape.data.federation import Federation, Groups
from redgrape.data.images import LARGEST_SIDE
from redgrape.data.partition import check_kind, client_names, partition
from redgrape.data.sources import AS_THEY_ARE, READERS, Source, load
from redgrape.data.table import SUFFIXES, is_table, not_read
from redgrape.errors import ConfigError, DataError, unknown
from redgrape.validation import LARGEST, Strict, as_tuple

Rows = NDArray[np.int64]
CUT = (0, 7, 8)  # the classes that binary imbalance cuts in the paper
AT_SITES = "sites"  # the source of a deployed run


Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]


def _known_partition(kind: str) -> str:
    try:
        return check_kind(kind)
    except ConfigError as error:
        raise ValueError(str(error)) from error


class DataOptions(Strict):
    """Which data, how imbalanced, and how divided among the clients. A user's own data keeps its imbalance unless
    another is set."""

    source: str = Field(
        "digits",
        description="digits, mnist, fashion_mnist, cifar10, cifar100, fars, a path (image folder, manifest.csv, .npz, "
        "or a table: .csv, .parquet), or a function: file.py:function",
    )
    label: str | None = Field(None, description="the column of a table that holds the classes")
    site: str | None = Field(None, description="the column of a table that names each row's site; it divides the data")
    test: str | None = Field(
        None, description="the column of a table that says test or train, or a value of one, as in fold=3"
    )
    drop: Names = Field((), description="columns of a table that are not inputs, such as patient numbers")
    categorical: Names = Field((), description="columns of a table whose numbers are codes, not quantities")
    image_size: int | None = Field(
        None, ge=1, le=LARGEST_SIDE, description="resize a folder's images to squares with this side, in pixels"
    )
    letterbox: bool = Field(False, description="resized images keep their proportions, between black bars")
    normalise: bool = Field(
        False, description="shift and scale each channel to mean 0 and deviation 1 over the clients' images"
    )
    imbalance: Literal["exponential", "binary", "natural"] = Field(
        "exponential",
        description="exponential: sizes fall from class to class; binary: the tail classes are cut; natural: as it is",
    )
    ir: float = Field(50.0, ge=1, le=LARGEST, description="imbalance ratio: largest class over smallest")
    tail_classes: Annotated[tuple[Annotated[int, Field(le=10**6)] | str, ...], BeforeValidator(as_tuple)] = Field(
        CUT, description="the tail, by names or numbers: binary imbalance cuts it; else the default means by count"
    )
    head_cap: int | None = Field(None, ge=1, le=10**9, description="no class keeps more training examples than this")
    partition: Annotated[str, AfterValidator(_known_partition)] = Field(
        "class_dirichlet",
        description="class_dirichlet, prior_dirichlet, creff, iid, client_lt (the tail with few clients), natural (the "
        "clients that the data names), like:MATRIX (fed_isic2019, fars or a .csv), or a function: file.py:function",
    )
    alpha: float = Field(1.0, ge=1e-6, le=LARGEST, description="Dirichlet concentration: small is more skewed")
    clients: int = Field(10, ge=1, le=10**6, description="number of clients; natural and like: bring their own")
    pooled: bool = Field(False, description="one client with all clients' examples: what no federation could do")
    alone: str | None = Field(None, description="only the client of this name: what it reaches without the others")
    validation: int = Field(0, ge=0, le=10**9, description="training examples of each class held out for validation")
    auxiliary: int = Field(
        0,
        ge=0,
        le=10**9,
        description="examples of each class held out for methods that need them, before the long tail is cut",
    )
    crop: int = Field(0, ge=0, le=1000, description="augmentation: pad by this many pixels and cut a random window")
    flip: bool = Field(False, description="augmentation: mirror images at random")
    cutout: int = Field(0, ge=0, le=10_000, description="augmentation: blank a random square with this side, in pixels")

    @model_serializer(mode="wrap")
    def _without_unused(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Younger keys are there only if they are set, so that other experiments keep their hashes."""
        younger = {"letterbox", "normalise", "pooled", "alone", *vars(Roles())}
        return {key: value for key, value in dump(self).items() if value or key not in younger}

    @model_validator(mode="before")
    @classmethod
    def _own_data_is_imbalanced_and_divided_already(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        source, known = values.get("source", "digits"), {}
        if source in AS_THEY_ARE or (isinstance(source, str) and source not in READERS):
            known["imbalance"] = "natural"
        if source in AS_THEY_ARE or values.get("site") is not None:
            known["partition"] = "natural"
        return {**known, **values}

    @model_validator(mode="after")
    def _only_tables_have_columns(self) -> Self:
        if not is_table(self.source) and self.roles != Roles():
            name = next(key for key, value in vars(self.roles).items() if value)
            raise ValueError(
                not_read(self.source)
                or f"{name} is for tables ({', '.join(SUFFIXES)}), but '{self.source}' is none; leave it out"
            )
        if self.pooled and self.alone is not None:
            raise ValueError(f"pooled and alone='{self.alone}' exclude each other; set one of them")
        return self

    @property
    def is_federated(self) -> bool:
        """Whether several clients take part, as far as this is known before the data is read."""
        return not self.pooled and self.alone is None

    @property
    def roles(self) -> Roles:
        return Roles(self.label, self.site, self.test, self.drop, self.categorical)


def prepare(options: DataOptions, seed: int, root: Path | None = None, source: Source | None = None) -> Federation:
    """The federation for these options. Its parts are rows of the source's training examples, which are not copied.
    `source`: in place of the one that the options name."""
    if options.source == AT_SITES:
        raise ConfigError(
            "the data of this run is at the sites of a deployment; continue with `redgrape deploy run` (a folder of "
            f"this name is ./{AT_SITES})"
        )
    if source is None:
        size, letterbox = options.image_size, options.letterbox
        source = load(options.source, root, seed=seed, image_size=size, letterbox=letterbox, roles=options.roles)
    num_classes = len(source.class_names)
    labels = source.train.labels.numpy()
    never_trained = np.setdiff1d(source.test.labels.numpy(), labels)
    if len(never_trained):
        raise DataError(
            f"{options.source}: class '{source.class_names[never_trained[0]]}' has test examples but no training "
            "examples; remove them, or add training examples"
        )

    # before the long tail, so that both sets are balanced if the data allows it
    everything = np.arange(len(labels))
    held_out = _balanced(labels, everything, num_classes, options.validation, seed, "validation")
    remaining = np.setdiff1d(everything, held_out)
    auxiliary = _balanced(labels, remaining, num_classes, options.auxiliary, seed, "auxiliary")
    remaining = np.setdiff1d(remaining, auxiliary)

    tail = _tail(options, source.class_names)
    sizes = _sizes(options, np.bincount(labels[remaining], minlength=num_classes).tolist(), tail)
    rows = remaining[longtail.choose(labels[remaining], sizes, seed)]
    natural = None if source.clients is None else source.clients[rows]
    parts = partition(labels[rows], options.partition, options.clients, options.alpha, seed, natural, tail)
    names = client_names(options.partition, natural)
    parts = [rows[part] for part in parts]
    groups = Groups.by_count(np.bincount(labels[rows], minlength=num_classes).tolist(), tail)
    if options.pooled:
        parts, names = [rows], ["all"]
    if options.alone is not None:
        parts, names = [_part_of(options.alone, parts, names)], [options.alone]
    train, test, columns = _fitted(source, parts)
    federation = Federation.from_parts(
        replace(train, augment=augmentation(options, train.x.dim())),
        parts,
        test,
        num_classes,
        validation=train.take(held_out) if options.validation else None,
        auxiliary=train.take(auxiliary) if options.auxiliary else None,
        class_names=source.class_names,
        client_names=names,
        tail=tail,
        columns=columns,
    )
    federation.groups = groups  # a client alone is judged by the head and tail of all
    if source.raw is not None and columns is not None:
        fitted = {column.name for column in columns.columns}
        federation.empty_columns = [name for name in source.raw.is_number if name not in fitted]
    if source.test_clients is not None:
        federation.sites["test"] = source.test_clients.astype(str)
    named = 0 if source.clients is None else len(np.unique(source.clients))
    if named > 1 and options.partition != "natural" and options.is_federated:
        federation.notes.append(
            f"the data names {named} sites, but {len(parts)} clients are simulated; --partition natural uses the sites"
        )
    if source.clients is not None and options.validation:
        federation.sites["validation"] = source.clients[held_out].astype(str)
    return normalised(federation, source.name) if options.normalise else federation


def _part_of(name: str, parts: Sequence[Rows], names: Sequence[str] | None) -> Rows:
    """The rows of the client of this name, or of this number if clients have no names."""
    known = dict(zip(names or map(str, range(len(parts))), parts, strict=True))
    if name not in known:
        raise unknown("client", name, known)
    return known[name]


def _fitted(source: Source, parts: Sequence[Rows]) -> tuple[Examples, Examples, Columns | None]:
    """The training and test examples. The columns of a table are fitted to the clients' rows alone."""
    if source.raw is None:
        return source.train, source.test, None
    in_table = source.train.rows
    assert in_table is not None, "a table gives views of its rows"
    columns = Columns.fit(source.raw, [in_table.numpy()[part] for part in parts])
    x: Any = columns.inputs(source.raw.table)
    return Examples(x, source.train.y, rows=in_table), Examples(x, source.test.y, rows=source.test.rows), columns


def normalised(federation: Federation, name: str) -> Federation:
    """The same with pixels that have mean 0 and deviation 1 in each channel, over the clients' images."""
    x = federation.train.x
    if x.dtype not in WHITE or x.dim() != 4:
        raise ConfigError(f"normalise is for images, but {name} holds vectors; leave it out")
    images = replace(federation.train.take(np.sort(np.concatenate(federation.parts))), pixels=Pixels())
    total = np.zeros(x.shape[1])
    squares = np.zeros(x.shape[1])
    for rows in torch.arange(len(images)).split(1024):  # in blocks: x may be larger than memory
        block = images.inputs(rows, torch.float64)
        total += block.sum(dim=(0, 2, 3)).numpy()
        squares += block.square().sum(dim=(0, 2, 3)).numpy()
    n = len(images) * math.prod(x.shape[2:])
    mean = total / n
    std = np.sqrt(np.maximum(squares / n - mean**2, 0))
    scaling = Pixels(tuple(mean.tolist()), tuple(np.where(std > 0, std, 1).tolist()))  # a constant channel stays so
    return federation.with_inputs(lambda examples: replace(examples, pixels=scaling))


def _balanced(labels: Rows, rows: Rows, num_classes: int, size: int, seed: int, purpose: str) -> Rows:
    """`size` of these rows per class, but at most half of a class."""
    counts = np.bincount(labels[rows], minlength=num_classes)
    return rows[longtail.choose(labels[rows], np.minimum(size, counts // 2).tolist(), seed, purpose)]


def _tail(options: DataOptions, class_names: Sequence[str]) -> list[int] | None:
    """The tail that the options name, as numbers. None: the classes with the fewest examples."""
    if options.imbalance != "binary" and options.tail_classes == CUT:
        return None
    for c in options.tail_classes:
        if c not in class_names if isinstance(c, str) else not 0 <= c < len(class_names):
            some = ", ".join(map(repr, class_names[:10])) + (", ..." if len(class_names) > 10 else "")
            hints = [
                f"; write a name with a comma as -c 'data.tail_classes=[\"{n}\"]'" for n in class_names if "," in n
            ]
            raise ConfigError(
                f"data.tail_classes names {c!r}, which is no class of {options.source}; choose from {some}"
                + "".join(hints[:1])
            )
    return [class_names.index(c) if isinstance(c, str) else c for c in options.tail_classes]


def _sizes(options: DataOptions, counts: list[int], tail: Sequence[int] | None) -> list[int]:
    if options.imbalance == "exponential":
        return longtail.exponential(counts, options.ir, options.head_cap)
    if options.imbalance == "binary":
        assert tail is not None  # binary imbalance always has one
        return longtail.binary(counts, options.ir, tail, options.head_cap)
    return longtail.natural(counts, options.head_cap)


def augmentation(options: DataOptions, dimensions: int) -> Augment:
    augment = Augment(options.crop, options.flip, options.cutout)
    if augment != Augment() and dimensions != 4:
        raise ConfigError(f"crop, flip and cutout are for images, but {options.source} holds vectors; leave them out")
    return augment
