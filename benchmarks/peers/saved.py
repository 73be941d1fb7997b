"""Saves the problems that all contestants load: data, clients and initial weights as plain .npy files.

compute   MNIST-LT, IR 100, 10 clients (each class cut by Dir(1)), all sampled; the 10,000 test images
overhead  1,000 clients with 20 MNIST images each, 100 sampled
resnet56  4 clients with 320 random pictures of CIFAR's shape each
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from redgrape import nets
from redgrape.data import sources
from redgrape.data.prepare import DataOptions, prepare

SEED = 0


def save(setting: str, folder: Path, data_root: Path | None) -> None:
    x, y, parts, x_test, y_test = {"compute": _compute, "overhead": _overhead, "resnet56": _resnet56}[setting](
        data_root
    )
    random = np.random.default_rng(SEED)
    shuffled = [random.permutation(part) for part in parts]  # for peers that do not shuffle
    names = {"compute": ["cnn"], "overhead": ["mlp", "linear"], "resnet56": ["resnet56"]}[setting]
    arrays = {
        "train_x": x,
        "train_y": y,
        "rows": np.concatenate(shuffled),
        "sizes": np.array([len(part) for part in parts]),
        "test_x": x_test,
        "test_y": y_test,
        **{
            f"{name}/{key}": t.numpy()
            for name in names
            for key, t in nets.build(name, x.shape[1:], 10, SEED).state_dict().items()
        },
    }
    for name, array in arrays.items():
        file = folder / f"{name}.npy"
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, array)


def _compute(root: Path | None) -> tuple[Any, ...]:
    federation = prepare(DataOptions(source="mnist", ir=100.0, clients=10, alpha=1.0), SEED, root)
    rows = np.concatenate(federation.parts)
    ends = np.cumsum([len(part) for part in federation.parts])
    parts = np.split(np.arange(len(rows)), ends[:-1])
    train, test = federation.train, federation.test
    return train.x.numpy()[rows], train.y.numpy()[rows], parts, test.x.numpy(), test.y.numpy()


def _overhead(root: Path | None) -> tuple[Any, ...]:
    source = sources.load("mnist", root)
    rows = np.random.default_rng(SEED).permutation(len(source.train))[:20_000]
    x, y = source.train.x.numpy()[rows], source.train.y.numpy()[rows]
    return x, y, np.split(np.arange(20_000), 1_000), source.test.x.numpy(), source.test.y.numpy()


def _resnet56(root: Path | None) -> tuple[Any, ...]:
    random = np.random.default_rng(SEED)
    x = random.integers(0, 256, (4 * 320 + 256, 3, 32, 32), dtype=np.uint8)
    y = random.integers(0, 10, len(x))
    return x[:-256], y[:-256], np.split(np.arange(4 * 320), 4), x[-256:], y[-256:]


def training_flop(name: str, shape: tuple[int, ...]) -> float:
    """FLOP to train a net on one example: two for each multiply-add of a convolution or linear layer, once forward and
    twice backward (for the weights and for the inputs), except that nobody needs the gradient of the pictures."""
    macs: list[int] = []

    def count(layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        assert isinstance(layer.weight, torch.Tensor)
        macs.append(output[0].numel() * layer.weight[0].numel())

    net = nets.build(name, shape, 10, SEED).eval()
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(count)
    with torch.no_grad():
        net(torch.zeros(1, *shape))
    return 2.0 * (3 * sum(macs) - macs[0])
