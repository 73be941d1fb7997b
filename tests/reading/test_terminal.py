"""Tables for people: whole names, whole cells, whatever the width of the terminal."""

from __future__ import annotations

import pytest

from redgrape.reading import terminal

HEADER = ["method", "overall", "tail"]
ROWS = [["fedavg", "74.5±1.4", "9.0±0.1"], ["logit_adjustment:prior=global", "81.0±0.3", "60.5±10.2"]]


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("COLUMNS", "80")
    return monkeypatch


@pytest.mark.parametrize("width", [80, 40, 32, 20, 5])
def test_no_entry_is_cut_or_split(width: int, columns: pytest.MonkeyPatch) -> None:
    columns.setenv("COLUMNS", str(width))
    lines = terminal.table(HEADER, ROWS).splitlines()
    for entry in (*HEADER, *ROWS[0], *ROWS[1]):
        assert any(entry in line.split() for line in lines)
    if width >= 32:
        assert max(map(len, lines)) <= width


def test_layouts(columns: pytest.MonkeyPatch) -> None:
    assert terminal.table(HEADER, ROWS, "title").splitlines() == [
        "title",
        "method                          overall       tail",
        "fedavg                         74.5±1.4    9.0±0.1",
        "logit_adjustment:prior=global  81.0±0.3  60.5±10.2",
    ]
    columns.setenv("COLUMNS", "40")
    assert terminal.table(HEADER, ROWS).splitlines() == [
        "method",
        "   overall       tail",
        "fedavg",
        "  74.5±1.4    9.0±0.1",
        "logit_adjustment:prior=global",
        "  81.0±0.3  60.5±10.2",
    ]
    columns.setenv("COLUMNS", "16")
    wide = [["a", *"12345678"], ["b", *"12345678"]]
    assert terminal.table(["x", *"ABCDEFGH"], wide).splitlines()[0] == "x  a  b"
    columns.setenv("COLUMNS", "10")
    assert terminal.table(["x", *"ABCD"], [[name, *"1234"] for name in "abcd"]).splitlines()[4:8] == [
        "d  1  2  3",
        "",
        "x  D",
        "a  4",
    ]


def test_wide_characters_and_escapes(columns: pytest.MonkeyPatch) -> None:
    """A terminal gives some letters two columns. An escape sequence must not reach it."""
    lines = terminal.table(["class", "n"], [["汉字", 1], ["\x1b[31m", 2]]).splitlines()
    assert lines[1] == "汉字   1"
    assert lines[2] == "\N{REPLACEMENT CHARACTER}[31m  2"


def test_a_pipe_has_no_limit(columns: pytest.MonkeyPatch) -> None:
    columns.delenv("COLUMNS")
    assert len(terminal.table(["name", "n"], [["long" * 300, 1]]).splitlines()) == 2
