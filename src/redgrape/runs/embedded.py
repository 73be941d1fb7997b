"""The data of an experiment with a pretrained encoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from redgrape.data import sources
from redgrape.data.embedding import Embedder, Progress
from redgrape.data.examples import WHITE, Examples, Pixels
from redgrape.errors import ConfigError
from redgrape.nets import pretrained
from redgrape.runs.experiment import NetOptions


def for_encoder(name: str, examples: Examples) -> Examples:
    """The examples with the pixels normalised as the pretrained encoder needs them."""
    if examples.x.dtype not in WHITE or examples.x.dim() != 4:
        raise ConfigError(f"net '{name}' takes images, but the data holds floats; choose mlp or linear")
    return replace(examples, pixels=Pixels(*pretrained.normalisation(name, examples.x.shape[1])))


def embedder(
    net: NetOptions, shape: tuple[int, ...], data_root: Path | None, progress: Progress | None = None
) -> Embedder:
    """Replaces images by the features of the frozen encoder."""
    encoder = pretrained.body(net.name, shape, net.size)
    encoder[1].load_state_dict(pretrained.weights(net.name, net.weights))
    size = pretrained.side(shape, net.size)
    version = pretrained.version(net.name).values()
    identity = " ".join([net.name, pretrained.digest(net.name, net.weights), str(size), *version])
    return Embedder(encoder, pretrained.features(net.name, shape, net.size), identity, data_root, progress)


def embed(
    source: str, net: NetOptions, *, image_size: int | None, data_root: Path | None, progress: Progress | None
) -> dict[str, Any]:
    """The embeddings of a whole source, as the arrays of an .npz file. They stay in the cache, where runs find them."""
    data = sources.load(source, data_root, image_size=image_size)
    train, test = (for_encoder(net.name, examples) for examples in (data.train, data.test))
    change = embedder(net, tuple(train.x.shape[1:]), data_root, progress)
    split = {"": change(train), "_test": change(test)}
    arrays: dict[str, Any] = {"class_names": np.array(data.class_names)}
    for name, examples in split.items():
        rows = torch.arange(len(examples))
        arrays |= {f"x{name}": examples.inputs(rows, torch.float32).numpy(), f"y{name}": examples.labels.numpy()}
    return arrays | ({} if data.clients is None else {"client": data.clients})
