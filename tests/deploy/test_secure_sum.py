"""Secure sums by themselves, and a deployment's engine and sites with them: no SuperLink is started here
(test_deploy_secure.py starts one)."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from cryptography.fernet import InvalidToken
from deployments import SITES, Federated, locally
from flwr.common.secure_aggregation import secaggplus_utils
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from test_deploy_parts import RUN, FakeGrid, _question, _run, options

from redgrape import tree
from redgrape.cli import main as cli
from redgrape.deploy.protocol import admission, asking, secure_sum, wire
from redgrape.deploy.protocol.messages import Parts, Reply, Stage, SumAnswer, SumQuestion
from redgrape.deploy.protocol.secure_sum import STAGES, Member, SumFailed, Summed, threshold
from redgrape.deploy.protocol.site import DeployedSite
from redgrape.deploy.setup.create import create, deployed
from redgrape.deploy.setup.folder import Deployment, SiteFolder
from redgrape.engines import Lost
from redgrape.errors import ConfigError, Diverged, TooFewClients
from redgrape.exchange import fixed_point
from redgrape.reading.learned import disclosed
from redgrape.reading.learned_in_words import in_words
from redgrape.reading.page.figures import page_data
from redgrape.reading.page.reading import Reading
from redgrape.reading.run_view import RunView
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import RunFolder

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Party:
    """Sites of a sum in this process. `drops`: the stage from which on a site gives no answer. `changed`: what is made
    of a site's answer on its way."""

    def __init__(
        self,
        sites: int,
        drops: Mapping[int, str] | None = None,
        changed: Callable[[int, str, Reply], Reply | Lost] = lambda k, stage, reply: reply,
    ) -> None:
        stream = torch.Generator().manual_seed(sites)
        self.values = [
            {"x": torch.randn(40, generator=stream), "n": torch.tensor([k, 10**6, -1])} for k in range(sites)
        ]
        self.members = [Member(k) for k in range(sites)]
        self.drops, self.changed = drops or {}, changed
        self.asked: list[str] = []
        self.seen: list[tuple[int, str, Reply[SumAnswer]]] = []

    def ask(self, stage: Stage, letters: secure_sum.Letters) -> Iterator[tuple[int, Reply[SumAnswer] | Lost]]:
        self.asked.append(stage.name)
        for k, parts in letters.items():
            if k in self.drops and STAGES.index(stage.name) >= STAGES.index(self.drops[k]):
                yield k, Lost(f"site {k} is gone")
                continue
            layout, numbers = None, None
            if stage.name == "masked":
                layout, numbers = fixed_point.encode(self.values[k], len(self.values))
            sent = self.members[k].answer(stage, parts, numbers)
            reply = self.changed(k, stage.name, Reply(SumAnswer(site=k, layout=layout), sent))
            if isinstance(reply, Reply):
                self.seen.append((k, stage.name, reply))
            yield k, reply

    def sum(self, fewest: int = 1) -> Summed:
        return secure_sum.secure_sum({k: f"site {k}" for k in range(len(self.values))}, self.ask, fewest)

    def is_right(self, summed: Summed) -> bool:
        inside = [self.values[k] for k in summed.answered]
        error = (summed.total["x"] - torch.stack([v["x"].double() for v in inside]).sum(dim=0)).abs().max()
        whole = torch.equal(summed.total["n"], torch.stack([v["n"] for v in inside]).sum(dim=0))
        return whole and float(error) <= fixed_point.error_of_sum(len(inside))


def _drops(sites: int) -> Iterator[dict[int, str]]:
    """Every set of sites that may be lost, each at every stage. Who leaves at the first was never there."""
    for lost in range(sites - threshold(sites) + 1):
        for who in itertools.combinations(range(sites), lost):
            for when in itertools.product(STAGES, repeat=lost):
                there = sites - when.count("keys")
                if there >= 3 and sites - lost >= threshold(there):
                    yield dict(zip(who, when, strict=True))


@pytest.mark.parametrize("sites", [3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_the_sum_is_exact_with_every_loss_that_is_tolerated(sites: int, tally: Callable[..., None]) -> None:
    tried = right = 0
    for drops in _drops(sites):
        party = Party(sites, drops)
        summed = party.sum()
        tried += 1
        inside = [k for k in range(sites) if drops.get(k, "revealed") == "revealed"]
        assert list(summed.answered) == inside, drops
        assert set(summed.lost) == set(drops) - set(inside), drops
        right += party.is_right(summed)
    tally("sites lost at any stage of a secure sum, which is exact for the others", tried, right, part=str(sites))
    assert right == tried == {3: 10, 4: 17, 5: 181}[sites]


@pytest.mark.parametrize("stage", STAGES)
def test_with_too_few_there_is_no_sum_and_nothing_is_unmasked(stage: str) -> None:
    party = Party(4, {0: stage, 2: stage})
    with pytest.raises(SumFailed, match=r"sites .*, and 3 are needed") as caught:
        party.sum()
    assert str(caught.value).endswith("; site 0 is gone; site 2 is gone")
    shares = [reply for _, name, reply in party.seen if name == "revealed"]
    assert len(shares) < threshold(4)
    if stage != "revealed":
        assert "revealed" not in party.asked


def test_a_sum_needs_three_sites_and_as_many_as_were_asked_for() -> None:
    with pytest.raises(SumFailed, match="2 sites gave their keys, and 3 are needed"):
        Party(3, {1: "keys"}).sum()
    party = Party(5, {1: "masked", 2: "masked"})
    with pytest.raises(SumFailed, match="3 sites gave their part of the sum, and 4 are needed"):
        party.sum(fewest=4)
    assert "revealed" not in party.asked


def _masked(party: Party, k: int) -> Numbers:
    """What the server received of a site, as numbers of 62 bits."""
    [reply] = [reply for site, stage, reply in party.seen if (site, stage) == (k, "masked")]
    halves = [np.frombuffer(reply.parts[name], "<i8") for name in ("high", "low")]
    return secure_sum._whole([half & (2**31 - 1) for half in halves], 1)


def test_what_the_server_receives_of_a_site_is_masked() -> None:
    """No correlation with the true numbers, and other numbers each time; no tensor but the masked ones."""
    sites, size = 3, 20_000
    received = []
    for _ in range(2):
        party = Party(sites)
        for k, value in enumerate(party.values):
            value["x"] = torch.linspace(-3, 3, size) * (k + 1)
        assert party.is_right(party.sum())
        for _, _, reply in party.seen:
            assert reply.parts.keys() <= {
                "key",
                "box key",
                *(f"share/{j}" for j in range(sites)),
                "weight",
                "high",
                "low",
            }
        received.append([_masked(party, k) for k in range(sites)])
    true = [fixed_point.encode(value, sites)[1].astype(float) for value in party.values]
    for k in range(sites):
        for before in received:
            assert abs(np.corrcoef(true[k][3:], before[k][3:].astype(float))[0, 1]) < 6 / math.sqrt(size)
            assert before[k].std() == pytest.approx(2**62 / math.sqrt(12), rel=0.05), "as numbers drawn from the range"
        assert not (received[0][k] == received[1][k]).any()


def test_masks_come_from_the_whole_secret() -> None:
    """Flower's own masks come from 32 bits: secrets whose words have the same exclusive or give the same."""
    secret = bytes(range(32))
    other = secret[4:8] + secret[:4] + secret[8:]
    theirs = [secaggplus_utils.pseudo_rand_gen(s, 2**40, [(5,)])[0].tolist() for s in (secret, other)]
    assert theirs[0] == theirs[1]
    ours = [secure_sum._masks(s, 2**40, [(1,), (1000,)])[1] for s in (secret, other, secret)]
    assert not (ours[0] == ours[1]).any() and (ours[0] == ours[2]).all()
    assert ours[0].min() >= 0 and 0.9 < ours[0].max() / 2**40 < 1
    assert secure_sum._flower.pseudo_rand_gen is secure_sum._masks


def test_the_largest_numbers_of_as_many_sites_as_may_be_add_up() -> None:
    """Halves of 31 bits, added over all sites modulo the masks' modulus, give the sum. Those of -1 are the largest."""
    sites = secure_sum.MOST
    numbers = np.array([2**61 // sites - 1, 1 - 2**61 // sites, -1])
    halves = [(half + 2**30).astype(np.int64) for half in secure_sum._halves(numbers)]
    added = [half * sites & (secure_sum._MODULUS - 1) for half in halves]
    assert secure_sum._whole(added, sites).tolist() == (numbers * sites).tolist()


def test_half_of_the_sites_cannot_unmask_a_sum() -> None:
    """Of six sites four must agree: no three of them answer, and three shares give another secret than four."""
    members, _, _ = _upto("revealed", 6)
    with pytest.raises(ConfigError, match="asks to unmask others"):
        members[0].answer(Stage("revealed", [0, 1, 2], [3, 4, 5]), {})
    members, _, _ = _upto("revealed", 6)
    shares = [member.answer(Stage("revealed", list(range(6)), []), {})["share/0"] for member in members]
    secret = combine_shares(shares[:4])
    assert secret == combine_shares(shares[2:]) == combine_shares(shares)
    with contextlib.suppress(ValueError):  # the padding of a false secret is rarely right
        assert combine_shares(shares[:3]) != secret


def _lie(stage: str, change: Callable[[Reply], Reply]) -> Callable[[int, str, Reply], Reply]:
    return lambda k, name, reply: change(reply) if k == 1 and name == stage else reply


def _parts(**changes: bytes) -> Callable[[Reply], Reply]:
    return lambda reply: Reply(reply.answer, {**reply.parts, **changes})


def _layout(layout: list[Any] | None) -> Callable[[Reply], Reply]:
    return lambda reply: Reply(replace(reply.answer, layout=layout), reply.parts)


MALFORMED: dict[str, tuple[str, Callable[[Reply], Reply]]] = {
    "no key": ("keys", lambda reply: Reply(reply.answer, {})),
    "a key that is none": ("keys", _parts(key=b"no key")),
    "no shares": ("shares", lambda reply: Reply(reply.answer, {})),
    "a share too many": ("shares", _parts(**{"share/9": b"x"})),
    "no layout": ("masked", _layout(None)),
    "a layout that is none": ("masked", _layout([1, "x"])),
    "another length": ("masked", _layout([["x", "real", [41]]])),
    "other names": ("masked", _layout([["y", "real", [40]], ["n", "whole", [3]]])),
    "no array": ("masked", _parts(high=b"no array")),
    "an archive": ("masked", _parts(weight=b"PK\x03\x04 and nothing more")),
    "an array without end": ("masked", _parts(low=b"\x93NUMPY\x01\x00F\x00{'shape': (36028797018963968,)}")),
    "a layout without end": ("masked", _layout([["x", "real", [math.inf]]])),
    "shares of others": ("revealed", lambda reply: Reply(reply.answer, {"share/7": b"x"})),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_site_whose_answer_cannot_be_read_is_left_out(what: str) -> None:
    stage, change = MALFORMED[what]
    party = Party(5, changed=_lie(stage, change))
    summed = party.sum()
    assert party.is_right(summed)
    assert (1 in summed.answered) == (stage == "revealed")  # what it adds had arrived before
    assert set(summed.lost) == set(range(5)) - summed.answered.keys()


def test_false_shares_give_no_sum() -> None:
    def turned(reply: Reply) -> Reply:
        shares = {name: share[:4] + bytes(b ^ 1 for b in share[4:]) for name, share in reply.parts.items()}
        return Reply(reply.answer, shares)

    party = Party(3, changed=_lie("revealed", turned))
    try:
        summed = party.sum()
    except SumFailed as failure:
        assert "do not fit together" in str(failure)
    else:  # the padding of a false secret may look right: the numbers are drawn from the whole range then
        assert float(summed.total["x"].abs().max()) > 1e6


def _upto(
    stage: str, sites: int = 3, everyone: int | None = None
) -> tuple[list[Member], dict[str, bytes], dict[int, dict[str, bytes]]]:
    """Members that have answered the stages before this one; their public keys, and each one's answer `shares`."""
    members = [Member(k, everyone) for k in range(sites)]
    public: dict[str, bytes] = {}
    shares: dict[int, dict[str, bytes]] = {}
    if stage != "keys":
        for k, member in enumerate(members):
            public |= {f"{name}/{k}": key for name, key in member.answer(Stage("keys"), {}).items()}
    if stage in ("masked", "revealed"):
        shares = {k: member.answer(Stage("shares"), public) for k, member in enumerate(members)}
    if stage == "revealed":
        for k, member in enumerate(members):
            boxes = {f"share/{j}": shares[j][f"share/{k}"] for j in shares if j != k}
            member.answer(Stage("masked"), boxes, np.zeros(4, np.int64))
    return members, public, shares


@pytest.mark.parametrize(
    ("arrived", "lost"),
    [
        ([0, 1, 2], [1]),
        ([0, 1], [1, 2]),
        ([1, 2], [0]),
        ([0], [1, 2]),
        ([0, 1], []),
        ([0, 1, 2, 7], []),
        ([0, 0, 1, 2], []),
    ],
)
def test_a_site_unmasks_each_other_in_one_way_or_not_at_all(arrived: list[int], lost: list[int]) -> None:
    """Never with both secrets of a site, nor for a minority, nor where it is itself called lost."""
    members, _, _ = _upto("revealed")
    with pytest.raises(ConfigError, match="asks to unmask others"):
        members[0].answer(Stage("revealed", arrived, lost), {})
    with pytest.raises(ConfigError, match="out of turn"):
        members[0].answer(Stage("revealed", [0, 1, 2], []), {})


def test_a_site_answers_each_stage_once_and_in_order() -> None:
    for stage in STAGES:
        [member, *_], public, _ = _upto(stage)
        for other in STAGES:
            if other != stage:
                with pytest.raises(ConfigError, match="out of turn"):
                    member.answer(Stage(other, [0, 1, 2], []), public, np.zeros(4, np.int64))


def test_a_site_takes_part_with_two_others_at_least() -> None:
    members, public, _ = _upto("shares")
    with pytest.raises(ConfigError, match="keys of 3 to 512 sites; the server sent 2"):
        members[0].answer(Stage("shares"), {name: key for name, key in public.items() if not name.endswith("2")})


def test_a_site_that_asks_for_everyone_gives_no_sum_over_fewer() -> None:
    """Neither if a site was never there, nor if it left before it gave its numbers. One that leaves later is in it."""
    members, public, _ = _upto("shares", 4, everyone=5)
    with pytest.raises(ConfigError, match="must be over all 5 sites; the server has the keys of 4"):
        members[0].answer(Stage("shares"), public)
    members, _, shares = _upto("masked", 4, everyone=4)
    with pytest.raises(ConfigError, match="must be over all 4 sites; the server has the shares of 3"):
        members[0].answer(Stage("masked"), {f"share/{k}": shares[k]["share/0"] for k in (1, 2)}, np.zeros(4, np.int64))
    members, _, _ = _upto("revealed", 4, everyone=4)
    with pytest.raises(ConfigError, match="must be over all 4 sites; the server has the numbers of 3"):
        members[0].answer(Stage("revealed", [0, 1, 2], [3]), {})
    assert members[1].answer(Stage("revealed", [0, 1, 2, 3], []), {}).keys() == {f"share/{k}" for k in range(4)}


def test_a_site_takes_no_share_that_was_meant_for_another() -> None:
    members, _, shares = _upto("masked")
    boxes = {"share/1": shares[1]["share/2"], "share/2": shares[2]["share/0"]}
    with pytest.raises(InvalidToken):
        members[0].answer(Stage("masked"), boxes, np.zeros(4, np.int64))


def _deployed(tmp_path: Path, federated: Federated, **changes: Any) -> tuple[Deployment, list[DeployedSite]]:
    values = {
        "test": str(federated.folder / "test.npz"),
        "min_count": 1,
        "min_clients": 1,
        "secure_aggregation": True,
    } | changes
    create(tmp_path / "deployment", options(**values))
    deployment = Deployment(tmp_path / "deployment")
    return deployment, [DeployedSite(SiteFolder(deployment.site(name)), federated.data(name)) for name in SITES]


METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "scaffold": {},
    "redgrape": {},
    "redgrape with floors": {"exchange": {"min_count": 3, "min_clients": 2}},
    "redgrape with clipping": {"exchange": {"clip": 0.05, "class_clip": 0.1}},
    "logit_adjustment": {"prior": "global"},
}


@pytest.mark.parametrize("name", METHODS)
def test_the_engine_gives_the_local_one_s_numbers_to_the_bound(tmp_path: Path, federated: Federated, name: str) -> None:
    """With prototypes, with client state, with a survey; beside it the class contributors of every round."""
    deployment, sites = _deployed(tmp_path, federated)
    grid = FakeGrid(deployment, sites)
    chosen = dict(METHODS[name])
    exchange = chosen.pop("exchange", {})
    method = {"name": name.split()[0], "batch_size": 8, **chosen}
    folder, _ = _run(deployment, grid, "a", method=method, exchange=exchange)
    state, _ = folder.checkpoints.latest()
    assert state is not None
    ours, theirs = tree.flatten(state.server), tree.flatten(locally(folder.experiment(), federated))
    for key, t in theirs.items():
        torch.testing.assert_close(ours[key], t, rtol=1e-4, atol=1e-5, msg=key)
    assert {kind for _, kind in grid.kinds} == {"join", "sum"}
    assert all(record["answered"] == [0, 1, 2] for record in folder.metrics())
    assert folder.environment()["secure_aggregation"] is True


def test_noise_and_a_secure_sum_go_together(tmp_path: Path, federated: Federated) -> None:
    """Each site clips its own update. The mean over three gets a third of the noise of the sum."""
    deployment, sites = _deployed(tmp_path, federated)
    models = []
    for name, noise in (("clear", 0.0), ("noisy", 0.5)):
        exchange = {"clip": 0.05, "noise": noise}
        grid = FakeGrid(deployment, sites)
        folder, _ = _run(deployment, grid, name, rounds=1, method={"name": "fedavg"}, exchange=exchange)
        state, _ = folder.checkpoints.latest()
        assert state is not None
        models.append(torch.cat([t.flatten() for t in state.server["model"].values()]))
    assert (models[1] - models[0]).std() == pytest.approx(0.5 * 0.05 / 3, rel=0.1)
    assert folder.metrics()[0]["epsilon"] > 0


def test_evaluations_at_the_sites_are_summed_too(tmp_path: Path, federated: Federated) -> None:
    deployment, sites = _deployed(tmp_path, federated, test=None)
    grid = FakeGrid(deployment, sites)
    folder, _ = _run(deployment, grid, "a", rounds=1, method={"name": "fedavg"})
    summary = folder.summary()
    assert summary is not None
    held = torch.stack([torch.bincount(site.test.labels, minlength=4) for site in sites]).sum(dim=0)
    assert torch.tensor(summary["confusion"]).sum(dim=1).tolist() == held.tolist()
    assert {kind for _, kind in grid.kinds} == {"join", "sum"}


class Away(FakeGrid):
    """A site gives no answer from this stage on of some sums of one kind, counted from zero."""

    def __init__(
        self, deployment: Deployment, sites: Sequence[DeployedSite], kind: str, stage: str, sums: Sequence[int]
    ) -> None:
        super().__init__(deployment, sites)
        self._kind, self._stage, self._sums, self._begun = kind, stage, sums, set[str]()

    def push_messages(self, messages: list[Any]) -> list[str]:
        header, _ = wire.unpack(messages[0].content)
        self.silent = set()
        if header.get("of") == self._kind:
            self._begun.add(header["sum"])
            away = len(self._begun) - 1 in self._sums
            late = STAGES.index(header["stage"]) >= STAGES.index(self._stage)
            self.silent = {101} if away and late else set()
        return super().push_messages(messages)


@pytest.mark.parametrize("stage", ["keys", "shares", "masked"])
def test_an_evaluation_is_over_all_sites_or_there_is_none(tmp_path: Path, federated: Federated, stage: str) -> None:
    """The difference of two sums would be the test examples of the site that is missing in one."""
    deployment, sites = _deployed(tmp_path, federated, test=None)
    grid = Away(deployment, sites, "evaluate", stage, [1])
    folder, said = _run(_quick(deployment), grid, "a", method={"name": "fedavg"})
    assert [record["round"] for record in folder.metrics() if "test" in record] == [1, 3]
    assert [record["answered"] for record in folder.metrics()] == [[0, 1, 2]] * 3
    assert any(words.startswith("the model of round 2 is not evaluated, since not all sites did") for words in said)
    summary = folder.summary()
    assert summary is not None and summary["averaged_rounds"] == [3] and summary["confusion"] is not None


@pytest.mark.parametrize("stage", ["shares", "masked"])
def test_a_server_that_sums_evaluations_over_fewer_gets_none(
    tmp_path: Path, federated: Federated, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The sites check it, too. This server would take a sum over two of the three."""
    whole = secure_sum.secure_sum
    monkeypatch.setattr(secure_sum, "secure_sum", lambda sites, ask, fewest: whole(sites, ask, 1))
    deployment, sites = _deployed(tmp_path, federated, test=None)
    grid = Away(deployment, sites, "evaluate", stage, [0])
    folder, said = _run(_quick(deployment), grid, "a", method={"name": "fedavg"}, rounds=2)
    assert [record["round"] for record in folder.metrics() if "test" in record] == [2]
    assert any("must be over all 3 sites; the server has the" in words for words in said)


def test_what_a_site_adds_stays_the_same_through_a_sum(tmp_path: Path, federated: Federated) -> None:
    """A sum of updates may lack a site, one of evaluations may not. So a server must not begin one as the other."""
    _, sites = _deployed(tmp_path, federated, test=None)
    lda = deployed(Experiment.parse({"net": {"name": "linear"}, "method": {"name": "lda"}}), options()).to_toml()
    for changes in ({"of": "evaluate"}, {"round": 2}, {"experiment": lda}):
        begun = _question("sum", sum="a", of="train", round=1, reach=1, stage="keys")
        header, _ = sites[0].answer(begun, {})
        assert "error" not in header
        header, parts = sites[0].answer({**begun, "stage": "shares", **changes}, {})
        assert "another secure sum" in header["error"] and parts == {}


def test_a_run_that_could_never_be_evaluated_is_finished(
    tmp_path: Path, federated: Federated, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that reads it copes with figures that nobody knows. Once the site is back, the final model is evaluated."""
    deployment, sites = _deployed(tmp_path, federated, test=None)
    deployment, method = _quick(deployment), {"name": "fedavg"}
    grid = Away(deployment, sites, "evaluate", "masked", range(100))
    folder, _ = _run(deployment, grid, "a", method=method, rounds=2)
    summary = folder.summary()
    assert summary is not None and summary["averaged_rounds"] == [] and summary["mean_of_last"]["accuracy"] is None
    assert "confusion" not in summary
    for words in (["show"], ["show", "--json"], ["ls"], ["privacy"], ["report", "--out", str(tmp_path / "report")]):
        assert cli.run([words[0], str(folder.path), *words[1:]]) == 0, words
    assert "no round of a was evaluated" in capsys.readouterr().out
    assert cli.run(["export", str(folder.path), str(tmp_path / "model")]) == 0
    assert "There are no figures of the model of round 2." in (tmp_path / "model/README.md").read_text()
    page = page_data({"a": Reading.of(folder.path)})
    assert "no round of a was evaluated" in page["settings"][0]["notes"] and page["runs"]["a"]["averaged"] == 0
    for there in (FakeGrid(deployment, sites), Away(deployment, sites, "evaluate", "masked", range(100))):
        folder, _ = _run(deployment, there, "a", method=method, rounds=2)
        summary = folder.summary()
        assert summary is not None and summary["averaged_rounds"] == [] and summary["confusion"] is not None


def test_a_site_that_is_missing_at_the_very_end_is_asked_later(tmp_path: Path, federated: Federated) -> None:
    """After the last round the model is evaluated twice: for the curve, and for the confusion matrix."""
    deployment, sites = _deployed(tmp_path, federated, test=None)
    deployment, method = _quick(deployment), {"name": "fedavg"}
    folder, _ = _run(deployment, Away(deployment, sites, "evaluate", "masked", [2]), "a", method=method, rounds=2)
    summary = folder.summary()
    assert summary is not None and summary["averaged_rounds"] == [2] and "confusion" not in summary
    folder, _ = _run(deployment, FakeGrid(deployment, sites), "a", method=method, rounds=2)
    assert (folder.summary() or {})["confusion"] is not None


def test_a_missing_site_is_waited_for_once_after_the_last_round(
    tmp_path: Path, federated: Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, sites = _deployed(tmp_path, federated, test=None)
    waited, whole = list[bool](), asking.Sites.sum

    def summed(self: asking.Sites, letters: Any, fewest: int, *, waits: bool = True) -> Summed:
        if next(iter(letters.values()))[0].kind == "evaluate":
            waited.append(waits)
        return whole(self, letters, fewest, waits=waits)

    monkeypatch.setattr(asking.Sites, "sum", summed)
    for name, stage, expected in (("a", "keys", [False, True, False]), ("b", "masked", [False, True, True])):
        waited.clear()
        grid = Away(deployment, sites, "evaluate", stage, range(100))
        _run(_quick(deployment), grid, name, method={"name": "fedavg"}, rounds=2)
        assert waited == expected, "a sum that failed after its keys has not waited"


def test_whoever_spoils_an_evaluation_is_named(tmp_path: Path, federated: Federated) -> None:
    deployment, sites = _deployed(tmp_path, federated, test=None)
    whole = sites[1].answer

    def empty(header: dict[str, Any], parts: Parts) -> tuple[dict[str, Any], Parts]:
        answer, sent = whole(header, parts)
        spoiled = header.get("of") == "evaluate" and header.get("stage") == "masked"
        return answer, dict.fromkeys(sent, b"") if spoiled else sent

    sites[1].answer = empty  # type: ignore[method-assign]
    grid = FakeGrid(deployment, sites)
    _, said = _run(_quick(deployment), grid, "a", method={"name": "fedavg"}, rounds=1)
    [words, _] = [words for words in said if "is not evaluated" in words]
    assert words.startswith("the model of round 1 is not evaluated, since not all sites did: 2 sites gave their part")
    assert f"site '{SITES[1]}': its answer 'masked' in a secure sum cannot be read" in words


def test_missing_evaluations_do_not_bring_the_first_rounds_into_the_mean(tmp_path: Path, federated: Federated) -> None:
    deployment, sites = _deployed(tmp_path, federated, test=None)
    grid = Away(deployment, sites, "evaluate", "masked", [1, 2, 3])
    folder, _ = _run(_quick(deployment), grid, "a", method={"name": "fedavg"}, rounds=5)
    assert (folder.summary() or {})["averaged_rounds"] == [5], "of the last two rounds; round 1 is a warm-up"


def test_the_card_says_which_round_was_evaluated_last(tmp_path: Path, federated: Federated) -> None:
    deployment, sites = _deployed(tmp_path, federated, test=None)
    grid = Away(deployment, sites, "evaluate", "masked", [1, 2])
    folder, _ = _run(_quick(deployment), grid, "a", method={"name": "fedavg"}, rounds=2)
    assert cli.run(["export", str(folder.path), str(tmp_path / "model")]) == 0
    card = (tmp_path / "model/README.md").read_text()
    assert "| accuracy | round 1 |\n" in card and "accuracy, round 1 |\n" in card
    assert "There are no figures of the model of round 2, which this folder holds." in card


def test_a_lost_state_ends_a_run_whose_sums_need_all_sites(tmp_path: Path, federated: Federated) -> None:
    """Without it the site would be left out, and no sum could be made without it."""
    deployment, sites = _deployed(tmp_path, federated)
    deployment, method = _quick(deployment), {"name": "coverage+fedrod"}
    with pytest.raises(TooFewClients):
        _run(deployment, Away(deployment, sites, "train", "keys", range(1, 100)), "a", method=method)
    shutil.rmtree(deployment.site(SITES[0]) / "states")
    sites = [DeployedSite(SiteFolder(deployment.site(name)), federated.data(name)) for name in SITES]
    with pytest.raises(TooFewClients, match=rf"^site '{SITES[0]}' lost the state .* all 3 sites; start a new run$"):
        _run(deployment, FakeGrid(deployment, sites), "a", method=method)


@pytest.mark.parametrize("name", ["lda", "fednh", "redgrape"])
def test_what_tells_of_classes_is_summed_over_all_sites(tmp_path: Path, federated: Federated, name: str) -> None:
    """It is the same in every round, or run, so that a sum without a site would give that of the site."""
    deployment, sites = _deployed(tmp_path, federated)
    deployment, method = _quick(deployment), {"name": name}
    for stage in ("keys", "masked"):
        with pytest.raises(TooFewClients, match=r"there is no sum: 2 sites gave .*, and 3 are needed"):
            _run(deployment, Away(deployment, sites, "train", stage, range(100)), stage, method=method, rounds=1)
    folder, _ = _run(deployment, FakeGrid(deployment, sites), "masked", method=method, rounds=1)
    assert folder.metrics()[0]["answered"] == [0, 1, 2]
    partial = deployed(Experiment.parse({"method": method, "net": {"name": "mlp"}, "clients_per_round": 2}), options())
    refused = admission.why_refused(partial, sites[0].options)
    assert refused is not None and "must be over all 3 sites" in refused


@pytest.mark.parametrize("kind", ["train", "evaluate", "survey"])
def test_a_site_that_insists_answers_in_sums_alone(tmp_path: Path, federated: Federated, kind: str) -> None:
    _, sites = _deployed(tmp_path, federated)
    header, parts = sites[0].answer(_question(kind), {})
    assert "answers only in secure sums" in header["error"] and parts == {}
    said, _ = sites[0].answer(_question("join", secure_aggregation=True), {})
    assert said.keys().isdisjoint({"examples", "tests"}) and said["secure_aggregation"] is True


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stage": "masked"}, "another secure sum"),
        ({"stage": "dance"}, "another secure sum"),
        ({"stage": "keys", "then": "revealed"}, "out of turn"),
        ({"stage": "keys", "then": "masked"}, "out of turn"),
    ],
)
def test_a_site_keeps_to_one_sum(tmp_path: Path, federated: Federated, changes: dict[str, Any], said: str) -> None:
    _, sites = _deployed(tmp_path, federated)
    then = changes.pop("then", None)
    header, parts = sites[0].answer(_question("sum", sum="a", of="survey", **changes), {})
    if then is not None:
        header, parts = sites[0].answer(_question("sum", sum="a", of="survey", stage=then), {})
    assert said in header["error"] and parts == {}


def _sum_question(**changes: Any) -> SumQuestion:
    return SumQuestion.from_header(_question("sum", sum="a", stage="masked", **changes))


def test_a_site_adds_up_only_what_it_is_known_for(tmp_path: Path, federated: Federated) -> None:
    """No other questions, and no method whose updates do not add up."""
    _, sites = _deployed(tmp_path, federated)
    for kind in ("join", "sum"):
        with pytest.raises(wire.NotUnderstood, match=f"a sum of '{kind}', which is not known here"):
            sites[0]._summand(_sum_question(of=kind), {})
    values = {"net": {"name": "mlp"}, "method": {"name": "fedavg"}, "exchange": {"rule": "median"}}
    median = Experiment.parse(values)
    toml = deployed(median, options()).to_toml()
    with pytest.raises(ConfigError, match=r"shows no single updates, and exchange\.rule=median"):
        sites[0]._summand(_sum_question(of="train", experiment=toml), {"broadcast": tree.to_bytes({})})


class Leaving(FakeGrid):
    """From a round on, a site gives no answer from this stage on."""

    def __init__(
        self, deployment: Deployment, sites: Sequence[DeployedSite], leaves: int, stage: str, round: int = 2
    ) -> None:
        super().__init__(deployment, sites)
        self._leaves, self._stage, self._round = leaves, stage, round

    def push_messages(self, messages: list[Any]) -> list[str]:
        for message in messages:
            header, _ = wire.unpack(message.content)
            if (header.get("round"), header.get("stage")) == (self._round, self._stage):
                self.silent = {self._leaves}
            if header.get("round", 0) > self._round or header["kind"] != "sum":
                self.silent = set()
        return super().push_messages(messages)


def _quick(deployment: Deployment) -> Deployment:
    toml = (deployment.path / "deploy.toml").read_text()
    for name, seconds in (("round = 3600.0", 0.5), ("evaluate = 600.0", 0.5), ("join = 300.0", 0.5)):
        toml = toml.replace(name, f"{name.split()[0]} = {seconds}")
    (deployment.path / "deploy.toml").write_text(toml)
    return Deployment(deployment.path)


@pytest.mark.parametrize("stage", ["shares", "masked", "revealed"])
def test_a_site_that_is_lost_in_a_round_is_left_out_of_it(tmp_path: Path, federated: Federated, stage: str) -> None:
    deployment, sites = _deployed(tmp_path, federated)
    folder, said = _run(_quick(deployment), Leaving(deployment, sites, 101, stage), "a")
    answered = [[0, 1, 2], [0, 1, 2] if stage == "revealed" else [0, 2], [0, 1, 2]]
    assert [record["answered"] for record in folder.metrics()] == answered
    assert any("site 'south' was not there" in words for words in said) == (stage != "revealed")


def test_with_too_few_sites_a_round_fails_and_the_run_goes_on_later(tmp_path: Path, federated: Federated) -> None:
    deployment, sites = _deployed(tmp_path, federated)
    deployment = _quick(deployment)
    with pytest.raises(TooFewClients, match="there is no sum: 2 sites gave their keys, and 3 are needed"):
        _run(deployment, Leaving(deployment, sites, 101, "keys"), "a")
    folder, _ = _run(deployment, FakeGrid(deployment, sites), "a")
    assert [record["answered"] for record in folder.metrics()] == [[0, 1, 2]] * 3


class Liar(DeployedSite):
    """Adds something else than its update to the sums of the second round."""

    lie: Callable[[dict[str, Any]], dict[str, Any]]

    def _summand(self, question: Any, parts: Any) -> Any:
        state_key, summand = super()._summand(question, parts)
        return state_key, self.lie(dict(summand)) if question.round == 2 else summand


LIES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "huge": (lambda s: {**s, "delta": {n: t + 1e7 for n, t in s["delta"].items()}}, "has length"),
    "count": (lambda s: {**s, "count": s["count"] - 1000}, "in all; 3 clients have at least one example each"),
    "classes": (
        lambda s: {**s, "prototypes": {**s["prototypes"], "clients": s["prototypes"]["clients"] + 2}},
        "cannot be those of 3 clients",
    ),
}


@pytest.mark.parametrize("what", LIES)
def test_a_sum_that_cannot_be_stops_the_run_with_its_state_intact(
    tmp_path: Path, federated: Federated, what: str
) -> None:
    """Nobody can be named; without the liar the same command goes on."""
    deployment, sites = _deployed(tmp_path, federated)
    lie, words = LIES[what]
    liar = Liar(SiteFolder(deployment.site("west")), federated.data("west"))
    liar.lie = lie
    method = {"name": "redgrape", "batch_size": 8}
    with pytest.raises((Diverged, TooFewClients), match=f"sum over the clients of round 2 was rejected: .*{words}"):
        _run(deployment, FakeGrid(deployment, [*sites[:2], liar]), "a", method=method)
    folder = RunFolder.open(deployment.path / "runs/a")
    assert folder.checkpoints.newest_round() == 1
    _run(deployment, FakeGrid(deployment, sites), "a", method=method)
    assert [record["answered"] for record in folder.metrics()] == [[0, 1, 2]] * 3


def test_a_sum_of_surveys_that_cannot_be_stops_the_run(tmp_path: Path, federated: Federated) -> None:
    class Surveyed(DeployedSite):
        def _survey(self, question: Any) -> Any:
            answer, survey = super()._survey(question)
            return answer, {"class_counts": survey["class_counts"] - 1000}

    deployment, sites = _deployed(tmp_path, federated)
    liar = Surveyed(SiteFolder(deployment.site("west")), federated.data("west"))
    with pytest.raises(TooFewClients, match="the sum of the clients' answers to the survey was rejected"):
        _run(deployment, FakeGrid(deployment, [*sites[:2], liar]), "a", method={"name": "balanced_softmax"})


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (lambda s: {**s, "loss": s["loss"] * torch.nan}, "not finite"),
        (lambda s: {**s, "loss": s["loss"] + 1e12}, "not below 2.86e\\+09"),
        (lambda s: {name: group for name, group in s.items() if name != "loss"}, "other names or shapes"),
    ],
)
def test_a_site_whose_numbers_do_not_fit_is_left_out_by_name(
    tmp_path: Path, federated: Federated, lie: Callable[[dict[str, Any]], dict[str, Any]], words: str
) -> None:
    deployment, sites = _deployed(tmp_path, federated)
    liar = Liar(SiteFolder(deployment.site("west")), federated.data("west"))
    liar.lie = lie
    folder, _ = _run(deployment, FakeGrid(deployment, [*sites[:2], liar]), "a", method={"name": "fedavg"})
    assert [record["answered"] for record in folder.metrics()] == [[0, 1, 2], [0, 1], [0, 1, 2]]
    assert re.search(words, folder.metrics()[1]["lost"]["2"])


def test_server_and_sites_must_agree(tmp_path: Path, federated: Federated) -> None:
    deployment, sites = _deployed(tmp_path, federated)
    path = deployment.path / "deploy.toml"
    path.write_text(path.read_text().replace("secure_aggregation = true", "secure_aggregation = false"))
    plain = _quick(deployment)
    with pytest.raises(TooFewClients):
        _run(plain, FakeGrid(plain, sites), "a")
    folder, _ = _run(*_agreed(tmp_path / "other", federated), "b", rounds=1)
    toml = folder.path.parent.parent / "deploy.toml"
    toml.write_text(toml.read_text().replace("secure_aggregation = true", "secure_aggregation = false"))
    changed = Deployment(toml.parent)
    folder.write_experiment(folder.experiment().with_rounds(2))
    with pytest.raises(ConfigError, match="began with secure_aggregation=true"):
        _run(changed, FakeGrid(changed, sites), "b", rounds=2)


def _agreed(tmp_path: Path, federated: Federated) -> tuple[Deployment, FakeGrid]:
    tmp_path.mkdir()
    deployment, sites = _deployed(tmp_path, federated)
    return deployment, FakeGrid(deployment, sites)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--method", "climb"], "method 'climb' cannot run so: a secure sum shows no single updates, and "),
        (["--method", "fedic", "-c", "data.auxiliary=4"], "method 'fedic' cannot run so: a secure sum shows no"),
        (["-c", "exchange.rule=median"], "a secure sum shows no single updates, and exchange.rule=median"),
        (["-c", "clients_per_round=2", "-c", "exchange.min_clients=1"], "clients_per_round is 2, and a secure sum"),
    ],
)
def test_what_cannot_be_summed_is_refused_by_name(
    tmp_path: Path, federated: Federated, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment, _ = _deployed(tmp_path, federated, min_count=8)
    assert cli.run(["deploy", "run", str(deployment.path), *flags]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert list((deployment.path / "runs").iterdir()) == []


def test_the_deployment_s_own_experiment_can_be_summed(
    tmp_path: Path, federated: Federated, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment, _ = _deployed(tmp_path, federated, min_count=8)
    assert cli.run(["deploy", "run", str(deployment.path), "--dry-run"]) == 0, capsys.readouterr()
    assert "masked" in (deployment.site("north") / "README.md").read_text()


def test_two_sites_are_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sites", "a,b", "--host", "localhost", "--classes", "3", "--shape", "4", "--secure-aggregation"]
    assert cli.run(["deploy", "init", str(tmp_path / "d"), *words]) == 2
    assert "secure_aggregation needs at least 3 sites, and there are 2" in capsys.readouterr().err


def test_the_privacy_report_tells_of_sums(tmp_path: Path, federated: Federated) -> None:
    deployment, sites = _deployed(tmp_path, federated)
    method = {"name": "redgrape", "batch_size": 8}
    folder, _ = _run(deployment, FakeGrid(deployment, sites), "a", method=method, exchange={"min_count": 3})
    facts = disclosed(RunView.read(folder.path))
    assert facts["secure_aggregation"] is True and facts["fewest_answers"] == 3
    seen = facts["class_reports"]["server"]
    assert seen == {"reports": 3 * (3 + 3 + 3), "sums_of_one_client": 0}
    words = " ".join(in_words(facts)["the server"])
    assert "3 sums (secure aggregation), each over 3 sites" in words and "more than half" in words
    assert "which classes each client holds" not in words


def test_the_privacy_report_tells_of_summed_class_counts_and_evaluations(tmp_path: Path, federated: Federated) -> None:
    deployment, sites = _deployed(tmp_path, federated, test=None, min_count=8)
    method = {"name": "logit_adjustment", "prior": "global"}
    folder, _ = _run(deployment, FakeGrid(deployment, sites), "a", rounds=1, method=method)
    words = " ".join(in_words(disclosed(RunView.read(folder.path)))["the server"])
    asked = "Before the first round each client was asked for its class_counts."
    assert f"of all sites together, and of none by itself: {asked}" in words
    assert "of all sites together, by 1 evaluation there" in words and "examples for training" not in words
    method = {"name": "redgrape", "prototype_weights": "count"}
    floor = {"min_count": 8}
    folder, _ = _run(deployment, FakeGrid(deployment, sites), "b", rounds=1, method=method, exchange=floor)
    words = " ".join(in_words(disclosed(RunView.read(folder.path)))["the server"])
    assert "of a round's sites together: the number of examples behind every class that is reported" in words


def test_a_state_of_a_site_is_named_by_its_round(tmp_path: Path, federated: Federated) -> None:
    """SCAFFOLD's control variates stay at the sites; the server keeps which round they are of."""
    deployment, sites = _deployed(tmp_path, federated)
    folder, _ = _run(_quick(deployment), Leaving(deployment, sites, 101, "masked"), "a")
    state, _ = folder.checkpoints.latest()
    assert state is not None
    assert {k: int(s["round"]) for k, s in state.clients.items()} == {0: 3, 1: 3, 2: 3}
    assert RUN not in [path.name for path in (deployment.site("north") / "states").iterdir()]
