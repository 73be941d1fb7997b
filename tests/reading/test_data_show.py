"""The description of a federation as text and as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import redgrape as rg
from redgrape.data.examples import Examples
from redgrape.data.federation import Federation
from redgrape.data.longtail import exponential
from redgrape.data.partition import partition
from redgrape.errors import StorageError
from redgrape.reading.data_show import describe, draw, holders, inputs


def federation(clients: int, classes: int, head: int = 200, ir: float = 50) -> Federation:
    labels = np.repeat(np.arange(classes), exponential([head] * classes, ir))
    x = np.zeros((len(labels), 1), dtype=np.float32)
    parts = partition(labels, "class_dirichlet", clients, 0.5, 0)
    return Federation.from_parts(Examples(x, labels), parts, Examples(x[:classes], np.arange(classes)), classes)


def text_of(shown: Federation) -> str:
    return describe(shown)


def test_a_small_federation_is_shown_cell_by_cell() -> None:
    shown = federation(10, 10)
    text = text_of(shown)
    assert shown.fingerprint()[:16] in text
    assert "ratio 50" in text
    for c, counts in enumerate(shown.client_counts.T):
        held = f"{counts.sum() ** 2 / (counts**2).sum():.1f}"
        cells = [str(c), *(str(n) if n else "." for n in counts), str(counts.sum()), held]
        assert any(line.split() == cells for line in text.splitlines())
    for group in ("head", "middle", "tail"):
        members = getattr(shown.groups, group)
        row = next(line for line in reversed(text.splitlines()) if line.startswith(f"{group} "))
        tests = shown.counts("test")
        assert ", ".join(f"{c} {shown.class_counts[c]}/{tests[c]}" for c in members) in row


@pytest.mark.parametrize(("clients", "classes"), [(21, 10), (10, 21), (300, 100)])
def test_a_large_federation_is_summed_up(clients: int, classes: int) -> None:
    shown = federation(clients, classes)
    text = text_of(shown)
    assert len(text.splitlines()) < 45
    sizes = shown.client_counts.sum(axis=1)
    row = next(line for line in text.splitlines() if line.startswith("examples "))
    assert row.split() == ["examples", f"{sizes.min()}", f"{np.median(sizes):g}", f"{sizes.max()}"]


def test_an_empty_class_is_said_to_be_empty() -> None:
    labels = np.array([0, 0, 2, 2])
    x = np.zeros((4, 1), dtype=np.float32)
    shown = Federation.from_parts(Examples(x, labels), [np.arange(4)], Examples(x, labels), 3)
    assert "a class is empty" in text_of(shown)


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (10, 10), (50, 10), (10, 100), (100, 100)])
def test_the_picture_is_a_png_of_bounded_size(clients: int, classes: int, tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    draw(federation(clients, classes, head=500), tmp_path / "map.png")
    with image_module.open(tmp_path / "map.png") as image:
        assert image.format == "PNG"
        assert 600 < image.width < 2500
        assert 500 < image.height < 2500
        colours = image.convert("RGB").getcolors(maxcolors=1 << 24)
        assert colours is not None
        assert len(colours) > 10


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(StorageError, match=r"cannot write .*nowhere/map.png: No such file"):
        draw(federation(2, 2), tmp_path / "nowhere" / "map.png")


def test_the_effective_number_of_holders_by_hand() -> None:
    """All of four clients alike: 4. Three and one of two: 16 / 10. One: 1. Nobody: 0."""
    labels = np.array([0, 1, 2, 0, 1, 2, 0, 1, 0, 1])
    parts = [np.array([0, 1, 4, 7, 2, 5]), np.array([3, 9]), np.array([6]), np.array([8])]
    x = np.zeros((10, 1), dtype=np.float32)
    shown = Federation.from_parts(Examples(x, labels), parts, Examples(x, labels), 4)
    assert holders(shown).tolist() == [4.0, 1.6, 1.0, 0.0]


ROWS = {
    "age": [30, 40, None, 40, 50, 99, None],
    "colour": ["red", None, "blue", None, None, "green", "red"],
    "unit": ["mg"] * 7,
    "batch": [0.1] * 4 + [None] * 3,
    "nothing": [None] * 6 + ["something"],
    "fold": ["train"] * 5 + ["test"] * 2,
    "kind": ["a", "b", "a", "b", "a", "a", "b"],
}


def test_the_columns_of_a_table_as_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by hand over the five training rows. A column with a missing value has one input more."""
    shown = rg.data.load(ROWS, label="kind", test="fold", partition="iid", clients=2)
    assert [tuple(column.values()) for column in inputs(shown)] == [
        ("age", "numbers", 3, 1, 2),
        ("colour", "categories", 2, 3, 3),
        ("unit", "constant", 1, 0, 1),
        ("batch", "constant", 1, 1, 2),
        ("nothing", "empty", 0, 5, 0),
    ]
    monkeypatch.setenv("COLUMNS", "80")
    text = text_of(shown).splitlines()
    assert "Inputs: 8 from 5 columns, over the training rows" in text
    assert ["colour", "categories", "2", "3", "3"] in map(str.split, text)
    assert "Inputs" not in text_of(federation(2, 2))


def test_many_columns_are_shown_by_those_that_stand_out() -> None:
    plain = {f"v{i}": [1, 2, 3, 4, 5, 6, 7] for i in range(50)}
    shown = rg.data.load({**plain, **ROWS}, label="kind", test="fold", partition="iid", clients=2)
    text = text_of(shown).splitlines()
    first = text.index("Inputs: 58 from 55 columns, over the training rows") + 2
    assert [line.split()[0] for line in text[first : first + 6]] == ["batch", "unit", "nothing", "colour", "age", "v0"]
    assert text[-1].split() == ["and", "35", "more", "0", "35"] and len(text[first:]) == 21
