"""FedNH, FedETF and FedLoGe: classifiers that clients train towards but do not move, against plain readings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import redgrape as rg
import toys
from redgrape.learning.classifier import equiangular
from redgrape.methods.fedetf import FedETF
from redgrape.methods.fedloge import FedLoGe, shaped
from redgrape.methods.fednh import FedNH, moved
from redgrape.training import Training

C, D = 4, 5
COUNTS = [[9, 4, 1, 0], [2, 7, 3, 0]]
ONE_STEP: dict[str, Any] = {"lr": 0.1, "momentum": 0.0, "epochs": 1, "batch_size": 100}


def linear() -> rg.Net:
    """Its features are the inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return rg.Net(nn.Flatten(), nn.Linear(D, C)).double()


def encoding() -> rg.Net:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return rg.Net(nn.Sequential(nn.Linear(D, 6), nn.Tanh()), nn.Linear(6, C)).double()


def states(method: rg.Method, rounds: int = 1, build: Any = linear) -> list[Any]:
    with Training(method, toys.federation(*COUNTS), build, rounds=rounds, seed=3) as training:
        return [step.state.server for step in training.steps()]


def clients() -> list[tuple[Tensor, Tensor]]:
    data = [toys.examples(held, k) for k, held in enumerate(COUNTS)]
    return [(d.inputs(torch.arange(len(d)), torch.float64), d.labels) for d in data]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_prototypes_start_orthogonal() -> None:
    server = FedNH().init_server(dict(linear().state_dict()), toys.server_site(2, C, 0))
    W = server["model"]["classifier.weight"]
    close(W @ W.T, torch.eye(C).double())
    assert not server["model"]["classifier.bias"].any()
    many = {"classifier.weight": torch.zeros(7, 3).double()}
    tall = FedNH().init_server(many, toys.server_site(2, 7, 0))["model"]["classifier.weight"]
    close(tall.norm(dim=1), torch.ones(7).double())


def test_prototypes_move_by_hand() -> None:
    """(1, 0) towards (0, 2), whose length does not count: (0.9, 0.1) scaled to length 1. The second stays."""
    W, means = torch.eye(2).double(), torch.tensor([[0.0, 2.0], [5.0, 0.0]]).double()
    found = moved(W, means, torch.tensor([True, False]), 0.9)
    close(found, torch.tensor([[0.9 / 0.82**0.5, 0.1 / 0.82**0.5], [0.0, 1.0]], dtype=torch.float64))


def test_fednh_moves_prototypes_to_the_clients_class_means() -> None:
    """A net without an encoder, so that features do not move. A class that nobody has keeps its prototype."""
    fixed, free = states(FedNH(rho=1.0, **ONE_STEP))[0], states(FedNH(rho=0.9, **ONE_STEP))[0]
    W = fixed["model"]["classifier.weight"]
    total = torch.zeros(C, D).double()
    for x, y in clients():
        for c in y.unique():
            mean = F.normalize(F.normalize(x[y == c], dim=1).mean(dim=0), dim=0)
            total[c] += (y == c).sum() * mean
    expected = F.normalize(0.9 * W + 0.1 * F.normalize(total, dim=1), dim=1)
    close(free["model"]["classifier.weight"][:3], expected[:3])
    close(free["model"]["classifier.weight"][3], W[3])


def test_fednh_trains_the_scale_and_averages_clients_alike() -> None:
    """One full-batch step of each of two clients of different size: ds = mean_i sum_c (p_ic - [c = y_i]) cos_ic."""
    server = states(FedNH(rho=1.0, scale=2.0, **ONE_STEP))[0]
    slopes = []
    for x, y in clients():
        cos = F.normalize(x, dim=1) @ server["model"]["classifier.weight"].T
        residual = (2 * cos).softmax(dim=1) - F.one_hot(y, C)
        slopes.append((residual * cos).sum(dim=1).mean())
    close(server["scale"], 2 - 0.1 * torch.stack(slopes).mean())
    assert float(states(FedNH(scale=30.0, learn_scale=False))[0]["scale"]) == 30


def test_fednh_trains_the_encoder_towards_fixed_prototypes() -> None:
    """One full-batch step of each client, against a plain reading."""
    server = states(FedNH(rho=1.0, scale=2.0, learn_scale=False, **ONE_STEP), build=encoding)[0]
    W, ends = server["model"]["classifier.weight"], []
    for x, y in clients():
        net = encoding()
        F.cross_entropy(2 * F.normalize(net.encoder(x), dim=1) @ W.T, y).backward()
        ends.append(net.encoder[0].weight.detach() - 0.1 * net.encoder[0].weight.grad)
    close(server["model"]["encoder.0.weight"], torch.stack(ends).mean(dim=0))


def test_fednh_takes_class_means_after_training() -> None:
    """One full-batch step of each client, then the mean features of class 2: one example of the first, three of the
    second."""
    fixed = FedNH(rho=1.0, scale=2.0, learn_scale=False, **ONE_STEP)
    W = states(fixed, build=encoding)[0]["model"]["classifier.weight"]
    found = states(fixed.model_copy(update={"rho": 0.0}), build=encoding)[0]["model"]["classifier.weight"]
    total = torch.zeros(6).double()
    for x, y in clients():
        net = encoding()
        F.cross_entropy(2 * F.normalize(net.encoder(x), dim=1) @ W.T, y).backward()
        for p in net.encoder.parameters():
            p.data -= 0.1 * p.grad
        h = net.encoder(x[y == 2]).detach()
        total += len(h) * F.normalize(F.normalize(h, dim=1).mean(dim=0), dim=0)
    close(found[2], F.normalize(total, dim=0))


def test_class_vectors_have_equal_angles() -> None:
    for classes in (2, 3, 10):
        expected = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(1)
        for d in (classes, classes + 7):
            E = equiangular(classes, d, torch.Generator().manual_seed(1))
            close(E.T @ E, expected)


def test_fedetf_is_a_plain_reading_of_its_loss() -> None:
    """One full-batch step of each client. V starts as the net's classifier, and the deployed one is E^T V."""
    server = states(FedETF(scale=3.0, **ONE_STEP))[0]
    E, ends, scales, sizes = server["E"], [], [], []
    for x, y in clients():
        V, s = linear().classifier, torch.tensor(3.0).double().requires_grad_()
        n = torch.bincount(y, minlength=C).clamp(min=1)
        u = V(x) / V(x).norm(dim=1, keepdim=True)
        F.cross_entropy(s * u @ E + n.double().log(), y).backward()
        ends.append(torch.cat([p.detach().reshape(C, -1) - 0.1 * p.grad.reshape(C, -1) for p in V.parameters()], dim=1))
        scales.append(3 - 0.1 * s.grad)
        sizes.append(len(y) / sum(len(labels) for _, labels in clients()))
    V = sum(w * end for w, end in zip(sizes, ends, strict=True))
    close(torch.cat([server["V"]["weight"], server["V"]["bias"][:, None]], dim=1), V)
    close(server["scale"], sum(w * s for w, s in zip(sizes, scales, strict=True)))
    close(server["model"]["classifier.weight"], E.T @ server["V"]["weight"])
    close(server["model"]["classifier.bias"], E.T @ server["V"]["bias"])


def test_fedetfs_deployed_model_chooses_as_in_training() -> None:
    server = states(FedETF(), rounds=2, build=encoding)[-1]
    net = encoding()
    net.load_state_dict(server["model"])
    x = toys.random(200, D)
    with torch.no_grad():
        u = F.normalize(net.encoder(x) @ server["V"]["weight"].T + server["V"]["bias"], dim=1)
        assert torch.equal(net(x).argmax(dim=1), (u @ server["E"]).argmax(dim=1))
    assert server["V"]["weight"].shape == (C, 6)


def angles(E: Tensor) -> Tensor:
    """Of each row, the angle to the nearest other row."""
    cosines = F.normalize(E, dim=1) @ F.normalize(E, dim=1).T
    return torch.acos(cosines.fill_diagonal_(-1).amax(dim=1))


def test_fedloges_fixed_head_is_sparse_with_wide_angles() -> None:
    kept = torch.rand(4, 10, generator=torch.Generator().manual_seed(2)) > 0.5
    start = F.normalize(toys.random(4, 10) * kept, dim=1)
    E = shaped(start, kept, 0.1, 300, 0.01)
    assert not E[~kept].any()
    close(E.norm(dim=1), torch.full((4,), 0.1, dtype=torch.float64))
    assert angles(E).mean() > angles(start).mean() + 0.1
    server = FedLoGe(shape_steps=3).init_server(dict(encoding().state_dict()), toys.server_site(2, C, 0))
    assert ((server["E"] == 0).sum(dim=1) == int(0.6 * 6)).all()


def test_fedloge_trains_the_encoder_by_the_fixed_head_alone() -> None:
    """One full-batch step of each client, against a plain reading. The deployed rows are equally long."""
    server = states(FedLoGe(shape_steps=3, **ONE_STEP), build=encoding)[0]
    E, encoders, heads, sizes = server["E"], [], [], []
    for x, y in clients():
        net = encoding()
        h = net.encoder(x)
        F.cross_entropy(h @ E.T, y).backward()
        F.cross_entropy(net.classifier(h.detach()), y).backward()
        encoders.append(net.encoder[0].weight.detach() - 0.1 * net.encoder[0].weight.grad)
        heads.append(net.classifier.weight.detach() - 0.1 * net.classifier.weight.grad)
        sizes.append(len(y) / sum(len(labels) for _, labels in clients()))
    close(server["model"]["encoder.0.weight"], sum(w * t for w, t in zip(sizes, encoders, strict=True)))
    W = sum(w * t for w, t in zip(sizes, heads, strict=True))
    close(server["trained"]["weight"], W)
    close(server["model"]["classifier.weight"], 1.7 * W / W.norm(dim=1, keepdim=True))
    close(server["model"]["classifier.bias"], server["trained"]["bias"])
