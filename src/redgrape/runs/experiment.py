"""An experiment: one typed, validated description of a run, which round-trips with TOML."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, get_args

import safetensors
import safetensors.torch
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from redgrape import methods, nets
from redgrape.data.federation import FederatedData
from redgrape.data.prepare import DataOptions
from redgrape.data.sources import READERS
from redgrape.errors import ConfigError, DataError, unknown
from redgrape.exchange import Exchange
from redgrape.method import Method
from redgrape.nets.net import Net
from redgrape.runs import durable, moved_keys
from redgrape.runs.checksums import hash_of
from redgrape.tree import Tensors
from redgrape.validation import one_line, short

CLASSES = {name: 100 if name == "cifar100" else 10 for name in READERS}  # of the data sets that are known by name
DEEPEST = 100  # parts of a key, as in method.lam, which has two
_STRICT = ConfigDict(frozen=True, strict=True, extra="forbid")


class NetOptions(BaseModel):
    model_config = _STRICT

    name: str = Field("cnn", description="which net")
    weights: str | None = Field(
        None, description="safetensors file with initial weights, for example of a pretrained encoder"
    )

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.name not in nets.NETS:
            raise ValueError(str(unknown("net", self.name, nets.NETS)))
        return self


class MethodOptions(BaseModel):
    """The method's name and preset; every other key is one of its hyper-parameters."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    name: str = Field("redgrape", description="which method, or the path of a Python file that defines one")
    preset: str = Field("paper", description="where the hyper-parameters start from")

    def create(self) -> Method:
        method = methods.load(self.name)
        hyper = _with_none(self.model_extra or {}, method)
        if reserved := {"self", "cls"} & hyper.keys():
            raise unknown("key", f"method.{min(reserved)}", [f"method.{name}" for name in method.model_fields])
        if method.presets:
            return method.preset(self.preset, **hyper)
        if self.preset != "paper":
            raise ConfigError(f"method.preset is '{self.preset}', and the method '{self.name}' has no presets")
        return method(**hyper)

    def resolved(self) -> dict[str, Any]:
        """Name and preset with every hyper-parameter written out."""
        return {"name": self.name, "preset": self.preset, **dict(self.create())}


class Experiment(BaseModel):
    """All that decides a run's result. Where it runs (workers, data folder) is not part of it."""

    model_config = _STRICT

    seed: int = Field(0, ge=0, le=2**63 - 1, description="decides split, initial weights, sampling and shuffling")
    rounds: int = Field(20, ge=1, le=10**9, description="rounds of communication")
    clients_per_round: int | None = Field(
        None, ge=1, le=10**9, description="clients sampled a round; left out: all of them"
    )
    min_answers: int = Field(1, ge=1, le=10**9, description="stop where fewer clients' answers count in a round")
    evaluate_every: int = Field(
        1, ge=1, le=10**9, description="evaluate every so many rounds, and in each of the last ten"
    )
    checkpoint_every: int = Field(1, ge=1, le=10**9, description="save every so many rounds, and after the last")
    data: DataOptions = Field(default_factory=DataOptions)
    net: NetOptions = Field(default_factory=NetOptions)
    exchange: Exchange = Field(default_factory=Exchange)
    method: MethodOptions = Field(default_factory=MethodOptions)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """What can be told without the data is told before any of it is read."""
        clients = self.data.clients
        natural = self.data.partition == "natural"
        if self.clients_per_round is not None and not natural and self.clients_per_round > clients:
            raise ValueError(
                f"clients_per_round is {self.clients_per_round}, and there are only {clients} data.clients"
            )
        asked = self._clients_asked()
        if asked is not None and self.min_answers > asked:
            raise ValueError(f"min_answers is {self.min_answers}, and a round has only {asked} clients")
        if self.data.source in READERS:
            if natural:
                raise ValueError(f"data.partition is 'natural', but '{self.data.source}' names no clients; choose iid")
            if self.data.image_size is not None:
                raise ValueError(f"data.image_size is for folders of images, and '{self.data.source}' is none")
        if self.data.imbalance == "binary":
            self._check_tail_classes()
        shortest = nets.SHORTEST_SIDE.get(self.net.name, 1)
        if self.data.image_size is not None and self.data.image_size < shortest:
            raise ValueError(
                f"data.image_size is {self.data.image_size}; net '{self.net.name}' needs at least {shortest} pixels"
            )
        return self

    def _check_tail_classes(self) -> None:
        tail = self.data.tail_classes
        classes = CLASSES.get(self.data.source, math.inf)  # of a user's own data it is not known yet
        if not tail or len(set(tail)) < len(tail) or min(tail) < 0 or max(tail) >= classes or len(tail) >= classes:
            allowed = f"from 0 .. {classes - 1:g}" if math.isfinite(classes) else "from 0 on"
            raise ValueError(f"data.tail_classes is {list(tail)}; name some classes {allowed}, each once, not all")

    def _check_method(self, method: Method) -> None:
        if method.uses_auxiliary and self.data.auxiliary == 0:
            raise ConfigError(
                f"method '{self.method.name}' needs a small balanced set at the server, and data.auxiliary is 0; hold "
                "one out with data.auxiliary=32 (a class)"
            )
        if method.batch_size == 1 and self.net.name.startswith("resnet") and not method.freeze_encoder:
            raise ConfigError(
                f"method.batch_size is 1, and the BatchNorm of net '{self.net.name}' has no statistics of a single "
                "example; choose at least 2"
            )
        if (asked := self._clients_asked()) is not None:
            self.exchange.check_clients(asked)

    def _clients_asked(self) -> int | None:
        """Clients of a round; None where only the data tells."""
        return self.clients_per_round or (None if self.data.partition == "natural" else self.data.clients)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Experiment:
        """From nested values, as TOML gives them; anything wrong is a ConfigError of one line."""
        moved_keys.check(values)
        try:
            experiment = cls.model_validate(_with_none(values, cls))
        except ValidationError as error:
            raise one_line(error, cls) from error
        except RecursionError as error:
            raise ConfigError("the experiment is nested too deeply") from error
        try:
            experiment._check_method(experiment.method.create())
            experiment.to_toml().encode()
        except ConfigError as error:
            raise ConfigError(short(str(error))) from error
        except UnicodeEncodeError as error:
            raise ConfigError(f"{error.object[error.start - 20 : error.end]!a} in the experiment is no text") from error
        return experiment

    @classmethod
    def read(cls, path: Path) -> Experiment:
        return cls.parse(read_toml(path))

    def resolved(self) -> dict[str, Any]:
        """As nested values with everything written out; None, which TOML lacks, is the word none."""
        values = self.model_dump(exclude={"method"}) | {"method": self.method.resolved()}
        return {name: _for_toml(value) for name, value in values.items()}

    def to_toml(self) -> str:
        return tomli_w.dumps(self.resolved())

    def hash(self) -> str:
        """The name of this experiment: equal for equal descriptions."""
        return hash_of(self.resolved())

    def with_rounds(self, rounds: int) -> Experiment:
        return Experiment.parse({**self.resolved(), "rounds": rounds})

    def builder(self, federation: FederatedData) -> Callable[[], Net]:
        """A callable that another process can be given, and that returns a fresh net."""
        return nets.builder(self.net.name, federation, self.seed)

    def first_model(self, federation: FederatedData) -> Tensors:
        """The weights that training starts from. The weights file is needed for that only, not to go on."""
        shape, classes = federation.input_shape, federation.num_classes
        return build_net(self.net.name, shape, classes, self.seed, self.net.weights).state_dict()


def build_net(name: str, shape: tuple[int, ...], num_classes: int, seed: int, weights: str | None = None) -> Net:
    """A new net, with the tensors of a safetensors file in place of its own where there is one."""
    net = nets.build(name, shape, num_classes, seed)
    if weights is not None:
        own = net.state_dict()
        net.load_state_dict(own | _weights_for(own, Path(weights)))
    return net


def _weights_for(own: Tensors, path: Path) -> Tensors:
    """The tensors of the file whose names the net has; a file that has none of the encoder's is refused."""
    try:
        stored = safetensors.torch.load_file(durable.ordinary(path, DataError))
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"cannot read initial weights from '{path}': {error}") from error
    taken = {name: t for name, t in stored.items() if name in own}
    if not any(name.startswith("encoder.") for name in taken):
        wanted = next(iter(own))
        raise DataError(f"'{path}' holds no weights for this encoder; its tensors should be named like '{wanted}'")
    for name, t in taken.items():
        if t.shape != own[name].shape:
            raise DataError(f"'{path}': tensor '{name}' is {list(t.shape)}, and the net's is {list(own[name].shape)}")
    return taken


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return _toml(durable.ordinary(path, ConfigError).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the experiment '{path}': {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # bad TOML, bad UTF-8, or a number of too many digits
        raise ConfigError(short(f"'{path}' is not valid TOML: {error}")) from error


def _toml(text: str) -> dict[str, Any]:
    if any(piece.count(".") > DEEPEST for piece in re.split("[=,\n]", text)):  # tomllib's time is quadratic in them
        raise ValueError(f"a key of more than {DEEPEST} parts")
    return tomllib.loads(text)


def override(values: dict[str, Any], assignment: str) -> None:
    """Apply `section.key=value`; the value is read as TOML, and as a string where it is none."""
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"'{short(assignment, 100)}' is not of the form key=value, for example data.ir=100")
    if len(assignment.splitlines()) > 1:
        raise ConfigError(f"'{short(assignment, 100)}' has a line break; set one key at a time, on one line")
    try:
        value = _toml(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    put(values, key.strip(), value)


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `section.key` in nested values."""
    *sections, name = key.split(".")
    if len(sections) > DEEPEST:
        raise ConfigError(f"'{short(key, 100)}' has {len(sections) + 1} parts; a key has at most {DEEPEST}")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(short(f"'{key}' cannot be set: '{section}' is a value, not a section"))
    values[name] = value


def _for_toml(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _for_toml(inner) for name, inner in value.items()}
    return "none" if value is None else list(value) if isinstance(value, tuple) else value


def _with_none(values: Any, model: type[BaseModel]) -> Any:
    """The word none as None, at the keys that can be None."""
    if not isinstance(values, Mapping):
        return values
    read = dict(values)
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and name in read:
            read[name] = _with_none(read[name], kind)
        elif read.get(name) == "none" and type(None) in get_args(kind):
            read[name] = None
    return read
