"""Augmentation of a batch of images [n, channels, height, width], in torch, from a keyed generator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Augment:
    """crop: pad by this many pixels and cut a random window; flip: mirror each image with probability 1/2; cutout:
    blank a random square with sides of this many pixels (zero, the mean colour after normalisation)."""

    crop: int = 0
    flip: bool = False
    cutout: int = 0

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        if self.crop:
            x = _random_crop(x, self.crop, generator)
        if self.flip:
            mirrored = torch.rand(len(x), generator=generator) < 0.5
            x = torch.where(mirrored[:, None, None, None].to(x.device), x.flip(3), x)
        if self.cutout:
            x = _cutout(x, self.cutout, generator)
        return x


NO_AUGMENTATION = Augment()


def _random_crop(x: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    n, _, height, width = x.shape
    top, left = (torch.randint(0, 2 * padding + 1, (n,), generator=generator) for _ in range(2))
    windows = F.pad(x, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)  # [n, channels, top, left, ...]
    return windows[torch.arange(n), :, top, left]


def _cutout(x: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """The square's centre is anywhere in the image, so the border may cut the square (DeVries and Taylor, 2017)."""
    n, _, height, width = x.shape
    row = torch.randint(0, height, (n, 1), generator=generator)
    column = torch.randint(0, width, (n, 1), generator=generator)
    rows, columns = torch.arange(height), torch.arange(width)
    in_rows = (rows >= row - size // 2) & (rows < row - size // 2 + size)
    in_columns = (columns >= column - size // 2) & (columns < column - size // 2 + size)
    return x.masked_fill((in_rows[:, :, None] & in_columns[:, None, :])[:, None].to(x.device), 0)
