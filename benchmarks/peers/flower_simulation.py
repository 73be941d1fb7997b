"""Flower's simulation on Ray, with its FedAvg strategy and its central evaluation on the server."""

from __future__ import annotations

import random
import tempfile

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from problem import TEST_BATCH, Clock, Task, accuracy, train_locally
from torch.utils.data import DataLoader


def client_app(task: Task) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(task.threads)
        net = task.scratch_net()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        data = task.client(context.node_config["partition-id"])
        train_locally(net, data, task)
        answer = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": len(data)})}
        return Message(RecordDict(answer), reply_to=message)

    return app


class TimedFedAvg(FedAvg):
    clock: Clock

    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]  # Flower is not installed where types are checked
        replies = list(replies)
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(replies)} clients failed: {failed[0]}")
        aggregated = super().aggregate_train(server_round, replies)
        self.clock.trained()
        return aggregated


def server_app(task: Task) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        net = task.initial_net()
        test = DataLoader(task.test(), batch_size=TEST_BATCH)
        strategy = TimedFedAvg(fraction_train=task.clients_per_round / task.num_clients, fraction_evaluate=0.0)
        strategy.clock = Clock()

        def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord | None:
            if round == 0:
                strategy.clock.start()
                return None
            value = None
            if task.is_evaluated(round):
                net.load_state_dict(arrays.to_torch_state_dict())
                value = accuracy(net, test)
            strategy.clock.evaluated(value)
            return None

        strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=task.rounds, evaluate_fn=evaluate)

    return app


def main() -> None:
    task = Task.from_command_line()
    random.seed(task.seed)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        run_simulation(
            server_app(task),
            client_app(task),
            num_supernodes=task.num_clients,
            backend_config={
                "client_resources": {"num_cpus": float(task.threads), "num_gpus": 0.0},
                "init_args": {"num_cpus": task.processes * task.threads, "_temp_dir": folder},
            },
        )


if __name__ == "__main__":
    main()
