"""The federation as one party knows it: how many sites there are and what their data looks like, and of the examples
only those that are its own."""

from __future__ import annotations

import hashlib
import json

import torch

from redgrape.data.examples import Examples
from redgrape.data.federation import Declared, Groups
from redgrape.deploy.setup.folder import DataAgreement
from redgrape.errors import DataError
from redgrape.exchange.checks import MOST_EXAMPLES


class PartialFederation:
    """`own`: this party's training examples and its number, where it is a site. `test`: its own test set. What sites
    declare is put into `joined`."""

    def __init__(
        self,
        agreement: DataAgreement,
        num_clients: int,
        *,
        own: tuple[int, Examples] | None = None,
        test: Examples | None = None,
        auxiliary: Examples | None = None,
        tail: tuple[str, ...] = (),
    ) -> None:
        self.num_clients, self.num_classes = num_clients, len(agreement.classes)
        self.class_names, self.input_shape = list(agreement.classes), agreement.shape
        self._own, self._input = own, agreement.input
        self.evaluated_elsewhere = test is None
        nothing = Examples(torch.zeros(0, *agreement.shape), torch.zeros(0, dtype=torch.int64))
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
        """Of another party only that there is something; nothing is told by which a round could be planned."""
        return len(self._own[1]) if self._own is not None and self._own[0] == k else 1

    def declared(self, k: int) -> Declared:
        return self.joined.get(k, Declared(MOST_EXAMPLES))

    def sample(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(2, *self.input_shape, dtype=dtype)

    def fingerprint(self) -> str:
        """Of what is agreed; who holds what is not known."""
        agreed = [self.num_clients, self.class_names, list(self.input_shape), self._input]
        return hashlib.sha256(json.dumps(agreed).encode()).hexdigest()
