"""Exported models. A model is loaded in one call, predicts from raw inputs, and does not need its run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy as np
import safetensors
import torch
from pydantic import BaseModel, Field, ValidationError, model_validator
from torch import Tensor

from redgrape import nets, own_code, tree
from redgrape.data.columns import Columns
from redgrape.data.examples import WHITE, Examples, Pixels
from redgrape.data.table import listed, of_frame
from redgrape.determinism import same_bits_everywhere
from redgrape.errors import ConfigError, DataError, needed
from redgrape.learning.calibration import Calibration
from redgrape.learning.sums import BATCH
from redgrape.nets import pretrained
from redgrape.nets.net import Net
from redgrape.runs import checksums, durable
from redgrape.validation import one_line

Format: TypeAlias = Literal["safetensors", "onnx"]
Inputs: TypeAlias = Any  # a NumPy array, a tensor, or a DataFrame for a model of tables
Forward: TypeAlias = Callable[[Tensor], Tensor]  # raw inputs of one batch -> logits

FORMAT = 1
WEIGHTS: dict[str, str] = {"safetensors": "model.safetensors", "onnx": "model.onnx"}


class _Weights(BaseModel):
    format: Format
    sha256: str


class _Normalisation(BaseModel):
    mean: tuple[float, ...]
    std: tuple[float, ...]


class _Input(BaseModel):
    shape: tuple[Annotated[int, Field(gt=0)], ...]
    dtype: Literal["uint8", "uint16", "float"]
    pixels: _Normalisation | None
    letterbox: bool = False
    table: Columns | None = None

    @model_validator(mode="after")
    def _columns_fit_the_shape(self) -> Self:
        if self.table is not None and self.shape != (self.table.width,):
            raise ValueError(f"its columns give {self.table.width} numbers, and its shape is {list(self.shape)}")
        return self


class _Experiment(BaseModel):
    rounds: int


class _Run(BaseModel):
    round: int
    experiment: _Experiment
    mean_of_last: dict[str, Any] | None = None  # of a finished run


class Description(BaseModel):
    """The content of model.json that is needed to rebuild the net, and to say which model it is."""

    format: int
    weights: _Weights
    net: str
    code: str | None = None  # SHA-256 of the file of a user's own net
    head: str = "linear"  # these two are of pretrained encoders
    size: int | None = None
    dtype: Literal["float16", "bfloat16", "float32", "float64"]
    input: _Input
    class_names: list[str] = Field(min_length=2)
    calibration: Calibration | None = None
    run: _Run | None = None

    @model_validator(mode="after")
    def _every_class_has_a_threshold(self) -> Self:
        if self.calibration is not None and len(self.calibration.thresholds) != len(self.class_names):
            raise ValueError(f"{len(self.calibration.thresholds)} thresholds for {len(self.class_names)} classes")
        return self

    def build(self, name: str | None = None) -> Net:
        """The net, with random weights. `name`: where a user's own net is, since the description has no paths."""
        classes = len(self.class_names)
        return nets.build(name or self.net, self.input.shape, classes, seed=0, head=self.head, size=self.size)


class Model:
    """The inference model: encoder P and classifier W, with the preparation of inputs.

    model = load_model("my_model")
    model.predict(x)      # class names
    model(x)              # probabilities, one row per example

    A calibrated model scales its probabilities by a temperature, and decides by thresholds (learning/calibration.py).
    A model trained on a table takes a DataFrame with its columns, or what `columns.inputs` makes of a table.
    `card` is the content of model.json: how the model was trained, on what data, and how well it performs.
    """

    def __init__(self, card: Mapping[str, Any], forward: Forward) -> None:
        self.card = dict(card)
        self.class_names: list[str] = list(card["class_names"])
        self.shape: tuple[int, ...] = tuple(card["input"]["shape"])
        self.takes_pixels: bool = card["input"]["dtype"] != "float"
        self.letterbox: bool = card["input"].get("letterbox", False)
        self.dtype: str = card["input"]["dtype"]
        table = card["input"].get("table")
        self.columns = None if table is None else Columns.model_validate(table)
        chosen = card.get("calibration")
        self.calibration = None if chosen is None else Calibration.model_validate(chosen)
        self._forward = forward

    @property
    def takes(self) -> str:
        """The accepted inputs, in words."""
        if self.columns is not None:
            names = listed(column.name for column in self.columns.columns)
            return f"tables with the columns {names}, or floats of shape [n, {self.columns.width}]"
        shapes = [self.shape]
        if self.takes_pixels and len(self.shape) == 3:
            c, h, w = self.shape
            shapes += [(h, w), (h, w, c)] if c == 1 else [(h, w, c)]
        kind = f"{self.dtype} pixels" if self.takes_pixels else "floats"
        return f"{kind} of shape " + " or ".join(f"[{', '.join(['n', *map(str, shape)])}]" for shape in shapes)

    def __call__(self, x: Inputs, batch: int = BATCH) -> Tensor:
        """Probabilities [n, C] of raw inputs, in the form of the data source."""
        return self.scaled_logits(x, batch).softmax(dim=1)

    def predict(self, x: Inputs, batch: int = BATCH) -> list[str]:
        return [self.class_names[c] for c in self.judged(self.scaled_logits(x, batch)).argmax(dim=1).tolist()]

    def scaled_logits(self, x: Inputs, batch: int = BATCH) -> Tensor:
        """The logits of the probabilities."""
        z = self.logits(x, batch)
        return z if self.calibration is None else self.calibration.scaled(z)

    def judged(self, scaled: Tensor) -> Tensor:
        """What decides: the class with the highest value."""
        return scaled if self.calibration is None else scaled + self.calibration.offsets

    def logits(self, x: Inputs, batch: int = BATCH) -> Tensor:
        """Logits [n, C]. In batches of 256, they equal those of the run's own evaluation bit for bit."""
        if batch < 1:
            raise ConfigError(f"batch is {batch}; it must be at least 1")
        if self.columns is not None and not isinstance(x, np.ndarray | Tensor):
            x = self.columns.inputs(of_frame(x))
        if np.ndim(x) == 0:
            raise DataError(f"the input is a single number; the model takes {self.takes}")
        unlabelled = torch.zeros(len(x), dtype=torch.int64)
        examples = self.arranged(Examples(x, unlabelled))
        examples.check(len(self.class_names), "inputs")
        parts = [self.batch_logits(examples, start, batch) for start in range(0, len(examples), batch)]
        return torch.cat(parts) if parts else torch.zeros(0, len(self.class_names))

    @torch.inference_mode()
    def batch_logits(self, examples: Examples, start: int, batch: int = BATCH) -> Tensor:
        """Logits of the batch that begins at row `start`. The examples must be `arranged`."""
        rows = torch.arange(start, min(start + batch, len(examples)))
        x = examples.x[rows if examples.rows is None else examples.rows[rows]]
        with same_bits_everywhere():
            return self._forward(x.clone(memory_format=torch.contiguous_format))

    def arranged(self, examples: Examples) -> Examples:
        """The examples with channels first. Raise DataError if the model does not accept them."""
        x = examples.x
        given = tuple(x.shape[1:])
        if (_name_of(x.dtype) if x.dtype in WHITE else "float") == self.dtype:
            if given == self.shape:
                return examples
            if self.takes_pixels and len(self.shape) == 3:
                c, h, w = self.shape
                if c == 1 and given == (h, w):
                    return replace(examples, x=x[:, None])
                if given == (h, w, c):
                    return replace(examples, x=x.movedim(3, 1))
        raise DataError(f"inputs are {_name_of(x.dtype)} of shape {list(x.shape)}; the model takes {self.takes}")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_model(folder: Path | str, code: Path | str | None = None) -> Model:
    """Load the model that `redgrape export` wrote to this folder, and verify its checksum. `code`: the Python file of
    your own net. It is run if it is the one that the model was trained with."""
    folder = Path(folder)
    card, description = _read_card(folder)
    path = folder / WEIGHTS[description.weights.format]
    with durable.storage_errors("read", path):
        data = durable.ordinary(path).read_bytes()
    if hashlib.sha256(data).hexdigest() != description.weights.sha256:
        raise DataError(f"'{path}' is damaged: its SHA-256 does not match model.json; export the model again")
    if description.weights.format == "onnx":
        return Model(card, _onnx_forward(data, description, path))
    return Model(card, torch_forward(data, description, path, _own_net(description, code)))


def _own_net(description: Description, code: Path | str | None) -> str | None:
    """The name of a user's own net, in the file `code`. None for other nets."""
    if description.code is None:
        if own_code.is_own(description.net) and not pretrained.is_pretrained(description.net):
            raise DataError(f"the model does not say which code its net '{description.net}' is; export it again")
        return None
    file, _, function = description.net.rpartition(":")
    if code is None:
        raise ConfigError(
            f"the model's net is the function '{function}' of '{file}'; pass that file with --code (in Python: code=), "
            "or export the model as ONNX"
        )
    if own_code.digests([Path(code)])[Path(code).name] != description.code:
        raise ConfigError(f"'{code}' is not the file that the model was trained with (SHA-256 {description.code[:12]})")
    return f"{code}:{function}"


def _read_card(folder: Path) -> tuple[dict[str, Any], Description]:
    path = folder / "model.json"
    if not path.is_file():
        raise DataError(f"'{folder}' is not a model folder: it has no model.json; create one with `redgrape export`")
    with durable.storage_errors("read", path):
        data = path.read_bytes()
    if not checksums.fits(folder, path.name, data):
        raise DataError(f"'{path}' is damaged: its SHA-256 does not match {checksums.NAME}; export the model again")
    try:
        card = json.loads(data)
        description = Description.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise DataError(f"'{path}' is damaged: {one_line(error, Description)}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{path}' is damaged: {error}") from error
    if description.format > FORMAT:
        raise DataError(f"'{path}' has format {description.format}, newer than this redgrape reads ({FORMAT})")
    return card, description


def torch_forward(data: bytes, description: Description, path: Path, name: str | None) -> Forward:
    dtype: torch.dtype = getattr(torch, description.dtype)
    try:
        tensors = tree.from_bytes(data)
        _check_size(description, data, name)
        net = description.build(name).to(dtype)
        net.load_state_dict(tensors)
    except (RuntimeError, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise DataError(f"'{path}' does not hold the weights of the net in model.json") from error
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs
    return forward_of(net.eval(), pixels_of(description))


def _check_size(description: Description, data: bytes, name: str | None) -> None:
    """Raise ValueError if the net has more weights than the file, before allocating memory for them."""
    with torch.device("meta"):
        net = description.build(name)
    if sum(t.numel() for t in net.state_dict().values()) > len(data):
        raise ValueError("the net is larger than its weights")


def pixels_of(description: Description) -> Pixels:
    normalisation = description.input.pixels
    return Pixels() if normalisation is None else Pixels(normalisation.mean, normalisation.std)


def forward_of(net: Net, pixels: Pixels) -> Forward:
    """A function from raw inputs to logits, equal to `evaluate.logits`."""
    dtype = net.classifier.weight.dtype

    def forward(x: Tensor) -> Tensor:
        x = pixels(x, dtype) if x.dtype in WHITE else x.to(dtype)
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        z: Tensor = net(x)
        return z

    return forward


def _onnx_forward(data: bytes, description: Description, path: Path) -> Forward:
    onnxruntime = needed("onnxruntime", "running an ONNX model needs onnxruntime", "onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has its own exception types
        raise DataError(f"'{path}' cannot be read as an ONNX model: {str(error).splitlines()[0]}") from error
    name = session.get_inputs()[0].name
    dtype = getattr(torch, description.dtype)

    def forward(x: Tensor) -> Tensor:
        raw = x if x.dtype in WHITE else x.to(dtype)
        return torch.from_numpy(session.run(["logits"], {name: raw.numpy()})[0])

    return forward
