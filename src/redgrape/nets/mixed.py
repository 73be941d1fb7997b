"""Mixed precision: an encoder that multiplies in bfloat16. Weights, features, classifier and losses keep their type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from redgrape.nets.net import Net


def in_bfloat16(build: Callable[[], Net]) -> Net:
    """The net of `build`, with such an encoder."""
    net = build()
    net.encoder.register_forward_pre_hook(_begin)
    net.encoder.register_forward_hook(_end, always_call=True)
    return net


def _begin(encoder: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    casting = torch.autocast(inputs[0].device.type, torch.bfloat16)
    casting.__enter__()
    vars(encoder)["casting"] = casting


def _end(encoder: nn.Module, inputs: tuple[Tensor, ...], features: Any) -> Any:
    vars(encoder).pop("casting").__exit__(None, None, None)
    return features.to(inputs[0].dtype) if isinstance(features, Tensor) else features
