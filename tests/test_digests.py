"""Bits that no change of the code's shape may move: SHA-256 of the final server state of tiny runs.

One run for every method and preset, and for every option of what crosses between clients and server. Last bits differ
between processors and versions of torch, so `digests.json` has a list of digests for each that was at hand; elsewhere
the tests are skipped. After a change that is meant to move bits: `REDGRAPE_WRITE_DIGESTS=1 pytest
tests/test_digests.py`, and the commit says which ones moved and why. A digest that moves on one machine is dropped from
the lists of the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import redgrape as rg
from redgrape import methods, nets, tree
from redgrape.method import Method
from redgrape.nets.net import Net
from redgrape.testing import cases
from redgrape.training import Training
from toys import Summing

FILE = Path(__file__).with_name("digests.json")
C, SHAPE = 4, (1, 8, 8)
SIZES = [[14, 5, 1, 0], [0, 9, 4, 0], [3, 0, 9, 2], [6, 3, 0, 0], [10, 2, 0, 5], [4, 8, 0, 0]]
AUXILIARY = [5, 4, 1, 2]
EQUAL = [[5, 3, 1, 1], [2, 2, 3, 3], [1, 4, 4, 1], [4, 1, 1, 4]]  # as many examples each, which can be stacked

RULES: list[dict[str, Any]] = [
    {"rule": "median"},
    {"rule": "trimmed_mean"},
    {"rule": "krum"},
    {"rule": "multi_krum"},
    {"rule": "norm_clipping"},
    {"rule": "norm_clipping", "update_norm": 0.5},
]
NOISE = {"clip": 1.0, "noise": 0.5, "randomness": "seed"}
CHOICES: list[dict[str, Any]] = [
    {"placement": "after_step"},
    {"norm": "per_tensor"},
    {"extra_init": "zeros"},
    {"extra_init": "copy"},
    {"unseen": "mean"},
    {"balanced_draw": "step"},
    {"balanced_stats": "running"},
    {"balanced_stats": "batch_update"},
    {"prototype_weights": "count"},
    {"max_age": 0},
    {"lam_schedule": "cosine"},
    {"threshold": float("inf")},
    {"use_prototypes": False},
    {"use_real_data": False},
    {"two_stream": False},
    {"freeze_encoder": True},
    {"optimizer": "adamw"},
]


class Case(NamedTuple):
    method: str
    preset: str = "paper"
    settings: Mapping[str, Any] = MappingProxyType({})
    exchange: Mapping[str, Any] = MappingProxyType({})
    summed: bool = False
    stack: int = 1

    def __str__(self) -> str:
        words = {**self.settings, **self.exchange}
        flags = [f"{name}={value}" for name, value in words.items()]
        flags += ["summed"] if self.summed else []
        flags += [f"stack={self.stack}"] if self.stack > 1 else []
        return " ".join([self.method, self.preset, *flags])


def all_cases() -> Iterator[Case]:
    for name in methods.names():
        for preset in methods.load(name).presets:
            if preset not in ("private", "post_hoc"):
                yield Case(name, preset)
    for name in ("redgrape", "creff"):
        yield Case(name, exchange={"min_count": 2, "min_clients": 2})
        yield Case(name, exchange={"min_count": 8, "min_clients": 3})
    for name in ("fedavg", "redgrape", "creff"):
        yield from (Case(name, exchange=rule) for rule in RULES)
    yield from (Case("scaffold", exchange={"rule": rule}) for rule in ("krum", "multi_krum"))
    for name in ("fedavg", "fedopt", "redgrape"):
        yield Case(name, exchange=NOISE)
    yield Case("redgrape", exchange={**NOISE, "class_clip": 1.0, "class_noise": 0.5, "min_clients": 2})
    yield Case("redgrape", exchange={"class_clip": 0.1})
    yield from (Case("redgrape", settings=choice) for choice in CHOICES)
    for prior in ("local", "estimated"):
        yield Case("balanced_softmax", settings={"prior": prior})
    yield Case("logit_adjustment", settings={"stage": "post_hoc"})
    for name in ("fedavg", "fedavgm", "feddyn", "fedopt", "scaffold", "balanced_softmax", "ratio_loss", "creff"):
        yield Case(name, summed=True)
    for settings in ({}, {"prototype_weights": "count"}):
        yield Case("redgrape", settings=settings, summed=True)
    yield Case("redgrape", exchange={"min_count": 2, "min_clients": 2}, summed=True)
    for name in ("fedavg", "fed_focal", "fedprox", "feddyn", "scaffold", "fedopt", "fedavgm"):
        yield Case(name, stack=4)


def _method(case: Case) -> Method:
    kind = methods.load(case.method)
    return kind.preset(case.preset, lr=0.02, epochs=2, batch_size=4, **{**kind.cheap, **case.settings})


def _federation(sizes: list[list[int]]) -> rg.Federation:
    stream = np.random.default_rng(5)

    def draw(row: list[int]) -> rg.Examples:
        y = np.repeat(np.arange(C), row)
        x = stream.normal(size=(len(y), *SHAPE)) + 0.5 * y[:, None, None, None]
        return rg.Examples(x.astype(np.float32), y)

    return rg.Federation([draw(row) for row in sizes], draw([3] * C), C, auxiliary=draw(AUXILIARY))


def final_digest(case: Case) -> str:
    plain: partial[Net] = partial(nets.build, "mlp", SHAPE, C, 0)
    build = cases.batchnorm_net if case.stack == 1 and not case.exchange and not case.summed else plain
    federation = _federation(SIZES if case.stack == 1 else EQUAL)
    per_round = None if case.exchange or case.stack > 1 else 2
    engine = Summing if case.summed else None
    with Training(
        _method(case),
        federation,
        build,
        rounds=5,
        clients_per_round=per_round,
        seed=11,
        stack=case.stack,
        exchange=rg.Exchange(**case.exchange),
        engine=engine,
    ) as training:
        *_, last = training.steps()
    flat = {name: t for name, t in tree.flatten(last.state.server).items() if not name.endswith("num_batches_tracked")}
    return hashlib.sha256(tree.to_bytes(tree.unflatten(flat))).hexdigest()


def _here() -> dict[str, str]:
    """torch, and the first processor. A name such as 'AMD EPYC' stands for several, so their numbers are here too."""
    here = {"torch": torch.__version__, "machine": platform.machine()}
    here["capability"] = torch.backends.cpu.get_cpu_capability()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    for line in reversed(lines):
        name, _, value = (word.strip() for word in line.partition(":"))
        if name in ("model name", "cpu family", "model", "stepping", "cache size"):
            here[name] = value
    return here


def _is_here(machine: dict[str, str]) -> bool:
    return machine.items() <= _here().items()


def _lists() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else []
    return found


def _of_this_machine(lists: list[dict[str, Any]]) -> dict[str, str]:
    return next((each["digests"] for each in lists if _is_here(each["machine"])), {})


@pytest.fixture(scope="module")
def recorded() -> dict[str, str]:
    found = _of_this_machine(_lists())
    if not found:
        pytest.skip(f"no digests are recorded for {_here()}")
    return found


@pytest.mark.skipif("REDGRAPE_WRITE_DIGESTS" in os.environ, reason="digests are written")
@pytest.mark.parametrize("case", [*all_cases()], ids=str)
def test_the_bits_are_what_they_were(case: Case, recorded: dict[str, str]) -> None:
    if str(case) not in recorded:
        pytest.skip("the digest moved on another machine, and was not recorded here since")
    assert final_digest(case) == recorded[str(case)]


@pytest.mark.skipif("REDGRAPE_WRITE_DIGESTS" not in os.environ, reason="digests are compared")
def test_write_digests() -> None:
    lists = _lists()
    before = _of_this_machine(lists)
    found = {str(case): final_digest(case) for case in all_cases()}
    moved = {name for name, digest in before.items() if found.get(name) != digest}
    others = [each for each in lists if not _is_here(each["machine"])]
    for each in others:
        each["digests"] = {name: digest for name, digest in each["digests"].items() if name not in moved}
    lists = [*others, {"machine": _here(), "digests": found}]
    FILE.write_text(json.dumps(sorted(lists, key=lambda each: json.dumps(each["machine"])), indent=1) + "\n")


@pytest.mark.skipif("REDGRAPE_WRITE_DIGESTS" in os.environ, reason="digests are written")
def test_options_move_bits(recorded: dict[str, str]) -> None:
    """Else a digest would guard nothing. What changes nothing on this data is named."""
    alike: dict[str, list[str]] = {}
    for case in all_cases():
        alike.setdefault(recorded.get(str(case), str(case)), []).append(str(case))
    assert sorted(names for names in alike.values() if len(names) > 1) == sorted(KNOWN_ALIKE)


KNOWN_ALIKE = [
    ["balanced_softmax paper", "logit_adjustment paper"],  # with tau = 1
    ["fednh paper", "fednh released"],  # no gradient here is longer than 10
    ["over_sampling paper", "under_sampling paper"],  # no class has more than 8 turns in a pass
    ["redgrape paper threshold=inf", "redgrape paper use_real_data=False"],
]
