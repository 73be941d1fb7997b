"""A user's own data: folders of images and .npz files, right and wrong."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from redgrape.data import images, user_data
from redgrape.data.examples import Examples
from redgrape.data.sources import Source, load
from redgrape.errors import ConfigError, DataError, RedgrapeError, StorageError

Image = pytest.importorskip("PIL.Image")


def write_images(
    folder: Path, per_class: dict[str, int], *, mode: str = "RGB", size: tuple[int, int] = (6, 4), suffix: str = ".png"
) -> None:
    """Images of one colour each, all different, so that a pixel tells the image."""
    value = 0
    for name, n in per_class.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            colour: Any = value if mode == "L" else (value, 255 - value, 7)
            Image.new(mode, size, colour).save(folder / name / f"{i:03}{suffix}")
            value += 1


def first_pixels(examples: Any) -> list[int]:
    return [int(v) for v in examples.x[examples.rows if examples.rows is not None else slice(None)][:, 0, 0, 0]]


def test_a_folder_of_classes(tmp_path: Path) -> None:
    write_images(tmp_path / "pets", {"dog": 10, "cat": 20, "ape": 3, "emu": 1})
    (tmp_path / "pets" / "dog" / "notes.txt").write_text("not an image")
    (tmp_path / "pets" / "dog" / ".hidden.png").write_text("not an image")
    (tmp_path / "pets" / ".git").mkdir()
    source = load(str(tmp_path / "pets"), tmp_path / "root")
    assert source.class_names == ["ape", "cat", "dog", "emu"]
    assert source.train.x.shape == (34, 3, 4, 6)
    assert source.train.labels.bincount().tolist() == [2, 16, 8, 1]
    assert source.test.labels.bincount(minlength=4).tolist() == [1, 4, 2, 0]
    assert sorted(first_pixels(source.train) + first_pixels(source.test)) == list(range(34))
    pixel_of_class = {0: range(30, 33), 1: range(10, 30), 2: range(10), 3: range(33, 34)}
    for part in (source.train, source.test):
        assert all(v in pixel_of_class[int(c)] for v, c in zip(first_pixels(part), part.labels, strict=True))
    assert source.train.x[0, :, 0, 0].tolist() == [30, 225, 7]


def test_the_held_out_test_set_is_keyed_by_the_seed(tmp_path: Path) -> None:
    write_images(tmp_path / "pets", {"a": 30, "b": 30})
    draws = [load(str(tmp_path / "pets"), tmp_path, seed=seed) for seed in (0, 0, 1)]
    tests = [sorted(first_pixels(source.test)) for source in draws]
    assert tests[0] == tests[1] != tests[2]


def test_train_and_test_folders(tmp_path: Path) -> None:
    write_images(tmp_path / "pets" / "train", {"a": 3, "b": 4})
    write_images(tmp_path / "pets" / "test", {"a": 1, "b": 2})
    source = load(str(tmp_path / "pets"), tmp_path)
    assert source.train.labels.tolist() == [0] * 3 + [1] * 4
    assert source.test.labels.tolist() == [0, 1, 1]
    assert first_pixels(source.test) == [0, 1, 2]
    write_images(tmp_path / "pets" / "test", {"c": 1})
    with pytest.raises(DataError, match="same class folders; only one of them has c"):
        load(str(tmp_path / "pets"), tmp_path)


@pytest.mark.parametrize(
    "splits", [("train", "val", "test"), ("Train", "Test"), ("training", "testing"), ("train", "dev"), ("test", "a")]
)
def test_other_splits_than_train_and_test_are_no_sites(splits: tuple[str, ...], tmp_path: Path) -> None:
    for split in splits:
        write_images(tmp_path / "pets" / split, {"a": 3, "b": 3})
    for fewest_classes in (1, 2):  # a site of a deployment, and data for simulated clients
        with pytest.raises(DataError, match=rf"holds the folders .*{splits[0]}.*; name them train and test, and move"):
            user_data.load(tmp_path / "pets", tmp_path, seed=0, fewest_classes=fewest_classes)


def test_a_class_may_be_named_train(tmp_path: Path) -> None:
    write_images(tmp_path / "traffic", {"bus": 2, "train": 2})
    assert load(str(tmp_path / "traffic"), tmp_path).class_names == ["bus", "train"]


def test_grey_stays_grey_unless_one_image_has_colour(tmp_path: Path) -> None:
    write_images(tmp_path / "pets", {"a": 4, "b": 4}, mode="L")
    assert load(str(tmp_path / "pets"), tmp_path).train.x.shape[1] == 1
    Image.new("RGB", (6, 4)).save(tmp_path / "pets" / "a" / "colour.png")
    assert load(str(tmp_path / "pets"), tmp_path).train.x.shape[1] == 3


@pytest.mark.parametrize("suffix", [".png", ".JPG", ".jpeg", ".bmp", ".gif", ".webp", ".tif"])
def test_image_formats(suffix: str, tmp_path: Path) -> None:
    write_images(tmp_path / "pets", {"a": 2, "b": 2}, suffix=suffix)
    source = load(str(tmp_path / "pets"), tmp_path)
    assert source.train.x.shape == (4, 3, 4, 6)
    assert np.abs(source.train.x[:, 0, 0, 0].numpy().astype(int) - np.arange(4)).max() < 20


def test_sizes_must_agree_or_be_given(tmp_path: Path) -> None:
    write_images(tmp_path / "pets", {"a": 2, "b": 2})
    Image.new("RGB", (9, 5)).save(tmp_path / "pets" / "b" / "z.png")
    with pytest.raises(DataError, match=r"000.png is 6x4 and .*z.png is 9x5; .* -c data.image_size=64"):
        load(str(tmp_path / "pets"), tmp_path)
    resized = load(str(tmp_path / "pets"), tmp_path, image_size=8)
    assert resized.train.x.shape == (5, 3, 8, 8)
    with pytest.raises(ConfigError, match="image_size is 0"):
        load(str(tmp_path / "pets"), tmp_path, image_size=0)


def test_images_are_decoded_once_and_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "pets", {"a": 3, "b": 3})
    before = load(str(tmp_path / "pets"), tmp_path)
    (cache,) = (tmp_path / "decoded").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(images, "_decode", lambda *_: pytest.fail("decoded again"))
        again = load(str(tmp_path / "pets"), tmp_path)
    content = np.load(cache, mmap_mode="r+")
    content[0, 0, 0, 0] = 99  # seen through the map by both
    content.flush()
    assert int(before.train.x[0, 0, 0, 0]) == int(again.train.x[0, 0, 0, 0]) == 99


def test_changed_images_and_a_damaged_cache_are_decoded_again(tmp_path: Path) -> None:
    write_images(tmp_path / "pets", {"a": 3, "b": 3}, suffix=".bmp")
    load(str(tmp_path / "pets"), tmp_path)
    (cache,) = (tmp_path / "decoded").iterdir()
    cache.write_bytes(cache.read_bytes()[:100])
    whole = load(str(tmp_path / "pets"), tmp_path).train
    assert whole.x.shape == (6, 3, 4, 6)
    pixels = whole.x.clone()
    content = bytearray(cache.read_bytes())
    content[-40] ^= 1  # of a pixel
    cache.unlink()
    cache.write_bytes(content)
    assert load(str(tmp_path / "pets"), tmp_path).train.x.equal(pixels)
    path = tmp_path / "pets" / "a" / "000.bmp"
    size = path.stat().st_size
    Image.new("RGB", (6, 4), (200, 0, 0)).save(path)
    assert path.stat().st_size == size
    os.utime(path, ns=(1, 1))
    assert int(load(str(tmp_path / "pets"), tmp_path).train.x[0, 0, 0, 0]) == 200


def test_a_corrupt_image_is_named_and_leaves_no_cache(tmp_path: Path) -> None:
    write_images(tmp_path / "pets", {"a": 3, "b": 3}, size=(60, 40))
    path = tmp_path / "pets" / "b" / "001.png"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"b/001.png cannot be read as an image"):
        load(str(tmp_path / "pets"), tmp_path)
    assert list((tmp_path / "decoded").iterdir()) == []
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"b/001.png cannot be read as an image"):
        load(str(tmp_path / "pets"), tmp_path)


@pytest.mark.parametrize("kept", [0, 60])
def test_all_corrupt_images_are_counted(kept: int, tmp_path: Path) -> None:
    """Some are seen by their first bytes, others only when they are decoded."""
    write_images(tmp_path / "pets", {"a": 3, "b": 3}, size=(60, 40))
    for name in ("a/000", "a/002", "b/000", "b/001", "b/002"):
        path = tmp_path / "pets" / f"{name}.png"
        path.write_bytes(path.read_bytes()[:kept])
    others = r"the same with 4 more of 6 images: \S+a/002.png, \S+b/000.png, \S+b/001.png, \.\.\.$"
    with pytest.raises(DataError, match=rf"a/000.png cannot be read as an image \(.*; replace or remove it; {others}"):
        load(str(tmp_path / "pets"), tmp_path)
    assert not list(tmp_path.glob("decoded/*"))


def test_links_may_not_leave_the_folder(tmp_path: Path) -> None:
    write_images(tmp_path / "pets", {"a": 2, "b": 2})
    Image.new("RGB", (6, 4)).save(tmp_path / "secret.png")
    link = tmp_path / "pets" / "a" / "link.png"
    link.symlink_to(tmp_path / "pets" / "b" / "000.png")
    assert len(load(str(tmp_path / "pets"), tmp_path).train.x) == 5
    link.unlink()
    link.symlink_to(tmp_path / "secret.png")
    with pytest.raises(DataError, match=r"link.png is a link to a place outside"):
        load(str(tmp_path / "pets"), tmp_path)
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(DataError, match=r"link.png is not a file"):
        load(str(tmp_path / "pets"), tmp_path)
    link.unlink()
    (tmp_path / "pets" / "c").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    Image.new("RGB", (6, 4)).save(tmp_path / "elsewhere" / "x.png")
    with pytest.raises(DataError, match=r"c/x.png is a link to a place outside"):
        load(str(tmp_path / "pets"), tmp_path)


def test_folders_that_are_not_classes(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="0 class folders"):
        load(str(tmp_path / "empty"), tmp_path)
    write_images(tmp_path / "pets", {"a": 2, "b": 2})
    (tmp_path / "pets" / "c").mkdir()
    with pytest.raises(DataError, match="c holds no images"):
        load(str(tmp_path / "pets"), tmp_path)
    write_images(tmp_path / "pets" / "c", {"deep": 2})
    with pytest.raises(DataError, match="deep is a folder inside a class folder"):
        load(str(tmp_path / "pets"), tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    write_images(tmp_path / "pets", {"a": 2, "b": 2})
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="cannot read or write"):
        load(str(tmp_path / "pets"), tmp_path / "file")


def save_and_load(path: Path, *, compressed: bool = False, **arrays: Any) -> Source:
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return load(str(path))


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ((20, 5, 4), (20, 1, 5, 4)),
        ((20, 5, 4, 3), (20, 3, 5, 4)),
        ((20, 5, 4, 1), (20, 1, 5, 4)),
        ((20, 3, 5, 4), (20, 3, 5, 4)),
        ((20, 3, 5, 3), (20, 3, 5, 3)),
    ],
)
def test_npz_images_are_made_channels_first(
    given: tuple[int, ...], kept: tuple[int, ...], compressed: bool, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).integers(0, 256, given, dtype=np.uint8)
    source = save_and_load(tmp_path / "own.npz", compressed=compressed, x=x, y=np.arange(20) % 2)
    assert tuple(source.train.x.shape) == kept
    expected = x[:, None] if x.ndim == 3 else x if given == kept else x.transpose(0, 3, 1, 2)
    assert (source.train.x.numpy() == expected).all()
    inputs = source.train.inputs(torch.arange(4), torch.float32)
    assert inputs.is_contiguous()


@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<f2", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npz_vectors(dtype: str, order: Any, tmp_path: Path) -> None:
    x = np.asarray(np.arange(60).reshape(20, 3), dtype=dtype, order=order)
    source = save_and_load(tmp_path / "own.npz", x=x, y=np.arange(20) % 2)
    assert (source.train.x.numpy() == x).all()


def test_stored_arrays_are_mapped_in_place(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    x = np.full((20, 3), 1.5, dtype=np.float32)
    source = save_and_load(path, x=x, y=np.arange(20) % 2)
    content = bytearray(path.read_bytes())
    at = content.index(x.tobytes())
    with path.open("r+b") as file:
        file.seek(at)
        file.write(np.float32(42).tobytes())
    assert float(source.train.x[0, 0]) == 42


def test_npz_holds_out_a_test_set_without_a_common_row(tmp_path: Path) -> None:
    y = np.repeat([0, 1, 2], [50, 10, 1])
    x = np.arange(61, dtype=np.float32)[:, None]
    source = save_and_load(tmp_path / "own.npz", x=x, y=y, client=np.arange(61) * 2 - 30)
    assert source.test.labels.bincount(minlength=3).tolist() == [10, 2, 0]
    train, test = (
        part.inputs(torch.arange(len(part)), torch.float32)[:, 0].tolist() for part in (source.train, source.test)
    )
    assert sorted(train + test) == list(range(61))
    assert source.clients is not None
    assert source.clients.tolist() == [2 * row - 30 for row in train]
    assert source.class_names == ["0", "1", "2"]


def test_npz_with_a_test_mask(tmp_path: Path) -> None:
    y = np.array([0, 1, 0, 1, 1])
    test = np.array([False, True, True, False, False])
    names = np.array(["no", "yes", "maybe"])
    source = save_and_load(
        tmp_path / "own.npz", x=np.eye(5), y=y, test=test, client=np.array([9, 1, 9, 4, 9]), class_names=names
    )
    assert source.train.labels.tolist() == [0, 1, 1]
    assert source.test.labels.tolist() == [1, 0]
    assert source.clients is not None
    assert source.clients.tolist() == [9, 4, 9]
    assert source.class_names == ["no", "yes", "maybe"]


def test_npz_with_its_own_test_set(tmp_path: Path) -> None:
    source = save_and_load(tmp_path / "own.npz", x=np.eye(4), y=[0, 1, 0, 1], x_test=np.zeros((2, 4)), y_test=[2, 0])
    assert len(source.train) == 4
    assert source.test.labels.tolist() == [2, 0]
    assert source.class_names == ["0", "1", "2"]


X, Y = np.zeros((4, 2), dtype=np.float32), np.array([0, 1, 0, 1])


def test_labels_may_be_names(tmp_path: Path) -> None:
    words = np.array(["well", "ill", "well", "ill", "well"])
    source = save_and_load(tmp_path / "own.npz", x=np.eye(5), y=words, x_test=np.eye(5)[:1], y_test=np.array(["worse"]))
    assert source.class_names == ["ill", "well", "worse"]
    assert source.train.labels.tolist() == [1, 0, 1, 0, 1] and source.test.labels.tolist() == [2]
    named = save_and_load(tmp_path / "own.npz", x=np.eye(5), y=words, class_names=np.array(["well", "ill", "dead"]))
    assert named.class_names == ["well", "ill", "dead"]
    assert sorted(named.train.labels.tolist() + named.test.labels.tolist()) == [0, 0, 0, 1, 1]


def test_arrays_of_names_and_objects_get_advice() -> None:
    for y in (np.array(["a", "b"]), np.array(["a", 1], dtype=object)):
        with pytest.raises(DataError, match=r"names, y = np.unique\(y, return_inverse=True\)"):
            Examples(np.eye(2), y)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"x": X}, "no array `y`; it has x"),
        ({"x": X, "y": Y[:3]}, "y has 3 entries for 4 rows"),
        ({"x": X, "y": Y - 1}, "label -1"),
        ({"x": X, "y": Y * 0.5}, "whole numbers"),
        ({"x": X, "y": Y * 10**12}, "label 1000000000000 among 4 examples"),
        ({"x": X, "y": Y, "class_names": np.array(["only"])}, "label 1 is outside the 1 classes"),
        ({"x": X, "y": Y, "class_names": np.array([1, 2])}, "pass one row of strings"),
        ({"x": X, "y": np.array([0, "a", None, 1], dtype=object)}, r"Python objects; save .* as array.astype\(str\)"),
        ({"x": X, "y": np.array(["a", "b", "a", "c"]), "class_names": np.array(["a", "b"])}, "the class 'c', which"),
        ({"x": X, "y": np.array(["a", " ", "a", "c"])}, "empty name"),
        ({"x": X.astype(object), "y": Y}, "Python objects"),
        ({"x": X.astype(np.int32), "y": Y}, "pass images as uint8"),
        ({"x": X.astype(np.uint8), "y": Y}, "images are"),
        ({"x": np.zeros((4, 2, 2, 2), np.uint8), "y": Y}, "images are"),
        ({"x": X.astype(np.longdouble), "y": Y}, "holds float128|holds longdouble"),
        ({"x": X[:, 0], "y": Y}, "at least one column"),
        ({"x": X, "y": Y, "client": Y[:2]}, "client has 2 entries"),
        ({"x": X, "y": Y, "client": Y * 1.0}, "client holds float64"),
        ({"x": X, "y": Y, "test": Y}, "pass a bool"),
        ({"x": X, "y": Y, "test": np.zeros(4, bool)}, "4 training and 0 test examples"),
        ({"x": X, "y": Y, "test": Y > 0, "x_test": X, "y_test": Y}, "both"),
        ({"x": X, "y": Y, "x_test": X}, "no array `y_test`"),
        ({"x": X, "y": Y, "x_test": X[:, :1], "y_test": Y}, "a row of x_test"),
        ({"x": X[:0], "y": Y[:0]}, "x holds no examples"),
        ({"x": X, "y": Y, "clients": Y}, "own.npz has an array 'clients', which is not read; did you mean 'client'"),
        ({"x": X, "y": Y, "tests": Y > 0}, "array 'tests', which is not read; did you mean 'test'"),
        ({"x": X, "y": Y, "site": Y}, "array 'site', which is not read; remove it; an array is one of x, y, client, "),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_wrong_npz_files_are_refused_in_one_line(
    arrays: dict[str, Any], complaint: str, compressed: bool, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=complaint) as raised:
        save_and_load(tmp_path / "own.npz", compressed=compressed, **arrays)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "dtype"), [("x", np.float32), ("x_test", np.float64), ("x", np.float16)])
def test_a_number_that_is_not_finite_is_named_by_its_row(name: str, dtype: Any, wrong: float, tmp_path: Path) -> None:
    """Row 4500 of the file, which is beyond the first block."""
    y = np.arange(5000) % 2
    arrays = {"x": np.zeros((5000, 2, 2), dtype), "y": y}
    arrays |= {"x_test": arrays["x"].copy(), "y_test": y} if name == "x_test" else {}
    arrays[name][4500, 1, 0] = wrong
    advice = "has a value that is NaN or infinite; fill it in or remove the row"
    with pytest.raises(DataError, match=rf"own.npz: {name}\[4500\] {advice}"):
        save_and_load(tmp_path / "own.npz", **arrays)


@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_npz_files_never_raise_anything_else(compressed: bool, tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    (np.savez_compressed if compressed else np.savez)(path, x=np.eye(20), y=np.arange(20) % 2)
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        content = bytearray(whole[: random.integers(1, len(whole))] if random.random() < 0.3 else whole)
        for position in random.integers(0, len(content), 3):
            content[position] = random.integers(0, 256)
        path.write_bytes(content)
        try:
            load(str(path))
        except RedgrapeError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 50


def test_a_header_that_promises_more_than_there_is(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**9, 10**6)})
    with zipfile.ZipFile(tmp_path / "own.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue() + b"1234")
        archive.writestr("y.npy", header.getvalue() + b"1234")
    with pytest.raises(DataError, match="more than the file holds"):
        load(str(tmp_path / "own.npz"))


def test_other_files_and_options_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("1,2")
    with pytest.raises(ConfigError, match=r"neither a folder of images nor an .npz file"):
        load(str(tmp_path / "data.txt"))
    (tmp_path / "own.npz").write_text("not a zip")
    with pytest.raises(DataError, match=r"cannot be read as an .npz file"):
        load(str(tmp_path / "own.npz"))
    with pytest.raises(ConfigError, match="image_size is for folders"):
        load(str(tmp_path / "own.npz"), image_size=8)
