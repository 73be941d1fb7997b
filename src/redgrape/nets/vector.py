"""Nets that flatten examples of any shape, with PyTorch's default initialisation."""

from __future__ import annotations

import math

from torch import nn

from redgrape.nets.net import Net


def mlp(shape: tuple[int, ...], num_classes: int) -> Net:
    """two hidden layers of 128 and 64 units

    For 784 inputs and 10 classes: 100,480 + 8,256 + 650 = 109,386 parameters.
    """
    encoder = nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), 128),
        nn.ReLU(inplace=True),
        nn.Linear(128, 64),
        nn.ReLU(inplace=True),
    )
    return Net(encoder, nn.Linear(64, num_classes))


def linear(shape: tuple[int, ...], num_classes: int) -> Net:
    """a linear classifier on the inputs themselves

    For 784 inputs and 10 classes: 7,850 parameters, all of them the classifier's.
    """
    return Net(nn.Flatten(), nn.Linear(math.prod(shape), num_classes))
