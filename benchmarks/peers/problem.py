"""What all contestants share: the saved problem, the nets, plain local training, and the lines they report.

run.py starts a contestant as `python contestant.py TASK`, TASK being a Task as JSON. The contestant trains task.rounds
rounds of FedAvg and prints one line of JSON for each, through Clock. Needs torch and numpy only, so that it runs in
every peer's environment.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TEST_BATCH = 256


@dataclass(frozen=True)
class Task:
    folder: str  # of .npy files: the data, each client's rows, and the initial weights of each net
    net: str
    epochs: int
    batch_size: int
    clients_per_round: int
    rounds: int
    evaluate: bool  # after every round, else after the last only
    seed: int
    processes: int  # that train clients
    threads: int  # of torch in each of them
    share: float = 1.0  # of each client's examples and of the test set
    lr: float = 0.01
    momentum: float = 0.9
    stack: int = 1  # clients trained as one

    @classmethod
    def from_command_line(cls) -> Task:
        return cls(**json.loads(sys.argv[1]))

    @property
    def num_clients(self) -> int:
        return len(parts(self.folder, self.share))

    def client(self, k: int) -> TensorDataset:
        return client(self.folder, self.share, k)

    def test(self) -> TensorDataset:
        x, y = examples(self.folder, "test")
        n = round(self.share * len(y))
        return TensorDataset(x[:n], y[:n])

    def initial_net(self) -> nn.Module:
        net = new_net(self.folder, self.net)
        net.load_state_dict(weights(self.folder, self.net))
        return net

    def scratch_net(self) -> nn.Module:
        """This process's own net, with whatever weights it was left with."""
        return scratch_net(self.folder, self.net)

    def is_evaluated(self, round: int) -> bool:
        return self.evaluate or round == self.rounds


class Net(nn.Module):
    def __init__(self, encoder: nn.Module, classifier: nn.Linear) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.encoder(x))
        return logits


def cnn(shape: torch.Size, classes: int) -> tuple[nn.Module, nn.Linear]:
    encoder = nn.Sequential(
        nn.Conv2d(shape[0], 32, 5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64 * (shape[1] // 4) * (shape[2] // 4), 512),
        nn.ReLU(inplace=True),
    )
    return encoder, nn.Linear(512, classes)


def mlp(shape: torch.Size, classes: int) -> tuple[nn.Module, nn.Linear]:
    encoder = nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), 128),
        nn.ReLU(inplace=True),
        nn.Linear(128, 64),
        nn.ReLU(inplace=True),
    )
    return encoder, nn.Linear(64, classes)


def linear(shape: torch.Size, classes: int) -> tuple[nn.Module, nn.Linear]:
    return nn.Flatten(), nn.Linear(math.prod(shape), classes)


NETS = {"cnn": cnn, "mlp": mlp, "linear": linear}


def new_net(folder: str, name: str) -> nn.Module:
    return Net(*NETS[name](examples(folder, "test")[0].shape[1:], 10))


scratch_net = functools.cache(new_net)


def weights(folder: str, net: str) -> dict[str, Tensor]:
    return {file.stem: torch.from_numpy(np.load(file)) for file in sorted((Path(folder) / net).glob("*.npy"))}


@functools.cache  # a worker process that is sent a function keeps what this module holds from call to call
def examples(folder: str, split: str) -> tuple[Tensor, Tensor]:
    """Inputs in [0, 1] and labels. They become floats once, before any round."""
    x, y = (torch.from_numpy(np.load(Path(folder) / f"{split}_{name}.npy")) for name in "xy")
    return x.float() / 255, y


@functools.cache
def parts(folder: str, share: float = 1.0) -> list[Tensor]:
    """Each client's rows of the training set, in an order drawn once."""
    rows, sizes = (torch.from_numpy(np.load(Path(folder) / f"{name}.npy")) for name in ("rows", "sizes"))
    return [part[: max(1, round(share * len(part)))] for part in rows.split(sizes.tolist())]


@functools.cache
def client(folder: str, share: float, k: int) -> TensorDataset:
    rows = parts(folder, share)[k]
    x, y = examples(folder, "train")
    return TensorDataset(x[rows], y[rows])


def train_locally(net: nn.Module, data: TensorDataset, task: Task) -> None:
    """What a user of any of these libraries writes: a DataLoader, SGD, cross-entropy."""
    optimizer = torch.optim.SGD(net.parameters(), lr=task.lr, momentum=task.momentum)
    batches = DataLoader(data, batch_size=task.batch_size, shuffle=True)
    net.train()
    for _ in range(task.epochs):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()


@torch.no_grad()
def accuracy(net: nn.Module, batches: DataLoader[tuple[Tensor, ...]]) -> float:
    net.eval()
    right = total = 0
    for x, y in batches:
        right += int((net(x).argmax(dim=1) == y).sum())
        total += len(y)
    return right / total


class Clock:
    """Splits the time since the last report into training and evaluation."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._begun = time.perf_counter()

    def trained(self) -> None:
        self._trained = time.perf_counter()

    def evaluated(self, accuracy: float | None) -> None:
        report(self._trained - self._begun, time.perf_counter() - self._trained, accuracy)
        self.start()


def report(train: float, evaluate: float, accuracy: float | None) -> None:
    print(json.dumps({"train": train, "evaluate": evaluate, "accuracy": accuracy}), flush=True)
