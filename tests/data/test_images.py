"""Images of sites: folders of folders, manifests, 16 bits, letterboxes, normalisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from redgrape.data import images
from redgrape.data.prepare import DataOptions, prepare
from redgrape.data.sources import load
from redgrape.errors import ConfigError, DataError
from redgrape.exported.export import export
from redgrape.exported.inference import as_csv, predict_file
from redgrape.exported.model import load_model
from redgrape.runs.run import run

Image = pytest.importorskip("PIL.Image")


def write(path: Path, value: int = 0, size: tuple[int, int] = (6, 4), deep: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size[1], size[0]), value, np.uint16 if deep else np.uint8)).save(path)


def test_folders_of_sites(tmp_path: Path) -> None:
    for site, classes in {"north": "ab", "south": "bc"}.items():
        for name in classes:
            for i in range(4):
                write(tmp_path / "sites" / site / name / f"{i}.png", value=ord(name))
    source = load(str(tmp_path / "sites"), tmp_path)
    assert source.class_names == ["a", "b", "c"]
    assert source.clients is not None and len(source.clients) == len(source.train)
    pixels = source.train.inputs(torch.arange(len(source.train)), torch.float64)[:, 0, 0, 0] * 255
    assert pixels.round().long().tolist() == [ord(source.class_names[y]) for y in source.train.labels.tolist()]
    federation = prepare(DataOptions(source=str(tmp_path / "sites"), partition="natural"), 0, tmp_path)
    assert federation.client_names == ["north", "south"]
    assert federation.client_counts[0, 2] == federation.client_counts[1, 0] == 0
    assert federation.client_counts.sum() == len(source.train) == 16 - len(source.test)


def test_sites_with_a_common_test_set(tmp_path: Path) -> None:
    for place in ("train/x/a", "train/x/b", "train/y/a", "test/a", "test/b"):
        write(tmp_path / "sites" / place / "0.png")
    source = load(str(tmp_path / "sites"), tmp_path)
    assert source.clients is not None and source.clients.tolist() == ["x", "x", "y"]
    assert source.test.labels.tolist() == [0, 1]


MANIFEST = "path,label,site,split\nimg/0.png,b,north,train\nimg/1.png,a,south,train\nimg/2.png,a,,test\n"


def test_a_manifest(tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path / "img" / f"{i}.png", value=i)
    (tmp_path / "manifest.csv").write_text("\ufeff" + MANIFEST, encoding="utf-8")
    for source in (load(str(tmp_path), tmp_path / "c"), load(str(tmp_path / "manifest.csv"), tmp_path / "c")):
        assert source.class_names == ["a", "b"]
        assert source.train.labels.tolist() == [1, 0] and source.test.labels.tolist() == [0]
        assert source.clients is not None and source.clients.tolist() == ["north", "south"]
        assert int(source.test.inputs(torch.tensor([0]), torch.float64)[0, 0, 0, 0] * 255) == 2


def test_spaces_around_the_cells_of_a_manifest_do_not_count(tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path / "img" / f"{i}.png")
    (tmp_path / "manifest.csv").write_text(MANIFEST.replace("2.png,a,,", "2.png , a , south ,"))
    source = load(str(tmp_path), tmp_path / "c")
    assert source.class_names == ["a", "b"]
    assert source.test_clients is not None and source.test_clients.tolist() == ["south"]


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ("path,label", "file,label", "needs a line of titles with `path` and `label`"),
        ("img/1.png,a", "img/1.png,", "line 3: the label is empty"),
        ("south,train", "south,valid", "line 3: the split is 'valid'; write train or test"),
        ("north", "", "line 2: the site is empty"),
        ("img/1.png", "img/9.png", "line 3: no file 'img/9.png' in the folder of the manifest"),
        ("img/1.png", "../secret.png", "line 3: no file '../secret.png'"),
        ("img/2.png", "img/0.png", "line 4: 'img/0.png' is listed twice"),
    ],
)
def test_manifests_that_are_refused(before: str, after: str, line: str, tmp_path: Path) -> None:
    write(tmp_path / "secret.png")
    for i in range(3):
        write(tmp_path / "data" / "img" / f"{i}.png")
    (tmp_path / "data" / "manifest.csv").write_text(MANIFEST.replace(before, after))
    with pytest.raises(DataError) as error:
        load(str(tmp_path / "data"), tmp_path)
    assert line in str(error.value)


def test_sixteen_bits_are_kept(tmp_path: Path) -> None:
    for name, value in (("a", 1000), ("b", 1001)):
        for i in range(4):
            write(tmp_path / "scans" / name / f"{i}.png", value, deep=True)
    source = load(str(tmp_path / "scans"), tmp_path)
    assert source.train.x.dtype == torch.uint16
    x = source.train.inputs(torch.arange(len(source.train)), torch.float64)
    assert torch.equal((x[:, 0, 0, 0] * 65535).round().long(), 1000 + source.train.labels)
    assert int(load(str(tmp_path / "scans"), tmp_path, image_size=8).train.x[0, 0, 0, 0]) == 1000
    write(tmp_path / "scans" / "b" / "flat.png", 7)
    with pytest.raises(DataError, match=r"flat.png differ: one has 8 bits per pixel and one 16"):
        load(str(tmp_path / "scans"), tmp_path)


def test_a_model_of_sixteen_bits_reads_its_kind_of_images(tmp_path: Path) -> None:
    for name, value in (("a", 2000), ("b", 3000)):
        for i in range(6):
            write(tmp_path / "scans" / name / f"{i}.png", value + i, deep=True)
    data = {"source": str(tmp_path / "scans"), "clients": 2, "partition": "iid", "normalise": True}
    method = {"name": "fedavg", "lr": 0.5}
    folder = run({"rounds": 3, "data": data, "net": {"name": "linear"}, "method": method}, tmp_path / "run")
    model = load_model(export(folder.path, tmp_path / "model"))
    found = predict_file(tmp_path / "scans", model)
    assert [prediction.label for prediction in found] == ["a"] * 6 + ["b"] * 6
    titles, first, *_ = as_csv(found, model.class_names).splitlines()
    assert titles == "name,label,probability,runner_up,runner_up_probability,p(a),p(b)"
    assert first.startswith("a/0.png,a,") and first.count(",") == 6
    write(tmp_path / "flat.png")
    with pytest.raises(DataError, match="its mode is L, but it must have 16 bits"):
        predict_file(tmp_path / "flat.png", model)


def test_floats_are_refused_by_training_and_prediction(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / "scans" / name / "0.png", 7)
    floats = tmp_path / "scans" / "a" / "1.tif"
    Image.fromarray(np.full((4, 6), 0.5, np.float32)).save(floats)
    with pytest.raises(DataError, match=r"1.tif cannot be read as an image \(its pixels are floats; convert"):
        load(str(tmp_path / "scans"), tmp_path)
    with pytest.raises(DataError, match=r"1.tif cannot be read as an image \(its pixels are floats"):
        images.open_image(floats, lambda image: images.pixels(image, "L", (6, 4), False))


def test_a_palette_with_transparency_prints_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    for name in "ab":
        write(tmp_path / "icons" / name / "0.png", 7)
        image = Image.open(tmp_path / "icons" / name / "0.png").convert("P")
        image.save(tmp_path / "icons" / name / "0.png", transparency=bytes([0, 128]))
    assert load(str(tmp_path / "icons"), tmp_path).train.x.shape[1] == 3
    assert not recwarn.list


def test_a_photo_taken_with_the_camera_turned_is_turned_back(tmp_path: Path) -> None:
    """Orientation 6 of EXIF: the first column of the file is the top of the scene. So bright comes out above."""
    exif = Image.Exif()
    exif[0x0112] = 6
    bright_at_left = np.repeat([250, 0], 8).astype(np.uint8)[None].repeat(8, 0)
    for name in "ab":
        for i in range(2):
            (tmp_path / "phone" / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(bright_at_left).save(tmp_path / "phone" / name / f"{i}.jpg", exif=exif, quality=95)
    photo = load(str(tmp_path / "phone"), tmp_path).train.x[0, 0]
    assert photo.shape == (16, 8)
    assert photo[:8].min() > 200
    assert photo[8:].max() < 50


def test_a_letterbox_keeps_proportions(tmp_path: Path) -> None:
    for name in "ab":
        for i in range(2):
            write(tmp_path / "wide" / name / f"{i}.png", 200, size=(8, 2))
    boxed = load(str(tmp_path / "wide"), tmp_path, image_size=8, letterbox=True).train.x[0, 0]
    assert boxed.unique().tolist() == [0, 200]
    assert boxed[:, 0].nonzero().flatten().tolist() == [3, 4]  # two rows in the middle
    stretched = load(str(tmp_path / "wide"), tmp_path, image_size=8).train.x[0, 0]
    assert stretched.unique().tolist() == [200]
    with pytest.raises(ConfigError, match="letterbox keeps the proportions of resized images; give their new size"):
        load(str(tmp_path / "wide"), tmp_path, letterbox=True)


def test_normalised_channels(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (40, 5, 5, 3), dtype=np.uint8) // np.array([1, 2, 4], np.uint8)
    np.savez(tmp_path / "x.npz", x=x, y=np.arange(40) % 2, test=np.arange(40) >= 30)
    options = DataOptions(source=str(tmp_path / "x.npz"), clients=2, normalise=True, partition="iid")
    federation = prepare(options, 0, tmp_path)
    inputs = federation.train.inputs(torch.arange(30), torch.float64)
    assert torch.allclose(inputs.mean(dim=(0, 2, 3)), torch.zeros(3, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(inputs.std(dim=(0, 2, 3), correction=0), torch.ones(3, dtype=torch.float64))
    assert federation.test.pixels == federation.train.pixels
    np.savez(tmp_path / "v.npz", x=np.zeros((8, 3), np.float32), y=np.arange(8) % 2)
    with pytest.raises(ConfigError, match="normalise is for images, but v holds vectors"):
        prepare(DataOptions(source=str(tmp_path / "v.npz"), clients=2, normalise=True), 0, tmp_path)


@pytest.mark.parametrize("options", [{"validation": 5, "auxiliary": 3}, {"head_cap": 10}, {"alone": "0"}])
def test_only_pixels_of_clients_count_for_normalising(options: dict[str, Any], tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (60, 3, 3), dtype=np.uint8)
    arrays = {"y": np.arange(60) % 2, "client": np.arange(60) // 2 % 2, "test": np.arange(60) >= 50}
    found = []
    for _ in range(2):
        np.savez(tmp_path / "x.npz", x=x, **arrays)
        data = DataOptions(source=str(tmp_path / "x.npz"), partition="natural", normalise=True, **options)
        federation = prepare(data, 0, tmp_path)
        found.append(federation.train.pixels)
        x[np.setdiff1d(np.arange(60), federation.train.rows[np.concatenate(federation.parts)])] = 255
    assert found[0] == found[1]
    others = (federation.test, federation.validation, federation.auxiliary)
    assert {examples.pixels for examples in others if examples is not None} == {found[0]}


def test_other_descriptions_stay_as_they_are() -> None:
    assert not {"letterbox", "normalise"} & DataOptions().model_dump().keys()
    assert DataOptions(normalise=True).model_dump()["normalise"] is True
