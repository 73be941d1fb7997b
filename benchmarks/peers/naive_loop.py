"""FedAvg as one writes it plainly: one process, torch's own choice of threads, a copy of the net for each client."""

from __future__ import annotations

import copy
import random

import torch
from problem import TEST_BATCH, Clock, Task, accuracy, train_locally
from torch.utils.data import DataLoader


def main() -> None:
    task = Task.from_command_line()
    random.seed(task.seed)
    torch.manual_seed(task.seed)
    net = task.initial_net()
    clients = [task.client(k) for k in range(task.num_clients)]
    test = DataLoader(task.test(), batch_size=TEST_BATCH)

    clock = Clock()
    for t in range(1, task.rounds + 1):
        sampled = random.sample(clients, task.clients_per_round)
        models = []
        for data in sampled:
            local = copy.deepcopy(net)
            train_locally(local, data, task)
            models.append(local.state_dict())
        total = sum(len(data) for data in sampled)
        mean = {
            name: sum(len(data) / total * model[name] for data, model in zip(sampled, models, strict=True))
            for name in models[0]
        }
        net.load_state_dict(mean)
        clock.trained()
        clock.evaluated(accuracy(net, test) if task.is_evaluated(t) else None)


if __name__ == "__main__":
    main()
