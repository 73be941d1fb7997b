"""Every model is a Net: the paper's representation encoder P and linear classifier W."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, encoder: nn.Module, classifier: nn.Linear) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(self.encoder(x)))
