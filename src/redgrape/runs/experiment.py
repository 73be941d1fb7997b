"""Experiments: typed and validated descriptions of runs. They round-trip through TOML."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import safetensors
import safetensors.torch
import tomli_w
from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from redgrape import methods, nets, own_code
from redgrape.data.count_matrix import brings_clients
from redgrape.data.federation import FederatedData
from redgrape.data.partition import is_own
from redgrape.data.prepare import CUT, DataOptions
from redgrape.data.sources import AS_THEY_ARE, READERS
from redgrape.data.table import is_table
from redgrape.errors import ConfigError, DataError, unknown
from redgrape.exchange import Exchange
from redgrape.learning.local_training import YOUNGER
from redgrape.method import Method
from redgrape.nets import pretrained
from redgrape.nets.net import Net
from redgrape.runs import durable, moved_keys
from redgrape.runs.checksums import hash_of
from redgrape.runs.values import for_toml, read_toml, with_none
from redgrape.tree import Tensors
from redgrape.validation import Strict, one_line, short

CLASSES = {name: {"cifar100": 100, "fars": 8}.get(name, 10) for name in READERS}  # of the built-in data sets
_OF_ENCODERS = {"frozen", "head", "size"}  # keys of [net]


class NetOptions(Strict):
    name: str = Field(
        "cnn",
        description="the net, a function (file.py:function), or a pretrained encoder: efficientnet_lite0, timm:NAME, "
        "torchvision:NAME or hf:NAME",
    )
    weights: str | None = Field(
        None, description="safetensors file with initial weights, such as those of a pretrained encoder"
    )
    frozen: bool = Field(True, description="keep a pretrained encoder as it is, and train only the head")
    head: Literal["linear", "mlp"] = Field("linear", description="the net on the features of a pretrained encoder")
    size: int | None = Field(
        None,
        ge=pretrained.STEP,
        le=1024,
        multiple_of=pretrained.STEP,
        description="side of a pretrained encoder's images, in pixels; their own, from 64 to 224, if not set",
    )

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> NetOptions:
        """From the section [net] of an experiment."""
        try:
            return cls.model_validate(with_none(values, cls))
        except ValidationError as error:
            raise one_line(error, cls, "net") from error

    @property
    def is_pretrained(self) -> bool:
        return pretrained.is_pretrained(self.name)

    @property
    def is_frozen(self) -> bool:
        """Whether the clients train a head on embeddings."""
        return self.is_pretrained and self.frozen

    @model_validator(mode="after")
    def _known(self) -> Self:
        try:
            nets.find(self.name)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if not self.is_pretrained and (given := _OF_ENCODERS & self.model_fields_set):
            raise ValueError(f"{min(given)} is for pretrained encoders, and '{self.name}' is not one; leave it out")
        return self

    @model_serializer(mode="wrap")
    def _without_unused(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The keys of encoders are there only for encoders, so that other experiments keep their hashes."""
        return {key: value for key, value in dump(self).items() if self.is_pretrained or key not in _OF_ENCODERS}

    def inputs(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what clients train on, if examples have this shape."""
        return (pretrained.features(self.name, shape, self.size),) if self.is_frozen else shape

    @property
    def trained(self) -> dict[str, Any]:
        """The net that clients train, as arguments of `nets.build`."""
        if self.is_frozen:
            return {"name": self.head}
        return {"name": self.name} | ({"head": self.head, "size": self.size} if self.is_pretrained else {})


class MethodOptions(Strict):
    """The name and preset of the method. Every other key is a hyper-parameter of the method."""

    model_config = ConfigDict(extra="allow")

    name: str = Field("redgrape", description="the method, or the path of a Python file that defines one")
    preset: str = Field("paper", description="the starting values of the hyper-parameters")

    def create(self) -> Method:
        method = methods.load(self.name)
        hyper = with_none(self.model_extra or {}, method)
        if reserved := {"self", "cls"} & hyper.keys():
            raise unknown("key", f"method.{min(reserved)}", [f"method.{name}" for name in method.model_fields])
        if method.presets:
            return method.preset(self.preset, **hyper)
        if self.preset != "paper":
            raise ConfigError(f"method.preset is '{self.preset}', but the method '{self.name}' has no presets")
        return method(**hyper)

    def resolved(self) -> dict[str, Any]:
        """The name, the preset and every hyper-parameter. Younger ones are there only if they are set, so that other
        experiments keep their hashes."""
        method = self.create()
        unset = [name for name in YOUNGER if getattr(method, name) == type(method).model_fields[name].default]
        hyper = {name: value for name, value in method if name not in unset}
        return {"name": self.name, "preset": self.preset, **hyper}


class Experiment(Strict):
    """Everything that determines the result of a run. How it is executed (workers, data folder) is not part of it."""

    seed: int = Field(0, ge=0, le=2**63 - 1, description="determines split, initial weights, sampling and shuffling")
    rounds: int = Field(20, ge=1, le=10**9, description="communication rounds")
    clients_per_round: int | None = Field(None, ge=1, le=10**9, description="clients sampled per round; all if not set")
    min_answers: int = Field(1, ge=1, le=10**9, description="stop if fewer client answers count in a round")
    evaluate_every: int = Field(
        1, ge=1, le=10**9, description="evaluate every this many rounds, and in each of the last ten"
    )
    checkpoint_every: int = Field(1, ge=1, le=10**9, description="save every this many rounds, and after the last")
    keep: Literal["last", "best"] = Field(
        "last", description="the model to keep: of the last round, or of the best by class-balanced validation accuracy"
    )
    patience: int | None = Field(
        None, ge=1, le=10**9, description="stop after this many rounds without a better validation result"
    )
    start: str | None = Field(None, description="a finished run on the same split, whose model is the initial one")
    data: DataOptions = Field(default_factory=DataOptions)
    net: NetOptions = Field(default_factory=NetOptions)
    exchange: Exchange = Field(default_factory=Exchange)
    method: MethodOptions = Field(default_factory=MethodOptions)

    @model_validator(mode="before")
    @classmethod
    def _a_table_is_no_image(cls, values: Any) -> Any:
        """Without a net named, a table gets one for vectors."""
        data, net = (values.get(name, {}) for name in ("data", "net")) if isinstance(values, Mapping) else ({}, None)
        if not isinstance(data, Mapping) or not isinstance(net, Mapping):
            return values
        source = str(data.get("source", ""))
        return {**values, "net": {"name": "mlp", **net}} if is_table(source) or source in AS_THEY_ARE else values

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Check everything that does not need the data, before any data is read."""
        clients = self.data.clients if self.data.is_federated else 1
        natural = self.data.partition == "natural"
        known = not brings_clients(self.data.partition)
        if self.clients_per_round is not None and known and self.clients_per_round > clients:
            raise ValueError(f"clients_per_round is {self.clients_per_round}, but data.clients is only {clients}")
        asked = self._clients_asked()
        if asked is not None and self.min_answers > asked:
            raise ValueError(f"min_answers is {self.min_answers}, but a round has only {asked} clients")
        if self.data.source in READERS:
            if natural and self.data.source not in AS_THEY_ARE:
                raise ValueError(f"data.partition is 'natural', but '{self.data.source}' names no clients; choose iid")
            if self.data.image_size is not None:
                raise ValueError(f"data.image_size is for image folders, but '{self.data.source}' is not one")
        if self.is_validated and not self.data.validation:
            key = "keep is 'best'" if self.keep == "best" else f"patience is {self.patience}"
            raise ValueError(f"{key}, but there are no validation examples; hold some out with data.validation=20")
        if self.data.imbalance == "binary" or self.data.tail_classes != CUT:
            self._check_tail_classes()
        if self.net.is_frozen and (self.data.crop or self.data.flip or self.data.cutout):
            raise ValueError(
                "data.crop, flip and cutout have no effect on the embeddings of a frozen encoder, which are computed "
                "once; leave them out, or set net.frozen=false"
            )
        if self.exchange.is_noisy and (self.start is not None or self.data.normalise):
            what = "start names a run that used" if self.start is not None else "data.normalise uses"
            raise ValueError(
                f"exchange has noise, but {what} the clients' data without it, which epsilon does not cover; leave one "
                "of the two out"
            )
        if self.net.is_pretrained and self.data.normalise:
            raise ValueError("data.normalise has no effect: a pretrained encoder has its own scaling; leave it out")
        shortest = nets.SHORTEST_SIDE.get(self.net.name, 1)
        if self.data.image_size is not None and self.data.image_size < shortest:
            raise ValueError(
                f"data.image_size is {self.data.image_size}; net '{self.net.name}' needs at least {shortest} pixels"
            )
        return self

    @property
    def is_validated(self) -> bool:
        """Whether the validation examples decide which model is kept, or when to stop."""
        return self.keep == "best" or self.patience is not None

    def _check_tail_classes(self) -> None:
        tail = self.data.tail_classes
        classes = CLASSES.get(self.data.source, math.inf)  # not known yet for the user's own data
        is_class = all(0 <= c < classes if isinstance(c, int) else c for c in tail)  # names are compared with the data
        if not tail or len(set(tail)) < len(tail) or not is_class or len(tail) >= classes:
            allowed = f"from 0 .. {classes - 1:g}" if math.isfinite(classes) else "from 0 on"
            raise ValueError(f"data.tail_classes is {list(tail)}; name some classes {allowed}, each once, not all")

    def _check_method(self, method: Method) -> None:
        if method.epochs == 0 and self.start is None:
            raise ConfigError(
                "method.epochs is 0, which trains nothing; choose at least 1, or adjust a finished run with `redgrape "
                "adjust`"
            )
        if method.uses_auxiliary and self.data.auxiliary == 0:
            raise ConfigError(
                f"method '{self.method.name}' needs a small balanced set at the server, but data.auxiliary is 0; hold "
                "one out with data.auxiliary=32 (per class)"
            )
        is_resnet = self.net.name.startswith("resnet") and not own_code.is_own(self.net.name)
        has_batchnorm = is_resnet or (self.net.name == pretrained.LITE0 and not self.net.is_frozen)
        if method.batch_size == 1 and has_batchnorm and not method.freeze_encoder:
            raise ConfigError(
                f"method.batch_size is 1, but BatchNorm in net '{self.net.name}' has no statistics for a single "
                "example; choose at least 2"
            )
        if (asked := self._clients_asked()) is not None:
            self.exchange.check_clients(asked)

    def _clients_asked(self) -> int | None:
        """The number of clients per round. None if it depends on the data."""
        if not self.data.is_federated:
            return 1
        return self.clients_per_round or (None if brings_clients(self.data.partition) else self.data.clients)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Experiment:
        """Build an experiment from nested values, as read from TOML. Raise a one-line ConfigError if any is invalid."""
        moved_keys.check(values)
        cls._check_sections(values)
        try:
            experiment = cls.model_validate(with_none(values, cls))
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
            raise ConfigError(
                f"{error.object[error.start - 20 : error.end]!a} in the experiment is not valid text"
            ) from error
        return experiment

    @classmethod
    def _check_sections(cls, values: Mapping[str, Any]) -> None:
        """Raise ConfigError for a key that stands in no section, but belongs to one."""
        for key in (key for key in values if key not in cls.model_fields):
            method = values.get("method")
            name = method.get("name", "redgrape") if isinstance(method, Mapping) else "redgrape"
            keys = {
                "data": DataOptions.model_fields,
                "net": NetOptions.model_fields,
                "exchange": Exchange.model_fields,
                "method": {**MethodOptions.model_fields, **methods.load(str(name)).model_fields},
            }
            if homes := [f"'{section}.{key}'" for section in keys if key in keys[section]]:
                raise ConfigError(f"unknown key '{key}'; did you mean {' or '.join(homes)}?")

    @classmethod
    def read(cls, path: Path) -> Experiment:
        return cls.parse(read_toml(path))

    def resolved(self) -> dict[str, Any]:
        """All settings as nested values. None becomes the word none, because TOML has no None. Younger keys are there
        only if they are set, so that other experiments keep their hashes."""
        unset = {
            name
            for name, default in (("keep", "last"), ("patience", None), ("start", None))
            if getattr(self, name) == default
        }
        values = self.model_dump(exclude={"method", *unset}) | {"method": self.method.resolved()}
        return {name: for_toml(value) for name, value in values.items()}

    def to_toml(self) -> str:
        return tomli_w.dumps(self.resolved())

    def hash(self) -> str:
        """The hash of this experiment. Equal descriptions give equal hashes."""
        return hash_of(self.resolved())

    def with_rounds(self, rounds: int) -> Experiment:
        return Experiment.parse({**self.resolved(), "rounds": rounds})

    def code(self) -> list[Path]:
        """The files of the user's own code: method, net, data and partition."""
        method = [Path(self.method.name)] if self.method.name.endswith(".py") else []
        return method + [own_code.file_of(name) for name in self._own_names()]

    def _own_names(self) -> list[str]:
        net = [] if self.net.is_pretrained else [self.net.name]
        source = [] if Path(self.data.source).exists() else [self.data.source]
        partition = [self.data.partition] if is_own(self.data.partition) else []
        return [name for name in (*net, *source, *partition) if own_code.is_own(name)]

    def builder(self, federation: FederatedData) -> Callable[[], Net]:
        """A callable that returns a new net and can be passed to another process. If the encoder is frozen, the
        federation holds embeddings, and the net is the head."""
        return nets.builder(**self.net.trained, federation=federation, seed=self.seed)

    def first_model(self, federation: FederatedData) -> Tensors:
        """The initial weights."""
        if not self.net.is_pretrained:
            shape, classes = federation.input_shape, federation.num_classes
            return build_net(self.net.name, shape, classes, self.seed, self.net.weights).state_dict()
        net = self.builder(federation)()
        if not self.net.is_frozen:
            pretrained.load(net, self.net.name, self.net.weights)
        return net.state_dict()


def build_net(name: str, shape: tuple[int, ...], num_classes: int, seed: int, weights: str | None = None) -> Net:
    """Build a new net. If `weights` names a safetensors file, its tensors replace those of the net."""
    net = nets.build(name, shape, num_classes, seed)
    if weights is not None:
        own = net.state_dict()
        net.load_state_dict(own | _weights_for(own, Path(weights)))
    return net


def _weights_for(own: Tensors, path: Path) -> Tensors:
    """The tensors in the file that the net has too. Raise DataError if none of them belongs to the encoder."""
    try:
        stored = safetensors.torch.load_file(durable.ordinary(path, DataError))
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"cannot read initial weights from '{path}': {error}") from error
    taken = {name: t for name, t in stored.items() if name in own}
    if not any(name.startswith("encoder.") for name in taken):
        wanted = next(iter(own))
        raise DataError(f"'{path}' has no weights for this encoder; its tensors need names like '{wanted}'")
    for name, t in taken.items():
        if t.shape != own[name].shape:
            raise DataError(
                f"'{path}': tensor '{name}' has shape {list(t.shape)}, but the net needs {list(own[name].shape)}"
            )
    return taken
