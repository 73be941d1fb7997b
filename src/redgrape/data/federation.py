"""A federation: which client holds which training examples, and the evaluation data, which no client ever sees."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from redgrape.data.examples import WHITE, Examples
from redgrape.data.own import as_examples
from redgrape.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from redgrape.data.columns import Columns

    Rows = NDArray[np.int64]


MANY = 100  # from this many classes on, classes are also grouped by their number of training examples


@dataclass(frozen=True)
class Groups:
    """Head, middle and tail: classes by training count, the first 30 % and the last 30 % (as in the paper's tables).
    If `tail` is given, as in the binary setting, those classes are the tail and all others the head. by_shots: with
    many classes also those with more than 100 training examples, with 20 to 100, and with fewer than 20."""

    head: tuple[int, ...]
    middle: tuple[int, ...]
    tail: tuple[int, ...]
    by_shots: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def named(self) -> dict[str, tuple[int, ...]]:
        """All groups that have classes."""
        groups = {"head": self.head, "middle": self.middle, "tail": self.tail, **self.by_shots}
        return {name: classes for name, classes in groups.items() if classes}

    @classmethod
    def by_count(cls, counts: Sequence[int], tail: Sequence[int] | None = None) -> Groups:
        classes = len(counts)
        order = sorted(range(classes), key=lambda c: (-counts[c], c))
        shots = {}
        if classes >= MANY and any(counts):
            shots = {
                "many": tuple(c for c in order if counts[c] > 100),
                "medium": tuple(c for c in order if 20 <= counts[c] <= 100),
                "few": tuple(c for c in order if counts[c] < 20),
            }
        if tail is not None:
            cut = set(tail)
            return cls(tuple(c for c in order if c not in cut), (), tuple(c for c in order if c in cut), shots)
        first_tail = 7 * classes // 10
        head = max(1, 3 * classes // 10) if classes > 1 else 0
        return cls(tuple(order[:head]), tuple(order[head:first_tail]), tuple(order[max(head, first_tail) :]), shots)


@dataclass(frozen=True)
class Declared:
    """What a client declared when it joined: its number of examples, their numbers per class if disclosed, and its name
    if it has one."""

    examples: int
    class_counts: Tensor | None = None
    name: str = ""

    def can_hold(self, counts: Tensor, classes: Tensor) -> bool:
        """Whether the client can hold these numbers of examples of these classes."""
        held = self.examples if self.class_counts is None else self.class_counts[classes]
        return bool((counts <= held).all()) and int(counts.sum()) <= self.examples


class ClientData(Protocol):
    """What an engine needs from a federation: the examples of the clients it runs, and those for evaluation."""

    @property
    def num_clients(self) -> int: ...
    @property
    def num_classes(self) -> int: ...
    @property
    def test(self) -> Examples: ...
    @property
    def validation(self) -> Examples | None: ...
    def client(self, k: int) -> Examples: ...
    def size(self, k: int) -> int: ...


class FederatedData(ClientData, Protocol):
    """What training needs from a federation. The clients' examples may be elsewhere."""

    @property
    def auxiliary(self) -> Examples | None: ...
    @property
    def groups(self) -> Groups: ...
    @property
    def input_shape(self) -> tuple[int, ...]: ...
    @property
    def evaluated_elsewhere(self) -> bool:
        """Whether the test set is at the clients, not here."""
        ...

    def declared(self, k: int) -> Declared:
        """What a client has declared about itself; its updates are checked against it."""
        ...

    def sample(self, dtype: torch.dtype) -> torch.Tensor:
        """Two inputs like the clients', to try a net on."""
        ...


@dataclass(frozen=True)
class Pooled:
    """One array of training examples, and each client's rows in it."""

    train: Examples
    parts: Sequence[Rows]

    @classmethod
    def of(cls, clients: Sequence[Examples]) -> Pooled:
        if not clients:
            raise DataError("a federation without clients; pass at least one")
        first = clients[0]
        for k, client in enumerate(clients):
            if (_kind(client), client.x.dtype, client.augment) != (_kind(first), first.x.dtype, first.augment):
                raise DataError(
                    f"client {k}'s inputs are {_kind(client)} ({client.x.dtype}), and client 0's {_kind(first)} "
                    f"({first.x.dtype}); they, and their augmentation, must agree"
                )
        x = torch.cat([c.x if c.rows is None else c.x[c.rows] for c in clients])
        pooled = Examples(x, torch.cat([c.labels for c in clients]), first.pixels, first.augment)
        ends = np.cumsum([len(c) for c in clients])
        return cls(pooled, [np.arange(end - len(c), end) for c, end in zip(clients, ends, strict=True)])


class Federation:
    """Clients 0 .. K-1 with their training examples, and a test set. A validation set and a small balanced auxiliary
    set for the server are optional. Examples may also be given as (x, y) or as a data set of torch or Hugging Face.
    `columns`: how rows of a table became the inputs, if they are from one. `sites`: the name of each test or validation
    example's site, empty if it is not known.

    Federation(clients=[Examples(x0, y0), Examples(x1, y1)], test=Examples(xt, yt), num_classes=4)
    """

    evaluated_elsewhere = False

    def __init__(
        self,
        clients: Sequence[Examples] | Pooled,
        test: Examples,
        num_classes: int,
        *,
        validation: Examples | None = None,
        auxiliary: Examples | None = None,
        class_names: Sequence[str] | None = None,
        client_names: Sequence[str] | None = None,
        tail: Sequence[int] | None = None,
        columns: Columns | None = None,
    ) -> None:
        pooled = clients if isinstance(clients, Pooled) else Pooled.of([as_examples(c, "a client") for c in clients])
        test = as_examples(test, "the test set")
        validation = None if validation is None else as_examples(validation, "the validation set")
        auxiliary = None if auxiliary is None else as_examples(auxiliary, "the auxiliary set")
        train, parts = pooled.train, pooled.parts
        if not isinstance(num_classes, int) or num_classes < 2:
            raise DataError(f"num_classes is {num_classes}; there must be at least 2 classes")
        if class_names is not None and len(class_names) != num_classes:
            raise DataError(f"{len(class_names)} class names for {num_classes} classes")
        if class_names is not None:
            check_class_names(class_names, "class_names")
        if client_names is not None and len(client_names) != len(parts):
            raise DataError(f"{len(client_names)} client names for {len(parts)} clients")
        if not any(len(part) for part in parts):
            raise DataError("no client holds any example")
        rows = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
        if rows.min() < 0 or rows.max() >= len(train):
            raise DataError(f"a client's rows reach from {rows.min()} to {rows.max()}; there are {len(train)} examples")
        if np.bincount(rows).max() > 1:
            raise DataError("an example belongs to two clients, or twice to one; every row may be named once")
        others = (("test", test), ("validation", validation), ("auxiliary", auxiliary))
        for name, examples in others:
            if examples is not None and _kind(examples) != _kind(train):
                raise DataError(
                    f"{name} inputs are {_kind(examples)}, and training inputs {_kind(train)}; they must agree"
                )
        if tail is not None and not all(0 <= c < num_classes for c in tail):
            raise DataError(f"tail names the classes {list(tail)}; there are the classes 0 to {num_classes - 1}")
        for name, examples in (("training", train), *others):
            if examples is not None:
                examples.check(num_classes, f"{name} data")
        self.train = train
        self.parts = [np.asarray(part, dtype=np.int64) for part in parts]
        self.test = test
        self.validation = validation
        self.auxiliary = auxiliary
        self.columns = columns
        self.empty_columns: list[str] = []  # of a table: no training row has a value, so they are no inputs
        self.sites: dict[str, NDArray[np.str_]] = {}
        self.notes: list[str] = []  # for the user, such as sites that are not used
        self.num_classes = num_classes
        self.class_names = list(class_names) if class_names is not None else [str(c) for c in range(num_classes)]
        self.client_names = [str(k) for k in (range(len(parts)) if client_names is None else client_names)]
        self.class_counts = np.bincount(train.labels.numpy()[rows], minlength=num_classes)  # over all clients
        self.groups = Groups.by_count(self.class_counts.tolist(), tail)

    @classmethod
    def from_parts(
        cls,
        train: Examples,
        parts: Sequence[Rows],
        test: Examples,
        num_classes: int,
        *,
        validation: Examples | None = None,
        auxiliary: Examples | None = None,
        class_names: Sequence[str] | None = None,
        client_names: Sequence[str] | None = None,
        tail: Sequence[int] | None = None,
        columns: Columns | None = None,
    ) -> Federation:
        """The same from one array of training examples and each client's rows in it, without a copy."""
        return cls(
            Pooled(train, parts),
            test,
            num_classes,
            validation=validation,
            auxiliary=auxiliary,
            class_names=class_names,
            client_names=client_names,
            tail=tail,
            columns=columns,
        )

    def __repr__(self) -> str:
        training = sum(map(len, self.parts))
        return (
            f"Federation({self.num_clients} clients, {self.num_classes} classes, {training} training and "
            f"{len(self.test)} test examples)"
        )

    @property
    def num_clients(self) -> int:
        return len(self.parts)

    @cached_property
    def client_counts(self) -> Rows:
        """The number of training examples of each client and class. With many of both, this is large."""
        return np.stack([self._counts_of(k) for k in range(self.num_clients)])

    def _counts_of(self, k: int) -> Rows:
        return np.bincount(self.train.labels.numpy()[self.parts[k]], minlength=self.num_classes)

    def counts(self, split: Literal["test", "validation"]) -> list[int] | None:
        """The number of evaluation examples of each class."""
        examples: Examples | None = getattr(self, split)
        return None if examples is None else torch.bincount(examples.labels, minlength=self.num_classes).tolist()

    def client(self, k: int) -> Examples:
        return self.train.take(self.parts[k])

    def size(self, k: int) -> int:
        return len(self.parts[k])

    def declared(self, k: int) -> Declared:
        counts = torch.from_numpy(self._counts_of(k))
        return Declared(int(counts.sum()), counts)

    def sample(self, dtype: torch.dtype) -> torch.Tensor:
        return self.test.inputs(torch.zeros(2, dtype=torch.int64), dtype)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.x.shape[1:])

    def with_inputs(self, change: Callable[[Examples], Examples]) -> Federation:
        """The same clients and examples, with changed inputs."""
        changed = copy.copy(self)
        changed.train, changed.test = change(self.train), change(self.test)
        changed.validation = None if self.validation is None else change(self.validation)
        changed.auxiliary = None if self.auxiliary is None else change(self.auxiliary)
        return changed

    def fingerprint(self) -> str:
        """SHA-256 over every client's rows and labels. It identifies a split, for citing it."""
        digest = hashlib.sha256(str(self.num_classes).encode())
        labels = self.train.labels.numpy()
        for part in self.parts:
            digest.update(
                len(part).to_bytes(8, "little") + part.astype("<i8").tobytes() + labels[part].astype("<i8").tobytes()
            )
        return digest.hexdigest()


def check_class_names(names: Sequence[str], what: str) -> None:
    """Raise DataError if a class has no name, or two have the same."""
    if any(not name.strip() for name in names):
        raise DataError(f"{what}: class {[bool(name.strip()) for name in names].index(False)} has an empty name")
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise DataError(f"{what}: two classes are named '{twice}'; give each a name of its own")


def _kind(examples: Examples) -> str:
    """The shape of an input and the scaling of its pixels, which must be the same for all that share a net."""
    shape = "x".join(map(str, examples.x.shape[1:]))
    if examples.x.dtype in WHITE:
        return f"{shape} pixels with mean {examples.pixels.mean} and std {examples.pixels.std}"
    return f"{shape} floats"
