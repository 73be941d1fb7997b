"""redgrape through its public interface, with one worker process for each core."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from problem import Task, parts, report, weights

import redgrape as rg
from redgrape.methods.fedavg import FedAvg


def main() -> None:
    task = Task.from_command_line()
    train, test = (
        rg.Examples(*(np.load(Path(task.folder) / f"{split}_{name}.npy") for name in "xy"))
        for split in ("train", "test")
    )
    federation = rg.Federation.from_parts(
        train,
        [part.numpy() for part in parts(task.folder, task.share)],
        test.take(range(round(task.share * len(test)))),
        10,
    )
    method = FedAvg(epochs=task.epochs, batch_size=task.batch_size, lr=task.lr, momentum=task.momentum)
    build = functools.partial(rg.nets.build, task.net, tuple(train.x.shape[1:]), 10, 0)
    with rg.Training(
        method,
        federation,
        build,
        rounds=task.rounds,
        clients_per_round=task.clients_per_round,
        seed=task.seed,
        workers=task.processes,
        stack=task.stack,
        evaluate_every=1 if task.evaluate else task.rounds,
    ) as training:
        for step in training.steps(model=weights(task.folder, task.net)):
            scores = step.record.get("test")
            report(step.seconds["train"], step.seconds["evaluate"], scores and scores["accuracy"])


if __name__ == "__main__":
    main()
