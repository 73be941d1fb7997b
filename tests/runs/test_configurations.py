"""Generated experiments: what cannot be is refused in one line before anything is read, what can be runs."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import tomli_w

import redgrape as rg
from redgrape import methods, nets
from redgrape.cli import main as cli
from redgrape.data.partition import KINDS
from redgrape.data.prepare import DataOptions
from redgrape.errors import ConfigError, RedgrapeError
from redgrape.runs import run
from redgrape.runs.experiment import Experiment, NetOptions
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run

Tally = Callable[..., None]
slow = pytest.mark.slow
LONGEST = 340  # characters of a line, "redgrape: " and the name of a file included
ALLOWED = ("must be", "choose", "should be", "did you mean", "name some", "at least", "needs", "is for", "only", "pass")
ALLOWED += ("set clip", "set class_clip")


SECTIONS = ("data", "net", "exchange", "method")


def fields() -> dict[str, Any]:
    """Every key of an experiment that has a type, those of all methods among them."""
    found: dict[str, Any] = {k: f for k, f in Experiment.model_fields.items() if k not in SECTIONS}
    found |= {f"data.{name}": field for name, field in DataOptions.model_fields.items()}
    found |= {f"net.{name}": field for name, field in NetOptions.model_fields.items()}
    found |= {f"exchange.{name}": field for name, field in rg.Exchange.model_fields.items()}
    for method in methods.names():
        for name, field in methods.load(method).model_fields.items():
            found[f"{method}:method.{name}"] = field
    return found


FIELDS = fields()
TEXTS = ["nonsense", "", "0x", "ten", "1e", "真", "a" * 500, "\\n", "[red]", "--help", "../../etc/passwd"]
NOT_NUMBERS: list[Any] = [*TEXTS, True, False, [1], [], {"a": 1}, [[]]]


def kinds_of(field: Any) -> list[Any]:
    return [kind for kind in (get_args(field.annotation) or (field.annotation,)) if kind is not type(None)]


def wrong_value(field: Any, dice: random.Random) -> Any:
    """A value that the field's own description rules out."""
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return dice.choice([*TEXTS[:1], *TEXTS[2:], 3, True, ["sgd"]])
    kinds = kinds_of(field)
    if get_origin(annotation) is tuple:
        return dice.choice(["0", 3, True, [1.5], [True], {"a": 1}])
    if str in kinds:
        return dice.choice([3, 1.5, True, ["a"], {"a": 1}])
    if bool in kinds:
        return dice.choice([1, 0, "true", "yes", 1.0, [True]])
    beyond = list(out_of_bounds(field))
    if int in kinds:
        return dice.choice([*NOT_NUMBERS, 1.5, math.nan, math.inf, -math.inf, 1e300, *beyond * 6])
    assert float in kinds, annotation
    return dice.choice([*NOT_NUMBERS, math.nan, *beyond * 6])


def out_of_bounds(field: Any) -> Iterator[float]:
    for bound in field.metadata:
        for name, values in (
            ("ge", (-1, -0.5, -1e300)),
            ("gt", (0, -1, -0.5)),
            ("le", (1, 2, 10**6)),
            ("lt", (0, 1, 10**6)),
        ):
            limit = getattr(bound, name, None)
            if limit is not None:
                for value in values:
                    if int in kinds_of(field):
                        value = int(limit) + (int(value) or -1) if name in {"ge", "gt"} else int(limit) + int(value)
                        yield max(value, -(2**62)) if name in {"ge", "gt"} else value
                    else:
                        yield limit + value


MAY_BE_INFINITE = {"redgrape:method.threshold"}  # it is compared with counts, and inf is a word for never


@pytest.mark.parametrize("key", sorted(FIELDS))
def test_every_number_has_bounds(key: str) -> None:
    """So that none meets a float32 or a size that cannot hold it: floats on both sides, whole numbers from above."""
    field = FIELDS[key]
    kinds, bounds = kinds_of(field), list(field.metadata)
    if get_args(field.annotation) in ((str, ...), (float, ...)):  # names, and shares, which are checked one by one
        return
    if get_origin(field.annotation) is tuple:
        number, _ = get_args(get_args(field.annotation)[0])  # or a name
        kinds, *elements = get_args(number)
        kinds, bounds = [kinds], [bound for element in elements for bound in element.metadata]
    high = min((getattr(b, n) for b in bounds for n in ("le", "lt") if hasattr(b, n)), default=math.inf)
    low = max((getattr(b, n) for b in bounds for n in ("ge", "gt") if hasattr(b, n)), default=-math.inf)
    if int in kinds:
        assert high < 2**63
    elif float in kinds and key not in MAY_BE_INFINITE:
        assert -1e9 <= low <= high <= 1e9


@pytest.mark.parametrize("name", methods.names())
def test_floats_at_their_bounds_meet_no_error_of_torch(name: str) -> None:
    """Rounds with each hyper-parameter as large and as small as it may be end well, or in one line. A method that
    trains and averages by FedAvg's own code leaves the hyper-parameters of that code to FedAvg."""
    x, y = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32), np.arange(24) % 3
    data = rg.Examples(x, y)
    federation = rg.Federation([data, data], data, 3, auxiliary=data)
    build = partial(nets.build, "linear", (4,), 3, 0)
    method = methods.load(name)
    halves = ("client_update", "server_update", "regulariser", "batches")
    is_fedavg = all(getattr(method, half, None) is getattr(rg.FedAvg, half) for half in halves)
    shared = rg.FedAvg.model_fields if is_fedavg and name != "fedavg" else {}
    for key, field in method.model_fields.items():
        if key in shared:
            continue
        for value in (1e9, 1e-9, 1e-300) if float in kinds_of(field) else ():
            try:
                options = {**method.cheap, "epochs": 1, "batch_size": 12, key: value}
                rg.train(method(**options), federation, build, rounds=2)
            except RedgrapeError as error:
                assert "\n" not in str(error)


def test_settings_of_the_exchange_at_their_bounds_meet_no_error_of_torch() -> None:
    """A round with each number as large and as small as it may be ends well, or in one line."""
    x, y = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32), np.arange(24) % 3
    federation = rg.Federation([rg.Examples(x, y)] * 3, rg.Examples(x, y), 3)
    build, method = partial(nets.build, "linear", (4,), 3, 0), methods.load("redgrape")(epochs=1, batch_size=12)
    clips = {"clip": 1.0, "class_clip": 1.0, "noise": 1.0, "class_noise": 1.0, "randomness": "seed"}
    for name in (*clips, "update_norm"):
        for value in (1e9, 1e-9, 1e-300) if name != "randomness" else ():
            around = {"rule": "norm_clipping"} if name == "update_norm" else clips
            try:
                rg.train(method, federation, build, rounds=2, exchange=rg.Exchange(**{**around, name: value}))
            except RedgrapeError as error:
                assert "\n" not in str(error)


BROKEN = [
    b"seed = ",
    b"seed = = 3",
    b"seed = 1\nseed = 2\n",
    b"[data]\n[data]\n",
    b'net = "cnn\n',
    b"\xff\xfe\x00",
    b"seed = 01",
    b"a" * 10_000,
    b"x = " + b"[" * 5000,
    b"seed = " + b"9" * 6000,
    b"\x00",
    b"{}",
    b"<html></html>",
    b"seed: 3\nrounds: 4\n",
    b"!!python/object/apply:os.system ['true']",
    b"[method]\nname = 'fedavg'\n[method.name]\nx = 1\n",
    b"seed = 1979-13-01",
    b"\xef\xbb\xbfseed = 'x",
]

TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"clients_per_round": 11}, "clients_per_round is 11"),
    ({"clients_per_round": 4, "data": {"clients": 3}}, "clients_per_round is 4"),
    ({"data": {"partition": "natural"}}, "data.partition is 'natural'"),
    ({"data": {"source": "mnist", "image_size": 32}}, "data.image_size"),
    ({"data": {"source": "pictures", "image_size": 3}, "net": {"name": "cnn"}}, "data.image_size is 3"),
    ({"data": {"source": "pictures", "image_size": 5}, "net": {"name": "cnn_dropout"}}, "data.image_size is 5"),
    ({"data": {"source": "pictures", "image_size": 4}, "net": {"name": "resnet20"}}, "data.image_size is 4"),
    ({"data": {"imbalance": "binary", "tail_classes": [10]}}, "data.tail_classes is [10]"),
    ({"data": {"imbalance": "binary", "tail_classes": [-1]}}, "data.tail_classes is [-1]"),
    ({"data": {"imbalance": "binary", "tail_classes": [1, 1]}}, "data.tail_classes is [1, 1]"),
    ({"data": {"imbalance": "binary", "tail_classes": []}}, "data.tail_classes is []"),
    ({"data": {"imbalance": "binary", "tail_classes": list(range(10))}}, "data.tail_classes is [0, 1"),
    ({"data": {"source": "cifar100", "imbalance": "binary", "tail_classes": [100]}}, "data.tail_classes is [100]"),
    ({"method": {"name": "ratio_loss"}}, "data.auxiliary is 0"),
    ({"method": {"name": "fedic"}}, "data.auxiliary is 0"),
    ({"net": {"name": "resnet8"}, "method": {"name": "fedavg", "batch_size": 1}}, "method.batch_size is 1"),
    ({"method": {"name": "redgrape", "threshold": 2.5}}, "method.threshold: it is 2.5"),
    ({"method": {"name": "redgrape", "threshold": math.nan}}, "threshold"),
    ({"method": {"name": "scaffold", "preset": "released"}}, "preset"),
    ({"method": {"name": "fedavg", "lam": 0.1}}, "method.lam"),
    ({"exchange": {"noise": 1.0}}, "noise is 1, but updates are not bounded; set clip"),
    ({"exchange": {"class_noise": 1.0}}, "class_noise is 1, but class rows are not bounded; set class_clip"),
    ({"exchange": {"rule": "median", "clip": 1.0}}, "rule is median, and clip bounds a mean; choose"),
    ({"exchange": {"rule": "krum", "byzantine": 4}}, "exchange.rule is krum, and against byzantine=4 it needs 11"),
]


def nested(key: str, value: Any) -> dict[str, Any]:
    """`redgrape:method.lr` -> {"method": {"name": "redgrape", "lr": value}}"""
    method, _, path = key.rpartition(":")
    *sections, name = path.split(".")
    values: dict[str, Any] = {name: value}
    if method and name != "name":
        values = {"name": method, **values}
    for section in reversed(sections):
        values = {section: values}
    return values


def typo(name: str, dice: random.Random) -> str:
    place = dice.randrange(len(name))
    return dice.choice([name[:place] + name[place + 1 :], name[:place] + "x" + name[place:], name + "s", name.upper()])


def invalid(dice: random.Random) -> tuple[bytes, list[str], str]:
    """A file that cannot be an experiment, or a good one with a bad assignment, and what the line must name."""
    kind = dice.choice(["value"] * 9 + ["assignment"] * 4 + ["key"] * 4 + ["together"] * 2 + ["broken", "section"])
    if kind in {"value", "assignment"}:
        key = dice.choice(sorted(FIELDS))
        value = wrong_value(FIELDS[key], dice)
        path = key.rpartition(":")[2]
        named = {"net.name": "net", "method.name": "method", "method.preset": "preset"}.get(path, path.split(".")[-1])
        if kind == "assignment" and not isinstance(value, dict) and not (isinstance(value, str) and "\n" in value):
            text = json.dumps(value) if isinstance(value, bool | str | list) else str(value)
            method = key.rpartition(":")[0]
            named_method = ["--method", method] if method and path != "method.name" else []
            return b"", [*named_method, "-c", f"{path}={text}"], named
        return tomli_w.dumps(nested(key, value)).encode(), [], named
    if kind == "key":
        section = dice.choice(["", *(f"{name}." for name in SECTIONS)])
        names = {key.rpartition(":")[2] for key in FIELDS}
        here = sorted(n.removeprefix(section) for n in names if n.startswith(section) and n.count(".") == bool(section))
        name = typo(dice.choice(here), dice)
        while name in here or not name:
            name = typo(dice.choice(here), dice)
        return tomli_w.dumps(nested(f"{section}{name}", 1)).encode(), [], name
    if kind == "together":
        values, words = dice.choice(TOGETHER)
        return tomli_w.dumps(values).encode(), [], words
    if kind == "section":
        name = dice.choice(SECTIONS)
        return tomli_w.dumps({name: dice.choice([3, "x", [1], True, 1.5])}).encode(), [], name
    return dice.choice(BROKEN), [], ""


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=[slow, pytest.mark.timeout(3600)])])
def test_what_cannot_be_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tally: Tally, count: int
) -> None:
    """Exit code 2; one line with the key, and what is allowed; no traceback, no file; no data is read."""

    def read(*_: object) -> None:
        raise RedgrapeError("data was read")

    monkeypatch.setattr(run, "prepare", read)
    monkeypatch.chdir(tmp_path)
    toml = tmp_path / "e.toml"
    dice = random.Random(count)
    wrong = []
    for _ in range(count):
        content, options, named = invalid(dice)
        toml.write_bytes(content)
        code = cli.run(["run", str(toml), *options, "--workers", "1", "--out", str(tmp_path / "out")])
        out, err = capsys.readouterr()
        lines = err.splitlines()
        fine = (
            code == 2
            and out == ""
            and len(lines) == 1
            and lines[0].startswith("redgrape: ")
            and len(lines[0]) <= LONGEST + len(str(toml))
            and named in err
            and any(word in err for word in (*ALLOWED, "not valid TOML"))
            and "Traceback" not in err
            and [path.name for path in tmp_path.iterdir()] == ["e.toml"]
        )
        if not fine:
            wrong.append((content[:200], options, named, code, out, err))
    tally("invalid experiments: exit code 2, one line, no file", count, count - len(wrong))
    assert not wrong, "\n".join(map(str, wrong[:20]))


@pytest.mark.parametrize(("values", "words"), TOGETHER, ids=[words for _, words in TOGETHER])
def test_what_does_not_fit_together_is_refused_before_data_is_read(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Experiment.parse(values)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "net", [{"name": "resnet_like.py:net"}, {"name": "timm:vit_tiny_patch16_224", "frozen": False}]
)
def test_a_net_of_another_kind_may_train_with_batches_of_one(net: dict[str, Any]) -> None:
    """Whether it has BatchNorm is seen once it is built."""
    Experiment.parse({"net": net, "method": {"name": "fedavg", "batch_size": 1}})


@pytest.mark.parametrize("key", sorted(key for key in FIELDS if ":" not in key or key.startswith("redgrape:")))
def test_the_line_tells_key_value_and_what_is_allowed(key: str) -> None:
    dice = random.Random(key)
    for _ in range(4):
        value = wrong_value(FIELDS[key], dice)
        with pytest.raises(ConfigError) as caught:
            Experiment.parse(nested(key, value))
        line = str(caught.value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert repr(value)[:20] in line
        elif isinstance(value, str):
            assert value[:20] in line or repr(value)[:20] in line


# Valid ones


def some(field: Any, dice: random.Random) -> Any:
    """A value that the field allows, near its default where it is a number."""
    annotation, default = field.annotation, field.default
    if get_origin(annotation) is Literal:
        return dice.choice(get_args(annotation))
    kinds = kinds_of(field)
    if bool in kinds:
        return dice.random() < 0.5
    if default is None or str in kinds or get_origin(annotation) is tuple:
        return default
    low = max([getattr(m, n) for m in field.metadata for n in ("ge", "gt") if hasattr(m, n)], default=0)
    high = min([getattr(m, n) for m in field.metadata for n in ("le", "lt") if hasattr(m, n)], default=math.inf)
    if int in kinds:
        return int(dice.randint(int(max(low, default // 2)), int(min(high, default + 2))))
    value = min(max(default * dice.choice([0.3, 1.0, 2.0]), low), high)
    is_open = any(hasattr(m, "gt") or hasattr(m, "lt") for m in field.metadata)
    return default if is_open and value in (low, high) else value


def valid(dice: random.Random, own: dict[str, Path]) -> dict[str, Any]:
    name = dice.choice(methods.names())
    method = methods.load(name)
    hyper = {k: some(f, dice) for k, f in method.model_fields.items() if dice.random() < 0.4}
    hyper = {k: v for k, v in hyper.items() if v is not None}
    hyper |= {"name": name, "epochs": 1, "batch_size": dice.choice([2, 5, 64]), "lr": dice.choice([1e-3, 0.01, 0.05])}
    hyper |= method.cheap
    if "threshold" in hyper:
        hyper["threshold"] = dice.choice([1, 3, 8, math.inf])
    source = dice.choice(["digits", *own])
    data: dict[str, Any] = {
        "source": str(own.get(source, source)),
        "imbalance": dice.choice(["exponential", "binary", "natural"] if source == "digits" else ["binary", "natural"]),
        "tail_classes": dice.choice([[0], [1, 2]]),
        "ir": dice.choice([1.0, 3.0, 10.0]),
        "head_cap": 15,
        "partition": dice.choice([*KINDS, *(["natural"] if source != "digits" else [])]),
        "alpha": dice.choice([0.05, 1.0, 1000.0]),
        "clients": dice.randint(1, 6),
        "validation": dice.choice([0, 1]),
        "auxiliary": 2 if method.uses_auxiliary else 0,
    }
    if source != "vectors":
        data |= {"crop": dice.choice([0, 2]), "flip": dice.random() < 0.5, "cutout": dice.choice([0, 3])}
    net = dice.choice(["linear", "mlp"] if source == "vectors" else ["linear", "mlp", "cnn", "resnet8"])
    clients_per_round = dice.choice(["none", 1, data["clients"]]) if data["partition"] != "natural" else "none"
    return {
        "seed": dice.randrange(2**63),
        "rounds": 1,
        "clients_per_round": clients_per_round,
        "evaluate_every": dice.randint(1, 3),
        "checkpoint_every": dice.randint(1, 3),
        "data": data,
        "net": {"name": net},
        "method": hyper,
    }


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("own")
    random = np.random.default_rng(0)
    y = np.arange(60) % 5
    client = random.integers(0, 4, 60)
    np.savez(folder / "vectors.npz", x=random.normal(size=(60, 6)).astype(np.float32), y=y, client=client)
    np.savez(folder / "images.npz", x=random.integers(0, 256, (60, 9, 8, 3), np.uint8), y=y, client=client)
    return {"vectors": folder / "vectors.npz", "images": folder / "images.npz"}


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers(inner)
    elif isinstance(value, int | float):
        yield value


@pytest.mark.parametrize("count", [12, pytest.param(400, marks=[slow, pytest.mark.timeout(3600)])])
def test_what_can_be_runs_to_finite_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, Path], tally: Tally, count: int
) -> None:
    """Any method, hyper-parameters, data, imbalance, partition and net that are allowed together."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    dice = random.Random(count)
    done = refused = 0
    while done < count:
        values = valid(dice, own)
        try:
            experiment = Experiment.parse(values)
        except ConfigError:  # by chance the hyper-parameters exclude each other
            refused += 1
            assert refused <= done // 3 + 15, values
            continue
        folder = RunFolder.create(tmp_path / f"{done}-{refused}", experiment)
        try:
            for step in Run(folder, workers=1).steps():
                assert all(map(math.isfinite, numbers(step.record))), values
        except ConfigError as error:  # only the data tells how many clients have any
            assert "clients a round; there are" in str(error), values
            refused += 1
            continue
        summary = folder.summary()
        assert summary is not None
        assert all(map(math.isfinite, numbers(summary))), values
        done += 1
    tally("valid experiments: a round to finite numbers", count, done)


# Data at the edge


def edge(kind: str) -> dict[str, Any]:
    """Vectors of classes 0 .. 3, of which one is nobody's, divided among clients in an extreme way."""
    random = np.random.default_rng(1)
    n = 24
    y = np.arange(n) % 3
    x = random.normal(size=(n, 4)).astype(np.float32) + y[:, None]
    owners = {
        "one client has all": np.zeros(n, int),
        "one example each": np.arange(n),
        "one has one example": np.array([1] + [0] * (n - 1)),
        "one class each": y,
    }
    names = np.array(["a", "b", "c", "nobody's"])
    test = {"x_test": x[:6] + 0.1, "y_test": y[:6]}
    return {"x": x, "y": y, "client": owners[kind], "class_names": names, **test}


@pytest.mark.parametrize("kind", ["one client has all", "one example each", "one has one example", "one class each"])
@pytest.mark.parametrize("method", methods.names())
def test_data_at_the_edge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, kind: str) -> None:
    """Every method, on data with a class that nobody has: two rounds of finite numbers."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    np.savez(tmp_path / "own.npz", **edge(kind))
    made = methods.load(method)
    values = {
        "rounds": 2,
        "data": {"source": str(tmp_path / "own.npz"), "partition": "natural"},
        "net": {"name": "mlp"},
        "method": {"name": method, "epochs": 1, "batch_size": 4, **made.cheap},
    }
    if made.uses_auxiliary:
        values["data"]["auxiliary"] = 2  # type: ignore[index]
        with pytest.raises(Exception, match="no example of class 3"):
            run_all(tmp_path / "run", values)
        return
    for record in run_all(tmp_path / "run", values):
        assert all(map(math.isfinite, numbers(record))), record


def run_all(path: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    folder = RunFolder.create(path, Experiment.parse(values))
    return [step.record for step in Run(folder, workers=1).steps()]


def test_every_net_is_tried() -> None:
    """The generator of valid experiments knows the families of nets that there are."""
    assert {re.sub("[0-9].*|_.*", "", name) for name in nets.NETS} == {"cnn", "linear", "mlp", "resnet"}
