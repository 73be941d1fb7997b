"""The federation as one party knows it: the number of sites, the format of their data, and only its own examples."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from redgrape.data.examples import Examples
from redgrape.data.federation import Declared, Groups
from redgrape.deploy.setup.folder import DataAgreement
from redgrape.errors import DataError
from redgrape.exchange.checks import UNDECLARED


class PartialFederation:
    """`own`: the number and the training examples of this party, if it is a site. `test`: its own test set. `shape`: of
    what clients train on, if it is not that of the agreement. `joined` holds what sites declare."""

    def __init__(
        self,
        agreement: DataAgreement,
        num_clients: int,
        *,
        own: tuple[int, Examples] | None = None,
        test: Examples | None = None,
        auxiliary: Examples | None = None,
        tail: tuple[str, ...] = (),
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.num_clients, self.num_classes = num_clients, len(agreement.classes)
        self.class_names, self.input_shape = list(agreement.classes), shape or agreement.shape
        self._own, self._agreement = own, agreement
        self.evaluated_elsewhere = test is None
        nothing = Examples(torch.zeros(0, *self.input_shape), torch.zeros(0, dtype=torch.int64))
        self.test = nothing if test is None else test
        self.validation: Examples | None = None
        self.auxiliary = auxiliary
        numbers = [agreement.classes.index(name) for name in tail]
        self.groups = Groups.by_count([0] * self.num_classes, numbers) if numbers else Groups((), (), ())
        self.joined: dict[int, Declared] = {}

    def client(self, k: int) -> Examples:
        if self._own is None or self._own[0] != k:
            raise DataError(f"the examples of site {k} are not here")
        return self._own[1]

    def size(self, k: int) -> int:
        """1 for another party: its size is not known here."""
        return len(self._own[1]) if self._own is not None and self._own[0] == k else 1

    def declared(self, k: int) -> Declared:
        return self.joined.get(k, UNDECLARED)

    def sample(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(2, *self.input_shape, dtype=dtype)

    def fingerprint(self) -> str:
        """The fingerprint of the agreement. Who holds what is not known."""
        agreement = self._agreement
        agreed: list[Any] = [self.num_clients, self.class_names, list(agreement.shape), agreement.input]
        agreed += [] if agreement.label is None else [agreement.label, agreement.numbers, agreement.categories]
        return hashlib.sha256(json.dumps(agreed).encode()).hexdigest()
