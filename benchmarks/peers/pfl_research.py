"""pfl-research: its FederatedAveraging on its SimulatedBackend, in one process or, by torchrun, in two.

Its in-memory datasets are cut into batches once and not shuffled again, as in its own benchmarks; the saved rows are in
random order. A client's evaluation of its own data, which pfl does in the first round whatever one sets, falls into the
round that is not timed.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from problem import TEST_BATCH, Clock, Task
from torch import Tensor, nn


class Model(nn.Module):
    """The net with the two functions that pfl asks of one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return F.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        self.eval()
        return {"accuracy": Weighted(int((self.net(x).argmax(dim=1) == y).sum()), len(y))}


class Mark(TrainingProcessCallback):
    """Calls a function after every round."""

    def __init__(self, then: Any) -> None:
        self.then = then

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.then(Metrics(), 0)
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.then(aggregate_metrics, central_iteration + 1)
        return False, Metrics()


def main() -> None:
    task = Task.from_command_line()
    if task.processes > 1 and "RANK" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={task.processes}"]
        os.execv(sys.executable, [sys.executable, *torchrun, *sys.argv])
    torch.set_num_threads(task.threads)
    np.random.seed(task.seed)
    clients = list(range(task.num_clients))
    data = {k: PyTorchTensorDataset(task.client(k).tensors, user_id=str(k)) for k in clients}
    everybody = task.clients_per_round == task.num_clients
    federation = FederatedDataset(
        data.__getitem__,
        get_user_sampler("minimize_reuse" if everybody else "random", clients),
        user_id_to_weight={k: len(data[k]) for k in clients},
    )
    model = Model(task.initial_net())
    evaluation = CentralEvaluationCallback(
        PyTorchTensorDataset(task.test().tensors),
        NNEvalHyperParams(local_batch_size=TEST_BATCH),
        frequency=1 if task.evaluate else max(1, task.rounds - 1),  # pfl counts rounds from 0
    )

    clock = Clock()

    def trained(metrics: Metrics, round: int) -> None:
        clock.trained()

    def evaluated(metrics: Metrics, round: int) -> None:
        if round == 0:
            clock.start()
        elif int(os.environ.get("RANK", "0")) == 0:
            found = metrics.to_simple_dict()
            clock.evaluated(next((float(v) for name, v in found.items() if name == "Central val | accuracy"), None))

    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=task.rounds,
            evaluation_frequency=task.rounds + 1,
            train_cohort_size=task.clients_per_round,
            val_cohort_size=None,
        ),
        SimulatedBackend(federation, federation, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(
            model,
            lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=task.momentum),
            torch.optim.SGD(model.parameters(), lr=1.0),
        ),
        NNTrainHyperParams(local_num_epochs=task.epochs, local_learning_rate=task.lr, local_batch_size=task.batch_size),
        NNEvalHyperParams(local_batch_size=TEST_BATCH),
        callbacks=[Mark(trained), evaluation, Mark(evaluated)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
