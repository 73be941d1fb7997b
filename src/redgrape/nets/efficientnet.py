"""EfficientNet-Lite0: the encoder of Tan and Le (2019) without squeeze-and-excitation, and with ReLU6 for swish.

Its images must have sides that are multiples of 32. Then every convolution with stride 2 meets an even side, where
"same" padding adds one pixel less before than after: the padding of the pretrained weights.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

FEATURES = 1280

# (kernel, stride of the first block, expansion, channels out, blocks) of each stage
_STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)


def lite0() -> nn.Sequential:
    """Images [n, 3, side, side] to 1280 features. 3,371,008 parameters."""
    layers: list[nn.Module] = [*_conv(3, 32, 3, stride=2), nn.ReLU6(inplace=True)]
    inputs = 32
    for kernel, first_stride, expansion, outputs, blocks in _STAGES:
        for stride in (first_stride, *[1] * (blocks - 1)):
            branch = _bottleneck(inputs, outputs, kernel, stride, expansion)
            layers.append(_Residual(branch) if stride == 1 and inputs == outputs else branch)
            inputs = outputs
    layers += [*_conv(inputs, FEATURES, 1), nn.ReLU6(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers)


class _Residual(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.branch(x))


def _bottleneck(inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> nn.Sequential:
    width = inputs * expansion
    wider = [*_conv(inputs, width, 1), nn.ReLU6(inplace=True)] if expansion > 1 else []
    depthwise = [*_conv(width, width, kernel, stride, groups=width), nn.ReLU6(inplace=True)]
    return nn.Sequential(*wider, *depthwise, *_conv(width, outputs, 1))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    before, after = (kernel - stride) // 2, (kernel - stride + 1) // 2  # "same" padding of an even side
    padding: list[nn.Module] = [nn.ZeroPad2d((before, after, before, after))] if before != after else []
    conv = nn.Conv2d(inputs, outputs, kernel, stride, 0 if padding else before, groups=groups, bias=False)
    return [*padding, conv, nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01)]
