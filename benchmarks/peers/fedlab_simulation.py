"""FedLab: its standalone simulation in one process, or its server and serial trainers in processes of their own.

Two classes are customised where its documentation says to: every client and round has a new optimizer (FedLab's own
trainer keeps one, whose momentum would pass from client to client), and the mean is weighted by examples.
"""

# ruff: noqa: E402  # torchvision is replaced before FedLab asks for it

from __future__ import annotations

import logging
import random
import socket
import subprocess
import sys
from unittest.mock import MagicMock

# FedLab imports torchvision for ready-made data sets, which nobody asks for here. It need not be installed.
sys.modules |= dict.fromkeys(("torchvision", "torchvision.datasets", "torchvision.transforms"), MagicMock())

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.client.manager import PassiveClientManager
from fedlab.core.network import DistNetwork
from fedlab.core.server.manager import SynchronousServerManager
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils.aggregator import Aggregators
from fedlab.utils.functional import evaluate
from fedlab.utils.serialization import SerializationTool
from problem import TEST_BATCH, Clock, Task, train_locally
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Trainer(SGDSerialClientTrainer):
    def __init__(self, task: Task, num_clients: int) -> None:
        super().__init__(task.initial_net(), num_clients)
        self.task = task

    def local_process(self, payload: list[Tensor], id_list: list[int]) -> None:
        torch.set_num_threads(self.task.threads)
        self.cache += [self.train(payload[0], self.task.client(k)) for k in id_list]

    def train(self, model_parameters: Tensor, data: TensorDataset) -> list[Tensor]:
        self.set_model(model_parameters)
        train_locally(self._model, data, self.task)
        return [self.model_parameters, torch.tensor([float(len(data))])]


class Handler(SyncServerHandler):
    def __init__(self, task: Task) -> None:
        super().__init__(task.initial_net(), task.rounds, task.clients_per_round / task.num_clients)
        self.task = task
        self.test = DataLoader(task.test(), batch_size=TEST_BATCH)
        self.clock = Clock()

    def global_update(self, buffer: list[list[Tensor]]) -> None:
        models, sizes = zip(*buffer, strict=True)
        mean = Aggregators.fedavg_aggregate(list(models), torch.cat(sizes))
        SerializationTool.deserialize_model(self._model, mean)
        self.clock.trained()
        accuracy = None
        if self.task.is_evaluated(self.round + 1):
            _, accuracy = evaluate(self._model, torch.nn.CrossEntropyLoss(), self.test)
        self.clock.evaluated(accuracy)


class Standalone(StandalonePipeline):
    def evaluate(self) -> None:
        pass  # the handler has done it


def serve(task: Task) -> None:
    """The server here, and a process for each trainer, started as a script of its own as in FedLab's tutorials."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = range(1, task.processes + 1)
    trainers = [subprocess.Popen([sys.executable, *sys.argv, str(rank), port]) for rank in ranks]
    SynchronousServerManager(network(task, 0, port), Handler(task), mode="GLOBAL").run()
    for trainer in trainers:
        trainer.wait()


def train(task: Task, rank: int, port: str) -> None:
    """The clients of one trainer: FedLab gives each an unbroken range of numbers."""
    own = task.num_clients * rank // task.processes - task.num_clients * (rank - 1) // task.processes
    PassiveClientManager(network(task, rank, port), Trainer(task, own)).run()


def network(task: Task, rank: int, port: str) -> DistNetwork:
    return DistNetwork(("127.0.0.1", port), task.processes + 1, rank)


def main() -> None:
    logging.disable(logging.INFO)
    task = Task.from_command_line()
    random.seed(task.seed)
    torch.manual_seed(task.seed)
    if len(sys.argv) > 2:
        train(task, int(sys.argv[2]), sys.argv[3])
    elif task.processes > 1:
        serve(task)
    else:
        Standalone(Handler(task), Trainer(task, task.num_clients)).main()


if __name__ == "__main__":
    main()
