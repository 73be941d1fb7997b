"""An experiment is what its TOML says, all of it, and nothing that cannot be run gets past it."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redgrape import methods, nets
from redgrape.data.partition import KINDS
from redgrape.data.prepare import DataOptions
from redgrape.data.sources import AS_THEY_ARE, READERS
from redgrape.errors import ConfigError, DataError
from redgrape.exchange import Exchange
from redgrape.exchange.rules import Rule
from redgrape.methods.redgrape import RedGrape
from redgrape.runs.experiment import Experiment, NetOptions, build_net
from redgrape.runs.values import override, read_toml

LONGEST = 300
PRESETS = [(name, preset) for name in methods.names() for preset in methods.load(name).presets]


def refusal(values: Any) -> str:
    """The words with which these values are refused: always one line."""
    with pytest.raises(ConfigError) as caught:
        Experiment.parse(values)
    message = str(caught.value)
    assert message.splitlines() == [message]
    assert len(message) <= LONGEST
    return message


def through_toml(experiment: Experiment) -> Experiment:
    return Experiment.parse(tomllib.loads(experiment.to_toml()))


# Round trips


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_toml_round_trip_of_every_preset(name: str, preset: str) -> None:
    """Read back, an experiment is the same method with the same hyper-parameters, and has the same hash."""
    experiment = Experiment.parse({"method": {"name": name, "preset": preset}, "data": {"auxiliary": 32}})
    again = through_toml(experiment)
    assert again.hash() == experiment.hash()
    assert again.to_toml() == experiment.to_toml()
    assert again.method.create() == experiment.method.create() == methods.load(name).preset(preset)


EVERY_FIELD: dict[str, Any] = {
    "seed": 2**63 - 1,
    "rounds": 7,
    "clients_per_round": 3,
    "min_answers": 2,
    "evaluate_every": 2,
    "checkpoint_every": 4,
    "keep": "best",
    "patience": 6,
    "start": "runs/before",
    "data": {
        "source": "here/ärger \"quoted\" 'too' \\ [x] # = 猫.csv",
        "label": "kind",
        "site": "place",
        "test": "fold=3",
        "drop": ["id", "a name"],
        "categorical": ["zip"],
        "image_size": 32,
        "letterbox": True,
        "normalise": True,
        "imbalance": "binary",
        "ir": 12.5,
        "tail_classes": [1, 2],
        "head_cap": 100,
        "partition": "prior_dirichlet",
        "alpha": 0.25,
        "clients": 4,
        "validation": 5,
        "auxiliary": 6,
        "crop": 4,
        "flip": True,
        "cutout": 16,
    },
    "net": {"name": "resnet8", "weights": "w.safetensors"},
    "exchange": {
        "preset": "private",
        "rule": "norm_clipping",
        "byzantine": 2,
        "update_norm": 2.5,
        "clip": "none",
        "noise": 0.0,
        "delta": 1e-6,
        "randomness": "seed",
        "min_count": 2,
        "min_clients": 2,
        "class_clip": "none",
        "class_noise": 0.0,
    },
    "method": {
        "name": "redgrape",
        "preset": "released",
        "optimizer": "adamw",
        "lr": 0.3,
        "lr_schedule": "cosine",
        "lr_final": 0.5,
        "lr_milestones": [0.2, 0.6],
        "lr_warmup": 3,
        "momentum": 0.0,
        "weight_decay": 5e-4,
        "batch_size": 17,
        "epochs": 2,
        "clip_norm": 3.0,
        "server_lr": 0.9,
        "freeze_encoder": True,
        "lam": 0.7,
        "lam_schedule": "cosine",
        "lam_final": 0.125,
        "threshold": math.inf,
        "placement": "in_gradient",
        "norm": "joint",
        "extra_init": "copy",
        "unseen": "skip",
        "balanced_draw": "step",
        "balanced_stats": "running",
        "prototype_weights": "count",
        "prototype_view": "plain",
        "max_age": 9,
        "use_prototypes": False,
        "use_real_data": False,
        "two_stream": False,
    },
}


NOT_AS_RELEASED = {"placement", "norm", "unseen", "prototype_view"}


ENCODER = {"name": "efficientnet_lite0", "weights": "w.safetensors", "frozen": False, "head": "mlp", "size": 96}


def test_toml_round_trip_of_an_encoder() -> None:
    experiment = Experiment.parse({"net": ENCODER})
    assert through_toml(experiment).hash() == experiment.hash()
    assert tomllib.loads(experiment.to_toml())["net"] == ENCODER


def test_toml_round_trip_of_every_field() -> None:
    """Every field there is, set to another value than its default, is written out and read back."""
    experiment = Experiment.parse(EVERY_FIELD)
    assert through_toml(experiment) == experiment
    assert tomllib.loads(experiment.to_toml()) == EVERY_FIELD
    defaults = Experiment.parse({}).resolved()
    sections = {"data": DataOptions, "net": NetOptions, "exchange": Exchange, "method": RedGrape}
    for section, model in sections.items():
        set_elsewhere = ENCODER.keys() if section == "net" else {"pooled", "alone"}
        assert model.model_fields.keys() <= EVERY_FIELD[section].keys() | set_elsewhere, "a field that is not set here"
        same = [k for k, v in EVERY_FIELD[section].items() if k != "name" and defaults[section].get(k) == v]
        unlike_the_preset, not_with_the_rule = NOT_AS_RELEASED, {"clip", "noise", "class_clip", "class_noise"}
        assert not set(same) - unlike_the_preset - not_with_the_rule


def test_the_hash_names_the_experiment() -> None:
    """Any field changes it; the order of keys and writing out a default do not."""
    base = Experiment.parse({})
    assert base.hash() == Experiment.parse({"rounds": base.rounds, "data": {}, "method": {"name": "redgrape"}}).hash()
    flat = Experiment.parse({"data": {"clients": 20}, "clients_per_round": 5, "seed": 1})
    assert flat.hash() == Experiment.parse({"seed": 1, "clients_per_round": 5, "data": {"clients": 20}}).hash()
    hashes = {base.hash(), flat.hash()}
    for key, value in (("seed", 1), ("rounds", 21), ("evaluate_every", 2), ("checkpoint_every", 2)):
        hashes.add(Experiment.parse({key: value}).hash())
    for section in ("data", "net", "exchange", "method"):
        hashes.add(Experiment.parse({section: EVERY_FIELD[section]}).hash())
    assert len(hashes) == 10


def test_more_rounds_are_the_same_otherwise() -> None:
    experiment = Experiment.parse(EVERY_FIELD)
    longer = experiment.with_rounds(99)
    assert longer.rounds == 99
    assert longer.with_rounds(7) == experiment


def test_a_preset_holds_where_nothing_else_is_said() -> None:
    """The preset first, then what is given beside it, in whatever order the file has them."""
    released = methods.load("redgrape").presets["released"]
    method = Experiment.parse({"method": {"clip_norm": 5.0, "norm": "joint", "preset": "released"}}).method.create()
    assert dict(method) == {**dict(RedGrape(**released)), "clip_norm": 5.0, "norm": "joint"}


def test_own_data_keeps_its_imbalance() -> None:
    """A path means the data as it is; a public set is made long-tailed; either can be asked for."""
    for source in READERS:
        expected = "natural" if source in AS_THEY_ARE else "exponential"
        assert Experiment.parse({"data": {"source": source}}).data.imbalance == expected
    assert Experiment.parse({}).data.imbalance == "exponential"
    assert Experiment.parse({"data": {"source": "my.npz"}}).data.imbalance == "natural"
    asked = {"source": "my.npz", "imbalance": "exponential"}
    assert through_toml(Experiment.parse({"data": asked})).data.imbalance == "exponential"
    assert Experiment.parse({"data": {"imbalance": "natural"}}).data.imbalance == "natural"


# Refusals


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"round": 3}, "unknown key 'round'; did you mean 'rounds'?"),
        ({"image_size": 32}, "unknown key 'image_size'; did you mean 'data.image_size'?"),
        ({"clip": 1.0}, "unknown key 'clip'; did you mean 'exchange.clip'?"),
        ({"name": "mlp"}, "unknown key 'name'; did you mean 'net.name' or 'method.name'?"),
        ({"mu": 1.0, "method": {"name": "fedprox"}}, "unknown key 'mu'; did you mean 'method.mu'?"),
        ({"mu": 1.0, "method": {"name": "fedavg"}}, "unknown key 'mu'; choose from seed, rounds"),
        ({"data": {"alhpa": 1.0}}, "unknown key 'data.alhpa'; did you mean 'alpha'?"),
        ({"net": {"nmae": "cnn"}}, "unknown key 'net.nmae'; did you mean 'name'?"),
        ({"method": {"lamb": 0.2}}, "unknown key 'method.lamb'; did you mean 'lam'?"),
        ({"method": {"name": "fedavg", "lam": 0.2}}, "unknown key 'method.lam'; choose from optimizer, lr"),
        ({"qqq": 3}, "unknown key 'qqq'; choose from seed, rounds"),
        ({"int": 3}, "unknown key 'int'"),
        ({"data": {"float": 3}}, "unknown key 'data.float'"),
        ({"method": {"self": 3}}, "unknown key 'method.self'"),
        ({"method": {"cls": 3}}, "unknown key 'method.cls'"),
        ({"data": {"source": "mnist", "": 1}}, "unknown key 'data.'"),
        ({"two\nlines": 3}, "unknown key 'two lines'"),
        ({"k" * 5000: 3}, "unknown key 'kkk"),
        ({"net": {"name": "resnet9"}}, "unknown net 'resnet9'; did you mean 'resnet"),
        ({"net": {"name": "x" * 5000}}, "net: unknown net 'xxx"),
        ({"method": {"name": "fedavgg"}}, "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        ({"method": {"name": "x" * 5000}}, "unknown method 'xxx"),
        ({"method": {"preset": "relaesed"}}, "unknown preset 'relaesed'; did you mean 'released'?"),
        ({"data": {"partition": "idd"}}, "data.partition: unknown partition 'idd'; did you mean 'iid'?"),
        ({"data": {"ir": math.nan}}, "data.ir is nan; it must be at most 1000000000.0"),
        ({"data": {"ir": math.inf}}, "data.ir is inf; it must be at most 1000000000.0"),
        ({"data": {"ir": 0.5}}, "data.ir is 0.5; it must be at least 1"),
        ({"data": {"ir": 10**400}}, "data.ir is 1000"),
        ({"data": {"alpha": 0}}, "data.alpha is 0; it must be at least 1e-06"),
        ({"data": {"tail_classes": [1, 2.5]}}, "data.tail_classes.1 is 2.5"),
        ({"data": {"tail_classes": [1, 1]}}, "data.tail_classes is [1, 1]; name some classes from 0 .. 9"),
        ({"data": {"source": "\udcff.npz"}}, "is not valid text"),
        ({"data": 3}, "data is 3; input should be a valid dictionary"),
        ({"method": "fedavg"}, "method is 'fedavg'; input should be a valid dictionary"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"seed": 10**5000}, "seed is a number with too many digits; it must be at most"),
        ({"rounds": True}, "rounds is True; input should be a valid integer"),
        ({"rounds": 3.0}, "rounds is 3.0; input should be a valid integer"),
        ({"rounds": "3"}, "rounds is '3'; input should be a valid integer"),
        ({"clients_per_round": 11}, "clients_per_round is 11, but data.clients is only 10"),
        ({"method": {"momentum": 1.0}}, "method.momentum is 1.0; it must be below 1"),
        ({"method": {"lr_final": math.nan}}, "method.lr_final is nan"),
        ({"method": {"threshold": math.nan}}, "method.threshold is nan; it must be at least 1"),
        ({"method": {"threshold": -math.inf}}, "method.threshold is -inf; it must be at least 1"),
        (
            {"method": {"threshold": 2.5}},
            "method.threshold: it is 2.5, but it is a number of examples: pass a whole number or inf",
        ),
        ({"exchange": {"rul": "median"}}, "unknown key 'exchange.rul'; did you mean 'rule'?"),
        ({"exchange": {"rule": "medain"}}, "exchange.rule is 'medain'; choose from 'mean', 'median'"),
        ({"exchange": {"noise": 1.0}}, "noise is 1, but updates are not bounded; set clip as well"),
        *[
            ({**values, "exchange": {"clip": 1.0, "noise": 1.0}}, f"exchange has noise, but {what} the clients' data")
            for values, what in (
                ({"start": "runs/first"}, "start names a run that used"),
                ({"data": {"normalise": True}}, "data.normalise uses"),
            )
        ],
        ({"exchange": {"preset": "privat"}}, "exchange.preset is 'privat'; choose from 'plain', 'private'"),
        ({"seed": -1, "rounds": 0, "data": {"ir": 0.0}}, "(and 2 more)"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(values: dict[str, Any], words: str) -> None:
    assert words in refusal(values)


def test_nesting_without_end_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(20_000):
        deep = {"a": deep}
    for values in (deep, {"data": deep}, {"method": deep}, {"seed": deep}, {"method": {"lr": deep}}):
        refusal(values)


def test_natural_clients_are_not_counted_in_advance() -> None:
    """The natural partition brings its own number of clients, which data.clients does not tell."""
    natural = {"clients_per_round": 11, "data": {"source": "own.npz", "partition": "natural"}}
    assert Experiment.parse(natural).clients_per_round == 11


_NOT_NUMBERS = st.one_of(
    st.text(max_size=400),
    st.booleans(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.dates(),
)
_NOT_INTEGERS = _NOT_NUMBERS | st.floats()
_NOT_TEXT = st.one_of(st.integers(), st.floats(), st.booleans(), st.dates())
_NOT_BOOLEANS = st.one_of(st.integers(), st.floats(), st.text(), st.dates(), st.lists(st.booleans(), max_size=2))


def below(least: int) -> st.SearchStrategy[Any]:
    return _NOT_INTEGERS | st.integers(max_value=least - 1)


def outside(low: float, high: float = math.inf) -> st.SearchStrategy[Any]:
    """Floats beyond these bounds, NaN and infinity among them, and what is no number."""
    values = st.floats().filter(lambda v: not (low <= v <= high) or math.isinf(v))
    return _NOT_NUMBERS | values | st.sampled_from([math.nan, math.inf, -math.inf, 10**400, 10**5000])


def unlike(*allowed: Any) -> st.SearchStrategy[Any]:
    return _NOT_NUMBERS.filter(lambda v: v not in allowed)


WRONG: dict[str, st.SearchStrategy[Any]] = {
    "seed": below(0) | st.integers(min_value=2**63),
    "rounds": below(1),
    "clients_per_round": below(1),
    "evaluate_every": below(1),
    "checkpoint_every": below(1),
    "start": _NOT_TEXT,
    "data.source": _NOT_TEXT,
    "data.image_size": below(1),
    "data.imbalance": unlike("exponential", "binary", "natural"),
    "data.ir": outside(1),
    "data.tail_classes": st.one_of(
        st.text(), st.integers(), st.lists(st.floats() | st.dates(), min_size=1, max_size=3)
    ),
    "data.head_cap": below(1),
    "data.partition": unlike(*KINDS, "natural"),
    "data.alpha": outside(5e-324),
    "data.clients": below(1),
    "data.validation": below(0),
    "data.crop": below(0),
    "data.flip": _NOT_BOOLEANS,
    "data.cutout": below(0),
    "net.name": _NOT_TEXT | st.text(max_size=400).filter(lambda v: v not in nets.NETS),
    "net.weights": _NOT_TEXT,
    "method.name": _NOT_TEXT | st.text(max_size=400).filter(lambda v: v not in methods.names()),
    "method.preset": _NOT_TEXT | st.text(max_size=400).filter(lambda v: v not in ("paper", "released")),
    "method.optimizer": unlike("sgd", "adam", "adamw"),
    "method.lr": outside(5e-324),
    "method.lr_schedule": unlike("constant", "cosine", "linear", "exponential", "step"),
    "method.lr_final": outside(5e-324, 1),
    "method.momentum": outside(0, math.nextafter(1, 0)),
    "method.weight_decay": outside(0),
    "method.batch_size": below(1),
    "method.epochs": below(1),
    "method.clip_norm": outside(5e-324),
    "method.server_lr": outside(5e-324),
    "method.freeze_encoder": _NOT_BOOLEANS,
    "method.lam": outside(0),
    "method.threshold": _NOT_NUMBERS | st.floats().filter(lambda v: not (v >= 1 and (math.isinf(v) or v == int(v)))),
    "method.placement": unlike("in_gradient", "after_step"),
    "exchange.preset": unlike("plain", "private"),
    "exchange.rule": unlike(*get_args(Rule)),
    "exchange.byzantine": below(1),
    "exchange.min_count": below(1),
    "exchange.min_clients": below(1),
    "exchange.clip": outside(5e-324),
    "exchange.delta": outside(5e-324, math.nextafter(1, 0)),
    "exchange.randomness": unlike("secret", "seed"),
    "exchange.class_noise": outside(0),
    "method.max_age": below(0),
    "method.two_stream": _NOT_BOOLEANS,
}
WRONG_SECTION = _NOT_TEXT | st.text() | st.lists(st.integers(), max_size=2)
UNKNOWN_KEY = st.text(max_size=400).filter(lambda key: key not in {*Experiment.model_fields, *EVERY_FIELD["method"]})


@st.composite
def wrong_experiments(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """The name of one key, and an experiment in which it is wrong."""
    kind = draw(st.sampled_from(["value"] * 8 + ["key", "section"]))
    if kind == "value":
        key = draw(st.sampled_from(sorted(WRONG)))
        value = draw(WRONG[key])
    elif kind == "section":
        key, value = draw(st.sampled_from(["data", "net", "exchange", "method"])), draw(WRONG_SECTION)
    else:
        section = draw(st.sampled_from(["", "data.", "net.", "exchange.", "method."]))
        name = draw(UNKNOWN_KEY)
        models = {"data.": DataOptions, "net.": NetOptions, "exchange.": Exchange}
        fields = models[section].model_fields if section in models else {}
        return f"{section}{name}", nested(section.removesuffix("."), {f"{name}_" if name in fields else name: 1})
    *sections, name = key.split(".")
    return key, nested(".".join(sections), {name: value})


def nested(section: str, values: dict[str, Any]) -> dict[str, Any]:
    return {section: values} if section else values


@settings(max_examples=150)
@given(wrong_experiments())
def test_whatever_is_wrong_is_named_in_one_line(wrong: tuple[str, dict[str, Any]]) -> None:
    """A ConfigError of one line and at most 300 characters that names the key, and nothing else ever."""
    key, values = wrong
    message = refusal(values)
    first = " ".join(key.split())[:100].rstrip()
    named = {"net.name": "net", "method.name": "method", "method.preset": "preset", "method.threshold": "threshold"}
    assert first in message or named.get(key, first) in message


@pytest.mark.parametrize("source", [["a"], {"a": 1}])
def test_a_list_is_no_data_source(source: Any) -> None:
    assert "data.source" in refusal({"data": {"source": source}})


# Files and overrides


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"seed = ", "is not valid TOML"),
        (b"seed = 1\nseed = 2\n", "is not valid TOML"),
        (b"\xff\xfe", "is not valid TOML"),
        (b"x = " + b"[" * 100_000, "is not valid TOML"),
        (b"seed = " + b"1" * 5000, "is not valid TOML"),
        (b"<!doctype html>", "is not valid TOML"),
    ],
)
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "e.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        Experiment.read(path)
    assert len(str(caught.value)) <= LONGEST
    assert str(path)[:30] in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            Experiment.read(path)


def test_an_empty_file_is_the_default_and_a_byte_order_mark_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_bytes(b"")
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbfseed = 4\n[method]\nthreshold = inf\n")
    assert Experiment.read(tmp_path / "empty.toml") == Experiment()
    marked = Experiment.read(tmp_path / "marked.toml")
    assert (marked.seed, marked.method.resolved()["threshold"]) == (4, math.inf)


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("a.b=3", 3),
        ("a.b = 3", 3),
        ("a.b=2.5", 2.5),
        ("a.b=1e-3", 0.001),
        ("a.b=inf", math.inf),
        ("a.b=true", True),
        ("a.b=[0, 7]", [0, 7]),
        ('a.b="3"', "3"),
        ("a.b=plain words", "plain words"),
        ("a.b=/some/path.npz", "/some/path.npz"),
        ("a.b=x=y", "x=y"),
        ("a.b=", ""),
        ("a.b=" + "1" * 5000, "1" * 5000),
    ],
)
def test_an_override_is_read_as_toml_or_else_as_text(assignment: str, value: Any) -> None:
    values: dict[str, Any] = {"a": {"b": "before", "c": "kept"}}
    override(values, assignment)
    assert values == {"a": {"b": value, "c": "kept"}}
    assert type(values["a"]["b"]) is type(value)


def test_infinity_reaches_the_method() -> None:
    values: dict[str, Any] = {}
    override(values, "method.threshold=inf")
    assert Experiment.parse(values).method.create() == RedGrape(threshold=math.inf)


def test_overrides_come_after_the_preset() -> None:
    values: dict[str, Any] = {}
    for assignment in ("method.clip_norm=7.5", "method.preset=released"):
        override(values, assignment)
    assert dict(Experiment.parse(values).method.create())["clip_norm"] == 7.5
    assert dict(Experiment.parse(values).method.create())["placement"] == "after_step"


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("nonsense", "is not of the form key=value"),
        ("=3", "is not of the form key=value"),
        ("x" * 5000, "is not of the form key=value"),
        ("seed.x=3", "'seed' is a value, not a section"),
        ("rounds=1\nseed=2", "'rounds=1 seed=2' has a line break"),
        ("rounds=1\r\n[data]", "has a line break"),
        ("a." * 20_000 + "a=1", "has 20001 parts"),
    ],
)
def test_an_override_that_cannot_be_is_refused(assignment: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override({"seed": 1}, assignment)
    assert words in str(caught.value)
    assert len(str(caught.value)) <= LONGEST


# Methods in files, nets, weights


def test_a_method_in_a_file(remembering: Path) -> None:
    """The path of a Python file is a method's name, and the experiment comes back from TOML with it."""
    experiment = Experiment.parse({"method": {"name": str(remembering), "lr": 0.5}})
    method = experiment.method.create()
    assert type(method).__name__ == "Remembering"
    assert dict(method)["lr"] == 0.5
    assert through_toml(experiment).hash() == experiment.hash()
    assert type(through_toml(experiment).method.create()) is type(method)
    assert "unknown key 'method.lam'" in refusal({"method": {"name": str(remembering), "lam": 0.5}})


NO_PRESETS = """
from redgrape.methods.fedavg import FedAvg
class Plain(FedAvg):
    presets = {}
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def broken(:\n", "cannot be imported: SyntaxError"),
        ("raise RuntimeError('several\\nlines ' * 100)\n", "cannot be imported: RuntimeError: several lines"),
        ("import no_such_package_anywhere\n", "cannot be imported: ModuleNotFoundError"),
        ("", "must define exactly one method class, and has none"),
        ("from redgrape.methods.fedavg import FedAvg\n", "must define exactly one method class, and has none"),
        (f"{NO_PRESETS}class Other(FedAvg):\n    pass\n", "has Plain, Other"),
    ],
)
def test_a_method_file_that_is_none_is_refused(tmp_path: Path, code: str, words: str) -> None:
    path = tmp_path / "m.py"
    path.write_text(code)
    assert words in refusal({"method": {"name": str(path)}})


def test_a_method_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    message = refusal({"method": {"name": str(tmp_path / "nowhere.py")}})
    assert "no method file at" in message
    assert "nowhere.py" in message


def test_a_preset_of_a_method_that_has_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(NO_PRESETS)
    name = str(tmp_path / "plain.py")
    assert Experiment.parse({"method": {"name": name}}).hash()
    assert "has no presets" in refusal({"method": {"name": name, "preset": "released"}})


def test_initial_weights(tmp_path: Path) -> None:
    """Tensors are taken by name; a file of other names or shapes is refused rather than half loaded."""
    make: Callable[..., Any] = lambda weights: build_net("mlp", (5,), 3, 0, weights)  # noqa: E731
    start = {name: torch.full_like(t, 0.5) for name, t in nets.build("mlp", (5,), 3, 0).state_dict().items()}
    encoder = {name: t for name, t in start.items() if name.startswith("encoder.")}
    for name, tensors in {
        "all": start,
        "encoder": encoder,
        "other": {"layer.weight": torch.zeros(2)},
        "head": {name: t for name, t in start.items() if name not in encoder},
        "shape": {name: t[:1] for name, t in start.items()},
    }.items():
        safetensors.torch.save_file({k: t.contiguous() for k, t in tensors.items()}, tmp_path / name)
    (tmp_path / "cut").write_bytes((tmp_path / "all").read_bytes()[:-1])
    assert all((t == 0.5).all() for t in make(str(tmp_path / "all")).state_dict().values())
    net = make(str(tmp_path / "encoder"))
    assert (net.encoder[1].weight == 0.5).all()
    assert torch.equal(net.classifier.weight, make(None).classifier.weight)
    for name, words in {
        "other": "has no weights for this encoder",
        "head": "has no weights for this encoder",
        "shape": "but the net needs",
        "cut": "cannot read initial weights",
        "missing": "cannot read initial weights",
    }.items():
        with pytest.raises(DataError, match=words):
            make(str(tmp_path / name))


def test_the_shipped_experiments_are_valid() -> None:
    found = list((Path(__file__).parents[2] / "experiments").glob("*.toml"))  # not the suites
    assert found
    for path, name in itertools.product(found, methods.names()):
        values = read_toml(path)
        if values.get("method", {}).get("name", name) == name:
            auxiliary = {"auxiliary": 32} if methods.load(name).uses_auxiliary else {}
            data, method = values.get("data", {}), values.get("method", {})
            Experiment.parse({**values, "data": {**data, **auxiliary}, "method": {**method, "name": name}})


def test_none_is_a_word_in_toml() -> None:
    """What a preset sets can be switched off, and stays off through the file."""
    off = Experiment.parse({"method": {"preset": "released", "clip_norm": "none"}})
    assert off.method.create().clip_norm is None
    assert 'clip_norm = "none"' in off.to_toml()
    again = Experiment.parse(tomllib.loads(off.to_toml()))
    assert again.method.create().clip_norm is None
    assert again.hash() == off.hash() != Experiment.parse({"method": {"preset": "released"}}).hash()
