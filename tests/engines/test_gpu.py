"""GPUs, of which none is at hand: every method on a simulated one, and workers over a list of devices."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn

from redgrape import determinism, methods, tree
from redgrape.data.augment import Augment
from redgrape.data.examples import Examples, place
from redgrape.data.federation import Federation
from redgrape.engines import devices, pool
from redgrape.engines.in_process import InProcess
from redgrape.errors import ConfigError
from redgrape.learning.evaluation import Scores
from redgrape.method import Method
from redgrape.methods.fedavg import FedAvg
from redgrape.nets.mixed import in_bfloat16
from redgrape.nets.net import Net
from redgrape.rounds import RunState, rounds
from redgrape.testing.cases import Case, batchnorm_net, client_half, named_net, server_site, small
from redgrape.training import train
from simulated_gpu import simulated_gpu


def trained(method: Method, case: Case, device: torch.device) -> tuple[list[RunState], Scores]:
    """Both halves of the method and the evaluation on a device."""
    half = replace(client_half(method, case), device=device)
    site = replace(server_site(case), device=device)
    engine = InProcess(half)
    asked = {"eligible": case.eligible, "clients_per_round": case.clients_per_round}
    states = list(rounds(method, engine, site, exchange=case.exchange, **asked))
    return states, engine.evaluate(states[-1].server["model"], "test")


def without_dropout() -> Net:
    """BatchNorm and its buffers. Dropout draws from another stream on a GPU, so results could not be compared."""
    net = batchnorm_net()
    cast(nn.Sequential, net.encoder)[-1].p = 0.0
    return net


BATCHNORM, CNN = Case(build=without_dropout, rounds=2), named_net("cnn")
WITH_CNN = ("fedavg", "redgrape", "creff", "fedic", "lda")  # training, class rows, features, distillation, a head
NETS = [pytest.param(name, BATCHNORM, id=f"{name}-batchnorm") for name in methods.names()] + [
    pytest.param(name, CNN, id=f"{name}-cnn", marks=[] if name in WITH_CNN else pytest.mark.slow)
    for name in methods.names()
]


@pytest.mark.parametrize(("name", "case"), NETS)
def test_every_method_runs_on_a_gpu(name: str, case: Case) -> None:
    """No tensor is left on the CPU, nothing of the GPU leaves a client or reaches a checkpoint, and the result is that
    of the CPU."""
    method = small(methods.load(name)())
    expected, scores = trained(method, case, torch.device("cpu"))
    with simulated_gpu() as gpu:
        found, on_gpu = trained(method, case, gpu)
    for before, after in zip(expected, found, strict=True):
        kept = {**tree.flatten(after.server), **tree.flatten({str(k): s for k, s in after.clients.items()})}
        assert {type(t) for t in kept.values()} == {torch.Tensor}
        torch.testing.assert_close(tree.flatten(after.server), tree.flatten(before.server))
    assert on_gpu.right.tolist() == scores.right.tolist()


def test_a_tensor_left_on_the_cpu_is_found() -> None:
    """The simulation refuses what a GPU refuses, and takes what it takes."""
    with simulated_gpu() as gpu:
        x = torch.ones(2, 3).to(gpu)
        assert x.device == gpu and (x @ x.T).device == gpu and x.cpu().device.type == "cpu"
        assert (x * torch.tensor(2.0)).device == gpu and x[torch.tensor([1])].device == gpu
        for wrong in (lambda: x + torch.ones(2, 3), lambda: nn.Linear(3, 1)(x), lambda: x.numpy()):
            with pytest.raises((RuntimeError, TypeError)):
                wrong()
        with pytest.raises(RuntimeError, match="a generator of the CPU"):
            torch.rand(3, device=gpu, generator=torch.Generator())


@pytest.mark.parametrize("augment", [Augment(), Augment(crop=1, flip=True, cutout=3)])
@pytest.mark.parametrize("fits", [True, False])
def test_data_is_copied_to_the_gpu_once_if_it_fits(augment: Augment, fits: bool) -> None:
    """The inputs are the same numbers whether the pixels lie there or go there batch by batch."""
    pixels = torch.arange(4 * 36, dtype=torch.uint8).reshape(4, 1, 6, 6)
    clients = [Examples(pixels, torch.tensor([0, 1, 0, 1]), augment=augment) for _ in range(2)]
    federation = Federation(clients, clients[0], 2)
    draw = partial(determinism.torch_stream, 0, "augment")
    rows = torch.tensor([2, 0])
    expected = [federation.client(k).inputs(rows, torch.float32, draw()) for k in range(2)]
    with simulated_gpu() as gpu, mock.patch("torch.cuda.mem_get_info", return_value=(4 * pixels.numel() * fits, 0)):
        near = devices.near(federation, gpu)
        found = [near.client(k) for k in range(2)]
        assert [data.x.device.type for data in found] == ["cuda" if fits else "cpu"] * 2
        assert found[0].x is found[1].x and found[0].labels.device.type == "cpu"
        inputs = [place(data.inputs(rows, torch.float32, draw()), gpu).cpu() for data in found]
    for x, y in zip(inputs, expected, strict=True):
        assert torch.equal(x, y)


GPUS = [torch.device("cuda", i) for i in range(3)]


@pytest.mark.parametrize(
    ("name", "seen", "expected"),
    [
        ("cpu", 3, [devices.CPU]),
        ("auto", 0, [devices.CPU]),
        ("auto", 3, GPUS),
        ("cuda", 3, GPUS),
        ("cuda:1", 3, [GPUS[1]]),
        ("cuda", 0, "device 'cuda' cannot be used here: PyTorch .* sees no GPU; try 'cpu'"),
        ("cuda:3", 3, "device 'cuda:3' cannot be used here: the last GPU is 'cuda:2'"),
        ("gpu", 3, "device 'gpu' cannot be used here: choose auto, cpu, cuda"),
    ],
)
def test_devices_by_name(name: str, seen: int, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: GPUS[:seen])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if isinstance(expected, list):
        assert devices.chosen(name) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            devices.chosen(name)


@pytest.mark.parametrize(("workers", "on_each", "share"), [(3, [1, 1, 1], 1), (7, [3, 2, 2], 3), (2, [1, 1, 0], 1)])
def test_workers_take_turns_on_the_gpus(workers: int, on_each: list[int], share: int) -> None:
    """Each process is told its device, and a worker that is replaced gets the same one."""
    started: list[tuple[torch.device, int]] = []

    class Process:
        def __init__(self, *, args: tuple[Any, ...], **_: Any) -> None:
            *_, sent, sharing = args
            started.append((sent.device, sharing))

        def start(self) -> None: ...

    connection = mock.Mock(**{"recv.return_value": ("ready", None)})
    context = mock.Mock(Pipe=lambda: (connection, mock.Mock()), Process=Process)
    half = client_half(FedAvg(), Case())
    with mock.patch.object(pool, "_context", return_value=context), mock.patch.object(pool.Pool, "close"):
        workers_of = pool.Pool(half, workers, devices=GPUS)
        assert [sum(device == gpu for device, _ in started) for gpu in GPUS] == on_each
        assert {sharing for _, sharing in started} == {share}
        workers_of._start(1)
    assert started[-1] == started[1]


def test_the_record_names_the_kind_of_gpu_and_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.recorded("auto" if not torch.cuda.is_available() else "cpu", "float32") == "cpu"
    assert devices.recorded("cpu", "bfloat16") == "cpu, bfloat16"
    monkeypatch.setattr(devices, "gpus", lambda: GPUS)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Model X")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert devices.recorded("cuda:2", "bfloat16") == "cuda: Model X, bfloat16"


# bfloat16, which the CPU has too


def test_the_encoder_multiplies_in_bfloat16_and_all_else_keeps_its_type() -> None:
    """Features are those of torch's autocast; gradients and the result of a round are float32, near to full ones."""
    case = named_net("cnn")
    x = case.federation.test.x
    plain, mixed = case.build(), in_bfloat16(case.build)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain.encoder(x)
    assert expected.dtype == torch.bfloat16 and torch.equal(mixed.encoder(x), expected.float())
    assert not torch.is_autocast_enabled("cpu")
    results = [
        train(FedAvg(lr=0.01, epochs=1), case.federation, case.build, rounds=1, precision=precision)
        for precision in ("float32", "bfloat16", "bfloat16")
    ]
    full, half, again = (result.server["model"] for result in results)
    assert all(t.dtype == full[name].dtype for name, t in half.items())
    assert all(torch.equal(t, again[name]) for name, t in half.items())
    assert any(not torch.equal(t, full[name]) for name, t in half.items())
    torch.testing.assert_close(half, full, rtol=0.05, atol=0.002)


def test_bfloat16_leaves_no_mark_after_an_error_and_refuses_a_stack() -> None:
    case = named_net("cnn")
    with pytest.raises(RuntimeError):
        in_bfloat16(case.build).encoder(torch.zeros(2, 3))
    assert not torch.is_autocast_enabled("cpu")
    for options, message in (({"stack": 2, "precision": "bfloat16"}, "stack"), ({"precision": "int4"}, "int4")):
        with pytest.raises(ConfigError, match=message):
            train(FedAvg(), case.federation, case.build, rounds=1, **options)
