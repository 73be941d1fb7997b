"""Export a run folder to a model folder that can be shared:

    model.safetensors   or model.onnx: encoder P and classifier W, and nothing else of the run
    model.json          how to rebuild the net and prepare its inputs, the checksum, and the facts for the card
    README.md           the model card, for people
    SHA256SUMS          their checksums

None of them contains a path of this machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redgrape import nets, own_code, tree
from redgrape.data.count_matrix import LIKE
from redgrape.engines.devices import IN_BFLOAT16
from redgrape.errors import ConfigError, StorageError, needed, unknown
from redgrape.exported.card import write_card
from redgrape.exported.model import (
    FORMAT,
    WEIGHTS,
    Description,
    Format,
    Model,
    forward_of,
    load_model,
    pixels_of,
    torch_forward,
)
from redgrape.nets import pretrained
from redgrape.nets.net import Net
from redgrape.reading import judged
from redgrape.reading.learned import recorded_disclosures
from redgrape.reading.run_view import RunView
from redgrape.rounds import RunState
from redgrape.runs import checksums, durable
from redgrape.runs.experiment import NetOptions
from redgrape.runs.figures import unpacked_record
from redgrape.runs.finished import check_model, digest_of_state
from redgrape.runs.folder import RunFolder
from redgrape.tree import Tensors

# Keys of paths. In [method], a hyper-parameter of own code may be one.
_PATHS = (".start", ".data.source", ".data.partition", ".net.", ".method.")


def export(run: Path, out: Path, format: Format = "safetensors", calibration: Mapping[str, Any] | None = None) -> Path:
    """Write the model of the newest checkpoint to the folder `out`. The folder is created atomically. `calibration`: of
    this run's model, as `OwnModel.calibration` gives it."""
    if format not in WEIGHTS:
        raise unknown("format", format, WEIGHTS)
    durable.check_free(out)
    card, weights, disclosed, _ = _described(run, format, calibration)
    files = {
        WEIGHTS[format]: weights,
        "model.json": json.dumps(card, indent=2, allow_nan=False).encode() + b"\n",
        "README.md": write_card(card, disclosed).encode(),
    }
    durable.create_folder(out.resolve(), {**files, checksums.NAME: checksums.of(files)})
    return out


def open_model(path: Path, code: Path | None = None) -> Model:
    """The model in a folder that `export` wrote, or that of a run's newest checkpoint. `code`: see `load_model`."""
    if not (path / "experiment.toml").is_file():
        return load_model(path, code)
    card, weights, _, own_net = _described(path, "safetensors")
    return Model(card, torch_forward(weights, Description.model_validate(card), path, own_net))


def _described(
    run: Path, format: Format, calibration: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], bytes, str, str | None]:
    """The content of model.json, the weights, what the method discloses, and where the user's own net is."""
    folder = RunFolder.open(run)
    view = RunView.read(run)
    state = newest_state(folder, view)
    environment = view.environment or {}
    code = _unchanged_code(view, environment)
    try:
        net = NetOptions.parse(view.experiment["net"])
        shape, classes = tuple(environment["input"]["shape"]), len(environment["class_names"])
        with torch.device("meta"):
            expected = nets.build(**net.trained, shape=net.inputs(shape), num_classes=classes, seed=0).state_dict()
    except (KeyError, TypeError, RuntimeError) as error:
        raise StorageError(
            f"'{run / 'environment.json'}' is damaged: input and classes are missing or invalid"
        ) from error
    check_model(state, expected, folder)
    model: Tensors = state.server["model"]
    card: dict[str, Any] = {
        "format": FORMAT,
        "weights": {"format": format, "sha256": ""},
        "net": _without_folders(net.name),
        **({} if code is None else {"code": code}),
        **({"head": net.head, "size": pretrained.side(shape, net.size)} if net.is_pretrained else {}),
        "dtype": str(model["classifier.weight"].dtype).removeprefix("torch."),
        "input": environment["input"] | ({"letterbox": True} if view.experiment["data"].get("letterbox") else {}),
        "class_names": environment["class_names"],
        **({} if calibration is None else {"calibration": dict(calibration)}),
        "run": _facts(view, state, environment),
    }
    description = Description.model_validate(card)
    if net.is_frozen:
        model = _with_encoder(model, net, description, environment)
    weights = tree.to_bytes(model) if format == "safetensors" else _onnx(model, description, net.name)
    card["weights"]["sha256"] = hashlib.sha256(weights).hexdigest()
    return card, weights, recorded_disclosures(view)["beyond_averaging"], None if code is None else net.name


def _unchanged_code(view: RunView, environment: Mapping[str, Any]) -> str | None:
    """The SHA-256 of the user's own code of the net, None for other nets. It is compared before the code is run."""
    name = str(view.experiment["net"]["name"])
    if pretrained.is_pretrained(name) or not own_code.is_own(name):
        return None
    path = own_code.file_of(name)
    code = own_code.digests([path])[path.name]
    if environment.get("files", {}).get(path.name) != code:
        raise ConfigError(f"'{path}' has changed since the run began; restore the old file")
    return code


def _with_encoder(head: Tensors, net: NetOptions, description: Description, environment: Mapping[str, Any]) -> Tensors:
    """The frozen encoder and the trained head as one model, from images to logits."""
    if pretrained.digest(net.name, net.weights) != environment["files"].get(net.name):
        raise StorageError(f"the weights of net '{net.name}' have changed since the run began; restore the old ones")
    whole = description.build()
    pretrained.load(whole, net.name, net.weights)
    named = {key.replace("encoder.", "encoder.1.", 1): t for key, t in head.items()}
    return whole.state_dict() | named


def was_in_bfloat16(environment: Mapping[str, Any]) -> bool:
    """Whether the run's encoder multiplied in bfloat16. Here it never does: weights are kept in float32."""
    return str(environment.get("device")).endswith(IN_BFLOAT16)


def newest_state(folder: RunFolder, view: RunView) -> RunState:
    """The state of the newest intact checkpoint. For a finished run, only that of the last round is accepted, or that
    of the best if the experiment keeps it."""
    summary = view.summary or {}
    kept = summary.get("best_round")
    state, wrong = (folder.checkpoints.after(kept), list[str]()) if kept else folder.checkpoints.latest()
    last = kept or summary.get("stopped_after", view.experiment["rounds"])
    if (view.summary or view.rounds_done == last) and (state is None or state.round < last):
        reason = "; ".join(wrong) or f"it has no checkpoint of round {last}"
        raise StorageError(
            f"'{folder.path}' is finished, but its model is lost: {reason}; run `redgrape resume` to compute it again"
        )
    if state is None:
        raise StorageError(f"'{folder.path}' has no checkpoint yet; finish a round first")
    if view.summary is not None and view.summary["state"] != digest_of_state(state):
        raise StorageError(f"the checkpoint of round {last} in '{folder.path}' does not match summary.json")
    return state


def _facts(view: RunView, state: RunState, environment: Mapping[str, Any]) -> dict[str, Any]:
    evaluated = {record["round"]: record["test"] for record in map(unpacked_record, view.metrics) if "test" in record}
    summary = view.summary or {}
    return {
        "round": state.round,
        "experiment": _for_others(view.experiment),
        "last": evaluated.get(state.round),
        "mean_of_last": summary.get("mean_of_last"),
        "per_class_mean_of_last": summary.get("per_class"),
        "averaged_rounds": summary.get("averaged_rounds"),
        "best_round": summary.get("best_round"),
        "split": environment["split"],
        "class_counts": environment["class_counts"],
        "test_counts": judged.counts_of(environment, summary),
        "clients": judged.clients_in(environment),
        "groups": environment["groups"],
        "secure_aggregation": bool(environment.get("secure_aggregation")),
        **({"bfloat16": True} if was_in_bfloat16(environment) else {}),
        "evaluated": environment.get("evaluated", "server"),
        "evaluated_from": 1 if environment.get("secure_aggregation") else environment.get("min_count", 1),
        "versions": {name: environment[name] for name in ("redgrape", "python", "torch", "numpy")},
    }


def _for_others(value: Any, key: str = "") -> Any:
    """A value of the experiment without the folders of this machine. Infinity, which JSON lacks, becomes a word."""
    if isinstance(value, Mapping):
        return {name: _for_others(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list):
        return [_for_others(inner, key) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return _without_folders(value) if isinstance(value, str) and key.startswith(_PATHS) else value


def _without_folders(name: str) -> str:
    """The last part of a path, or of that in `like:PATH`. The name of a pretrained encoder stays: a slash in it is no
    folder."""
    if pretrained.is_pretrained(name):
        return name
    like = LIKE if name.startswith(LIKE) else ""
    return like + name.removeprefix(like).replace("\\", "/").rstrip("/").rpartition("/")[2]


class _FromRawInputs(nn.Module):
    """The net, preceded by the preparation of its inputs."""

    def __init__(self, net: Net, description: Description) -> None:
        super().__init__()
        self.net = net
        self.from_raw = forward_of(net, pixels_of(description))

    def forward(self, x: Tensor) -> Tensor:
        return self.from_raw(x)


def _onnx(model: Tensors, description: Description, net_name: str) -> bytes:
    """The graph from raw inputs (`pixels` or `x`, any number of rows) to `logits`."""
    for name in ("onnx", "onnxscript"):
        needed(name, f"the format onnx needs the package {name}", "onnx")
    shape, is_pixels = description.input.shape, description.input.dtype != "float"
    dtype: torch.dtype = getattr(torch, description.dtype)
    net = description.build(net_name).to(dtype)
    net.load_state_dict(model)
    rows = torch.zeros((2, *shape), dtype=getattr(torch, description.input.dtype) if is_pixels else dtype)
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                _FromRawInputs(net.eval(), description).eval(),
                (rows,),
                input_names=["pixels" if is_pixels else "x"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                verbose=False,
            )
    finally:
        log.setLevel(level)
    assert program is not None  # it is None only if a file is written
    return _bare(program.model_proto, description)


def _bare(proto: Any, description: Description) -> bytes:
    """Remove the notes of the exporter. They hold stack traces, and thus paths of this machine. Add the calibration
    for programs that read the graph without model.json."""
    graph = proto.graph
    for part in (proto, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    for key, value in ({} if description.calibration is None else description.calibration.model_dump()).items():
        proto.metadata_props.add(key=key, value=json.dumps(value))
    return bytes(proto.SerializeToString(deterministic=True))
