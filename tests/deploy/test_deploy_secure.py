"""Secure aggregation on real SuperLinks and SuperNodes with TLS and node authentication; minutes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from deployments import CLASSES, SITES, Federated, Local, first_updates, still_there, wait_for
from test_deploy_slow import _locally_without

from redgrape import tree
from redgrape.deploy.protocol import secure_sum
from redgrape.deploy.protocol.admission import crossing
from redgrape.deploy.setup.folder import Deployment
from redgrape.exchange import fixed_point

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SMALL = ["-c", "net.name='mlp'", "-c", "method.lr=0.1", "-c", "method.batch_size=8", "-c", "seed=5"]
LOWEST = ["--min-count", "1", "--min-clients", "1"]

# The server's part of the Flower app, which also writes down every answer that it receives from a site.
RECORDER = """
import json
from pathlib import Path

from redgrape.deploy.processes import server_app
from redgrape.deploy.protocol import wire
from redgrape.deploy.protocol.transport import Transport

FOLDER = Path({folder!r})
exchange = Transport._exchange


def recorded(self, letters):
    for node, message in exchange(self, letters):
        if message is not None and not message.has_error():
            header, parts = wire.unpack(message.content)
            place = FOLDER / f"{{len(list(FOLDER.iterdir())):06d}}"
            place.mkdir()
            for i, (name, data) in enumerate(parts.items()):
                (place / str(i)).write_bytes(data)
            asked = letters[node][0].to_header()
            asked = {{key: asked.get(key) for key in ("kind", "of", "stage", "round")}}
            (place / "json").write_text(json.dumps([asked, header, list(parts)]))
        yield node, message


Transport._exchange = recorded
app = server_app.app
"""


class Received(NamedTuple):
    asked: dict[str, Any]
    header: dict[str, Any]
    parts: dict[str, bytes]


class Watched(Local):
    """A deployment with secure aggregation whose server writes down what it receives."""

    def __init__(self, folder: Path, federated: Federated, *flags: object) -> None:
        super().__init__(folder, federated, "--class-rows", *flags)
        self.letters = folder / "letters"
        self.letters.mkdir()
        self.set_app(server=RECORDER.format(folder=str(self.letters)))

    def received(self, **asked: Any) -> list[Received]:
        found = []
        for place in sorted(self.letters.iterdir()):
            if (place / "json").exists():  # it is written last
                question, header, names = json.loads((place / "json").read_text())
                if asked.items() <= question.items():
                    parts = {name: (place / str(i)).read_bytes() for i, name in enumerate(names)}
                    found.append(Received(question, header, parts))
        return found

    def forget(self) -> None:
        for place in self.letters.iterdir():
            for file in place.iterdir():
                file.unlink()
            place.rmdir()


@pytest.fixture(scope="module")
def federated(tmp_path_factory: pytest.TempPathFactory) -> Federated:
    return Federated(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, federated: Federated) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("secure")
    with Watched(folder, federated, "--test", federated.folder / "test.npz", *LOWEST) as deployment:
        deployment.start()
        yield deployment
    assert not still_there(folder)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "redgrape"])
def test_a_round_is_the_local_one_s_to_the_stated_bound(
    deployment: Watched, method: str, tally: Callable[..., None]
) -> None:
    """One round: three roundings to 2^-29 in the sum of n_k delta_k, divided by the sum of n_k (by three where clients
    count alike), and float32. Then three rounds, over which training lets differences grow."""
    once, thrice = f"{method}-1", f"{method}-3"
    options = [*SMALL, "--method", method]
    deployment.run(once, *options, "--rounds", 1)
    examples = 3 if method == "scaffold" else sum(len(y) for _, y in deployment.federated.clients)
    bound = fixed_point.error_of_sum(3) / examples
    ours, theirs = tree.flatten(deployment.server_state(once)), tree.flatten(deployment.locally(once))
    worst = 0.0
    assert ours.keys() == theirs.keys()
    for name, t in theirs.items():
        if not t.is_floating_point():
            assert torch.equal(ours[name], t), name
            continue
        rounding = 2.0**-23 * float(t.abs().max())
        allowed = rounding + (fixed_point.error_of_sum(3) if name.startswith("prototypes") else bound)
        error = float((ours[name].double() - t.double()).abs().max())
        worst = max(worst, error)
        assert error <= allowed, (name, error, allowed)
    deployment.run(thrice, *options, "--rounds", 3)
    ours, theirs = tree.flatten(deployment.server_state(thrice)), tree.flatten(deployment.locally(thrice))
    for name, t in theirs.items():
        torch.testing.assert_close(ours[name], t, rtol=1e-4, atol=1e-5, msg=name)
    assert all(len(record["answered"]) == 3 for record in deployment.metrics(thrice))
    print(f"{method}: largest difference after a round {worst:.3g}")
    tally("a round by secure sums is the local engine's to the bound", 1, 1, part=method)


def test_what_the_server_receives_of_a_site_is_masked(deployment: Watched, tally: Callable[..., None]) -> None:
    deployment.forget()
    deployment.run("watched", *SMALL, "--rounds", 2, "--method", "redgrape")
    letters = deployment.received()
    assert {letter.asked["kind"] for letter in letters} == {"join", "sum"}
    assert {letter.asked["of"] for letter in letters if letter.asked["kind"] == "sum"} == {"train"}
    experiment = deployment.folder("watched").experiment()
    parts, _ = crossing(experiment, Deployment(deployment.path).options)
    updates = first_updates(experiment, deployment.federated)
    hidden = 0
    for k, update in updates.items():
        layout, true = fixed_point.encode(experiment.exchange.summand(update, parts, len(CLASSES)), len(SITES))
        [letter] = [x for x in deployment.received(stage="masked", round=1) if x.header["site"] == k]
        assert [tuple(entry) for entry in letter.header["layout"]] == layout, "the same for every site"
        halves = [np.frombuffer(letter.parts[name], "<i8") & (2**31 - 1) for name in ("high", "low")]
        masked = secure_sum._whole(halves, 1)
        moving = true != 0
        correlation = abs(np.corrcoef(true[moving].astype(float), masked[moving].astype(float))[0, 1])
        assert correlation < 6 / math.sqrt(moving.sum()), correlation
        zeros = masked[~moving].astype(float)  # the classes that it does not hold, among others
        assert len(zeros) > 100 and zeros.std() == pytest.approx(2**62 / math.sqrt(12), rel=0.2)
        for name, t in tree.flatten({"delta": update["delta"], "prototypes": update["prototypes"]}).items():
            piece = t.numpy().tobytes()[:64]
            for other in letters:
                assert not any(piece in data for data in other.parts.values() if len(piece) > 16), name
        hidden += 1
    for letter in letters:
        known = {"site", "round", "protocol", "layout", "state_key"}
        if letter.asked["kind"] == "join":
            assert letter.header.keys().isdisjoint({"examples", "tests"}) and letter.parts == {}
        else:
            assert letter.header.keys() <= known
    tally("what the server receives of a site is masked", len(SITES), hidden)


def test_models_are_evaluated_at_the_sites_by_sums(tmp_path: Path, federated: Federated) -> None:
    with Watched(tmp_path, federated, "--like", federated.folder / "test.npz") as deployment:
        deployment.start()
        deployment.run("a", *SMALL, "--rounds", 1)
        summary = deployment.folder("a").summary()
        assert summary is not None
        held_out = [
            sum(min(max(1, round(0.2 * n)), n // 2) for n in row)
            for row in ([int((y == c).sum()) for c in range(4)] for _, y in federated.clients)
        ]
        assert sum(map(sum, summary["confusion"])) == sum(held_out)
        assert len(deployment.received(of="evaluate", stage="masked")) == 2 * len(SITES)
        told = deployment.command("privacy", deployment.path / "runs/a")
        assert "1 sums (secure aggregation)" in told
        deployment.command("export", deployment.path / "runs/a", tmp_path / "model")
        assert "secure aggregation" in (tmp_path / "model/README.md").read_text()


def test_a_site_killed_in_a_round_is_left_out_and_the_next_waits_for_it(
    tmp_path: Path, federated: Federated, tally: Callable[..., None]
) -> None:
    with Watched(tmp_path, federated, "--test", federated.folder / "test.npz", *LOWEST) as deployment:
        deployment.set(deadlines__round=300)
        deployment.start()
        # Many steps, so that the site is killed while it trains; on a convex loss they do not enlarge roundings.
        options = [*SMALL, "--method", "fedavg", "-c", "net.name='linear'", "-c", "method.epochs=1000"]
        run = deployment.begin_run("killed", *options, "--rounds", 4)
        wait_for(lambda: len(deployment.received(stage="shares", round=2)) == 3, "the shares of round 2", 600)
        deployment.sites["west"].kill_all()  # while it trains
        wait_for(lambda: int(deployment.journal().get("round", 0)) >= 2, "the end of round 2", 600)
        deployment.start_site("west")
        assert run.process.wait(timeout=600) == 0, run.text() + deployment.words()
        answered = [record["answered"] for record in deployment.metrics("killed")]
        assert answered == [[0, 1, 2], [0, 1], [0, 1, 2], [0, 1, 2]], answered
        ours = tree.flatten(deployment.server_state("killed"))
        for name, t in tree.flatten(_locally_without(deployment, "killed", {2: {2}})).items():
            torch.testing.assert_close(ours[name], t, rtol=1e-4, atol=1e-5, msg=name)
        tally("a site killed in a secure round is left out of it", 1, 1)
    assert not still_there(tmp_path)
