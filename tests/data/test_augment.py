"""Augmentation: what each step may and may not change, and that it is keyed."""

from __future__ import annotations

import pytest
import torch

from redgrape.data.augment import Augment
from redgrape.data.examples import Examples
from redgrape.determinism import torch_stream


def images(n: int = 64) -> torch.Tensor:
    return torch.arange(1, 1 + n * 2 * 6 * 5, dtype=torch.float32).reshape(n, 2, 6, 5)


def test_none_leaves_images_alone() -> None:
    assert torch.equal(Augment()(images(), torch_stream(0, "a")), images())


def test_flip_mirrors_about_half_of_the_images_and_nothing_else() -> None:
    x = images()
    out = Augment(flip=True)(x, torch_stream(0, "a"))
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(out, x, strict=True)]
    same = [torch.equal(a, b) for a, b in zip(out, x, strict=True)]
    assert all(m != s for m, s in zip(mirrored, same, strict=True))
    assert 16 < sum(mirrored) < 48


def test_crop_is_a_window_of_the_padded_image() -> None:
    x = images()
    out = Augment(crop=2)(x, torch_stream(0, "a"))
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    windows = set()
    for i in range(len(x)):
        found = [
            (top, left)
            for top in range(5)
            for left in range(5)
            if torch.equal(out[i], padded[i, :, top : top + 6, left : left + 5])
        ]
        assert len(found) == 1
        windows.add(found[0])
    assert len(windows) > 15
    assert {top for top, _ in windows} == {left for _, left in windows} == set(range(5))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_cutout_blanks_one_square_that_the_border_may_cut(size: int) -> None:
    x = images()
    out = Augment(cutout=size)(x, torch_stream(0, "a"))
    blank = (out == 0).any(dim=1)
    assert torch.equal(out, torch.where(blank[:, None], torch.zeros_like(x), x))
    assert torch.equal((out == 0).all(dim=1), blank)
    areas = set()
    for mask in blank:
        rows, columns = mask.any(dim=1).nonzero(), mask.any(dim=0).nonzero()
        height, width = int(rows.max() - rows.min()) + 1, int(columns.max() - columns.min()) + 1
        assert int(mask.sum()) == height * width
        assert height <= size
        assert width <= size
        areas.add(height * width)
    assert size * size in areas
    assert size == 1 or min(areas) < size * size


def test_the_key_decides() -> None:
    augment = Augment(crop=2, flip=True, cutout=3)
    draws = [augment(images(), torch_stream(seed, "a")) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_examples_augment_only_where_a_generator_is_given() -> None:
    examples = Examples(images(), torch.zeros(64, dtype=torch.int64), augment=Augment(flip=True))
    rows = torch.arange(64)
    assert torch.equal(examples.inputs(rows, torch.float32), images())
    assert not torch.equal(examples.inputs(rows, torch.float32, torch_stream(0, "a")), images())
