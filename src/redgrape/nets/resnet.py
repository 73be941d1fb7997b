"""Residual nets for small images (He et al. 2016, section 4.2): a 3x3 stem, three stages of blocks that double the
width and halve the image, a global mean, and the classifier. Parameter counts are for 3 channels and 10 classes.

There are two initialisations, as in the authors' code. He's nets start as in LDAM's code (Cao et al. 2019):
kaiming_normal_ by fan-in on the convolutions and the classifier. CReFF's and FedML's nets use fan-out on the
convolutions and PyTorch's default on the classifier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn

from redgrape.nets.net import Net

Part: TypeAlias = Callable[[int, int, int], nn.Module]  # (channels in, channels out, stride)


def resnet8(shape: tuple[int, ...], num_classes: int) -> Net:
    """ResNet-8 with 64 features and parameter-free shortcuts (He et al. 2016)

    464 (stem) + 4,672 + 13,952 + 55,552 (one block a stage) + 650 (classifier) = 75,290 parameters.
    """
    return _he(shape, num_classes, blocks=1)


def resnet20(shape: tuple[int, ...], num_classes: int) -> Net:
    """ResNet-20 with 64 features and parameter-free shortcuts (He et al. 2016)

    ResNet-8's 75,290 and, for each further block a stage, 4,672 + 18,560 + 73,984 = 97,216: 269,722 parameters.
    """
    return _he(shape, num_classes, blocks=3)


def resnet32(shape: tuple[int, ...], num_classes: int) -> Net:
    """ResNet-32 with 64 features and parameter-free shortcuts (He et al. 2016)

    75,290 + 4 * 97,216 = 464,154 parameters. The usual net of centralised long-tailed learning.
    """
    return _he(shape, num_classes, blocks=5)


def resnet56(shape: tuple[int, ...], num_classes: int) -> Net:
    """ResNet-56 with 64 features and parameter-free shortcuts (He et al. 2016)

    75,290 + 8 * 97,216 = 853,018 parameters; 858,868 for 100 classes. The net that RedGrape's paper names.
    """
    return _he(shape, num_classes, blocks=9)


def resnet8x4(shape: tuple[int, ...], num_classes: int) -> Net:
    """ResNet-8, four times as wide, with 256 features (Shang et al. 2022, CReFF)

    1,856 (stem) + 73,984 + 221,696 + 885,760 (blocks) + 8,448 + 33,280 (shortcuts) + 2,570 (classifier)
    = 1,227,594 parameters.
    """
    encoder = _encoder(shape[0], stem=64, widths=(64, 128, 256), blocks=1, branch=_basic, shortcut=_projection)
    return Net(_by_fan_out(encoder), nn.Linear(256, num_classes))


def resnet56_bottleneck(shape: tuple[int, ...], num_classes: int) -> Net:
    """ResNet-56 of bottleneck blocks with 256 features (C. He et al. 2020, FedML)

    591,322 parameters; 614,452 for 100 classes. What RedGrape's released code ran as its ResNet-56.
    """
    encoder = _encoder(shape[0], stem=16, widths=(64, 128, 256), blocks=6, branch=_bottleneck, shortcut=_projection)
    return Net(_by_fan_out(encoder), nn.Linear(256, num_classes))


def _he(shape: tuple[int, ...], num_classes: int, blocks: int) -> Net:
    encoder = _encoder(shape[0], stem=16, widths=(16, 32, 64), blocks=blocks, branch=_basic, shortcut=_ZeroPadding)
    net = Net(encoder, nn.Linear(64, num_classes))
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return net


def _by_fan_out(encoder: nn.Module) -> nn.Module:
    for module in encoder.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return encoder


def _encoder(
    channels: int, *, stem: int, widths: tuple[int, int, int], blocks: int, branch: Part, shortcut: Part
) -> nn.Module:
    """Three stages of `blocks` blocks each, with outputs of these widths."""
    layers: list[nn.Module] = [_conv(channels, stem, 3), nn.BatchNorm2d(stem), nn.ReLU(inplace=True)]
    inputs = stem
    for outputs, first_stride in zip(widths, (1, 2, 2), strict=True):
        for stride in (first_stride, *[1] * (blocks - 1)):
            same_shape = stride == 1 and inputs == outputs
            skip = nn.Identity() if same_shape else shortcut(inputs, outputs, stride)
            layers.append(_Block(branch(inputs, outputs, stride), skip))
            inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class _Block(nn.Module):
    never_negative = True  # ends in a ReLU

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.branch(x) + self.shortcut(x), inplace=True)


def _basic(inputs: int, outputs: int, stride: int) -> nn.Module:
    return nn.Sequential(
        _conv(inputs, outputs, 3, stride),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        _conv(outputs, outputs, 3),
        nn.BatchNorm2d(outputs),
    )


def _bottleneck(inputs: int, outputs: int, stride: int) -> nn.Module:
    width = outputs // 4
    return nn.Sequential(
        _conv(inputs, width, 1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        _conv(width, width, 3, stride),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        _conv(width, outputs, 1),
        nn.BatchNorm2d(outputs),
    )


class _ZeroPadding(nn.Module):
    """He's option A: every second pixel, and zeros for the new channels, half of them before and half after."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.padding = (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.avg_pool2d(x, 1, self.stride)  # x[:, :, ::s, ::s], but the gradient keeps its memory format
        return nn.functional.pad(x, (0, 0, 0, 0, self.padding, self.padding))


def _projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    """He's option B: a 1x1 convolution."""
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
