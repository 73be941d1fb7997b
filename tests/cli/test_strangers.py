"""Files of strangers run no code, write nowhere but in their place, and say nothing to the terminal."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import redgrape as rg
from forgery import vouch_for
from redgrape.cli import main as cli
from redgrape.reading.page.serve import ADDRESS
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import RunFolder
from redgrape.runs.run import Run

Values = Callable[..., dict[str, Any]]
Tally = Callable[..., None]
CANARY = "REDGRAPE_TEST_CANARY"
NAMES = [
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x9b31m",
    "\u202egnp.exe",
    "[/bold]",
    "[link=http://evil.example]x[/link]",
    "$\\frac{1}{$",
    "=HYPERLINK(1)",
    "<script>alert(1)</script>",
    "a\rb\nc\td\x00e",
    "{x}",
    "%s%n",
]


class Evil:
    """Whoever unpickles it makes the canary."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch ${CANARY}",)


@pytest.fixture(autouse=True)
def canary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file that appears where code of a stranger runs."""
    path = tmp_path_factory.mktemp("canary") / "sang"
    monkeypatch.setenv(CANARY, str(path))
    pickle.loads(pickle.dumps(Evil()))
    assert path.exists()  # the test can fail
    path.unlink()
    yield path
    assert not path.exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny: Values) -> Path:
    folder = RunFolder.create(tmp_path_factory.mktemp("runs") / "finished", Experiment.parse(tiny()))
    for _ in Run(folder, workers=1).steps():
        pass
    return folder.path


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="module")
def exported(finished: Path) -> Path:
    out = finished.parent / "model"
    assert cli.run(["export", str(finished), str(out), "--json"]) == 0
    return out


@pytest.fixture
def model(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "model", ignore=shutil.ignore_patterns("SHA256SUMS")))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> SimpleNamespace:
        capsys.readouterr()
        code = cli.run([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return call


def refused(outcome: SimpleNamespace, *codes: int) -> str:
    assert outcome.code in (codes or (2, 65, 74)), outcome
    assert len(outcome.err.splitlines()) == 1, outcome.err
    assert outcome.err.startswith("redgrape: ")
    line: str = outcome.err
    return line


# Code in data


def forged(folder: Path, name: str, data: bytes) -> None:
    """Put another file into the newest checkpoint, with a manifest that vouches for it."""
    for checkpoint in (folder / "checkpoints").iterdir():
        (checkpoint / name).write_bytes(data)
        path = checkpoint / "manifest.json"
        manifest = json.loads(path.read_bytes())
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        path.write_text(json.dumps(manifest))


def safetensors_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


F4 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
ABSURD = {
    "a pickle": pickle.dumps(Evil()),
    "nothing": b"",
    "a header of 2^63 bytes": safetensors_of({}, length=2**63 - 1),
    "a header of 101 MB": safetensors_of({}, length=101_000_000),
    "a header that is no JSON": safetensors_of(b"\xff" * 40),
    "a header nested deeply": safetensors_of(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "a shape beyond the data": safetensors_of({"a": {**F4, "shape": [2**40]}}, b"1234"),
    "a shape that overflows": safetensors_of({"a": {**F4, "shape": [2**63, 2**63]}}, b"1234"),
    "a negative shape": safetensors_of({"a": {**F4, "shape": [-1]}}, b"1234"),
    "overlapping tensors": safetensors_of({"a": F4, "b": F4}, b"1234"),
    "an unknown type": safetensors_of({"a": {**F4, "dtype": "PYOBJECT"}}, b"1234"),
    "offsets outside": safetensors_of({"a": {**F4, "data_offsets": [100, 104]}}, b"1234"),
    "a tensor inside a tensor": safetensors.torch.save({"model": torch.zeros(1), "model/x": torch.zeros(1)}),
    "other tensors": safetensors.torch.save({"../../../etc/passwd": torch.zeros(1), "x" * 10_000: torch.zeros(1)}),
    "a model of another shape": safetensors.torch.save({"model/classifier.weight": torch.zeros(7, 7)}),
}


@pytest.mark.parametrize("kind", ABSURD)
def test_a_malicious_checkpoint(copied: Path, command: Any, kind: str, tmp_path: Path) -> None:
    """With a manifest that vouches for it: refused in one line by whoever reads it."""
    forged(copied, "server.safetensors", ABSURD[kind])
    (copied / "summary.json").unlink()
    refused(command("resume", copied, "--workers", 1), 74)
    refused(command("resume", copied, "--workers", 1, "--rounds", 5), 74)
    refused(command("export", copied, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def clients_index(**changes: Any) -> bytes:
    index = {
        "num_clients": torch.tensor(3),
        "client": torch.tensor([0]),
        "file": torch.tensor([1]),
        "offset": torch.tensor([0]),
        "bytes": torch.tensor([4]),
        "sha256": torch.zeros(1, 32, dtype=torch.uint8),
    }
    return safetensors.torch.save({**index, **changes})


@pytest.mark.parametrize(
    "data",
    [
        *(ABSURD[kind] for kind in ("a pickle", "a tensor inside a tensor", "other tensors")),
        clients_index(),
        clients_index(num_clients=torch.tensor(2**60)),
        clients_index(num_clients=torch.tensor(-1)),
        clients_index(num_clients=torch.zeros(3)),
        clients_index(client=torch.tensor([2**40])),
        clients_index(client=torch.tensor([-5])),
        clients_index(file=torch.tensor([-1])),
        clients_index(file=torch.tensor([2**62])),
        clients_index(offset=torch.tensor([-1])),
        clients_index(bytes=torch.tensor([2**62])),
        clients_index(bytes=torch.tensor([-1])),
        clients_index(sha256=torch.zeros(1)),
        clients_index(file=torch.tensor([0.5])),
    ],
)
def test_a_malicious_index_of_client_states(copied: Path, command: Any, data: bytes) -> None:
    forged(copied, "clients.safetensors", data)
    refused(command("resume", copied, "--workers", 1, "--rounds", 5), 74)


@pytest.mark.parametrize("kind", [kind for kind in ABSURD if kind != "nothing"])
def test_malicious_weights(model: Path, vectors: Path, command: Any, tiny: Values, kind: str, tmp_path: Path) -> None:
    """In a model folder whose model.json vouches for them, and as initial weights."""
    (model / "model.safetensors").write_bytes(ABSURD[kind])
    card = json.loads((model / "model.json").read_bytes())
    card["weights"]["sha256"] = hashlib.sha256(ABSURD[kind]).hexdigest()
    (model / "model.json").write_text(json.dumps(card))
    refused(command("predict", model, vectors), 65)
    refused(command("evaluate", model, vectors), 65)
    (tmp_path / "w.safetensors").write_bytes(ABSURD[kind])
    (tmp_path / "e.toml").write_text(Experiment.parse(tiny(net__weights=str(tmp_path / "w.safetensors"))).to_toml())
    refused(command("run", tmp_path / "e.toml", "--workers", 1, "--out", tmp_path / "new"), 65)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"net": "../../evil"},
        {"net": "linear", "input": {"shape": [10**6, 10**6], "dtype": "float", "pixels": None}},
        {"net": "cnn", "input": {"shape": [3, 10**5, 10**5], "dtype": "uint8", "pixels": None}},
        {"input": {"shape": [], "dtype": "float", "pixels": None}},
        {"input": {"shape": [2**62, 2**62], "dtype": "float", "pixels": None}},
        {"class_names": ["a"] * 100_000},
        {"weights": {"format": "../model", "sha256": ""}},
        {"weights": {"format": "pickle", "sha256": ""}},
        {"dtype": "os.system"},
        {"format": 99},
    ],
)
def test_a_malicious_model_card(model: Path, vectors: Path, command: Any, change: dict[str, Any]) -> None:
    """It can ask for no file but its own, no code, and no more memory than its weights take."""
    path = model / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}))
    refused(command("predict", model, vectors), 2, 65)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"\xff\xfe", b"", b"null", b"NaN"]
)
@pytest.mark.parametrize("name", ["environment.json", "summary.json", "metrics.jsonl", "SHA256SUMS", "lock"])
def test_malicious_json(copied: Path, command: Any, name: str, content: bytes) -> None:
    """Nested deeply, or not what it should be: one line, or the run does without."""
    (copied / name).write_bytes(content + b"\n")
    for arguments in (["show", copied], ["resume", copied, "--workers", 1, "--quiet"], ["report", copied]):
        outcome = command(*arguments)
        assert "Traceback" not in outcome.err
        if outcome.code:
            refused(outcome, 74)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", ["x", "y", "client", "class_names", "test", "x_test"])
def test_objects_in_an_npz_are_not_unpickled(
    command: Any, tiny: Values, model: Path, name: str, compressed: bool, tmp_path: Path
) -> None:
    arrays: dict[str, Any] = {"x": np.zeros((20, 5), np.float32), "y": np.arange(20) % 4}
    if name == "x_test":
        arrays["y_test"] = np.zeros(20, int)
    arrays[name] = np.array([Evil() for _ in range(20)], dtype=object)
    (np.savez_compressed if compressed else np.savez)(tmp_path / "evil.npz", **arrays)
    (tmp_path / "e.toml").write_text(Experiment.parse(tiny(data__source=str(tmp_path / "evil.npz"))).to_toml())
    refused(command("run", tmp_path / "e.toml", "--workers", 1, "--out", tmp_path / "new"), 65)
    assert not (tmp_path / "new").exists()
    if name in {"x", "y"}:
        refused(command("evaluate", model, tmp_path / "evil.npz"), 65)


def test_names_in_an_archive_lead_nowhere(
    command: Any, tiny: Values, model: Path, vectors: Path, tmp_path: Path
) -> None:
    """Nothing is unpacked: members that are called `../x` or `/x` are arrays of odd names, which a run refuses."""
    inner = tmp_path / "inner"
    inner.mkdir()
    shutil.copy(vectors, inner / "own.npz")
    with zipfile.ZipFile(inner / "own.npz", "a") as archive:
        for name in ("../evil.npy", "/tmp/evil.npy", "..\\evil.npy", "a/../../evil"):
            archive.writestr(name, b"evil")
    (tmp_path / "e.toml").write_text(Experiment.parse(tiny(data__source=str(inner / "own.npz"))).to_toml())
    refused(command("run", tmp_path / "e.toml", "--workers", 1, "--quiet", "--out", tmp_path / "new"), 65)
    assert command("predict", model, inner / "own.npz").code == 0
    assert not [path for path in (*tmp_path.rglob("*"), *Path("/tmp").glob("*")) if "evil" in path.name]


def test_an_array_that_unpacks_to_more_than_memory(command: Any, tiny: Values, tmp_path: Path) -> None:
    """Declared as 40 GB: refused before a byte of it is unpacked."""
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, x=np.zeros((1000, 100), np.float32), y=np.zeros(1000, int))
    content = bytearray(path.read_bytes())
    place = content.index(b"PK\x01\x02")  # the first member of the central directory; at 24 its size unpacked
    content[place + 24 : place + 28] = struct.pack("<I", 0xFFFFFFF0)
    path.write_bytes(content)
    (tmp_path / "e.toml").write_text(Experiment.parse(tiny(data__source=str(path))).to_toml())
    assert "unpacks to 3 GB" in refused(command("run", tmp_path / "e.toml", "--workers", 1), 65)


# Images


def png(width: int, height: int) -> bytes:
    """The beginning of a picture of this size, with nothing in it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(x) (w) file closefile showpage\n%%EOF\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (png(60_000, 60_000), "decompression bomb"),
        (png(10_000, 10_000), "decompression bomb"),
        (POSTSCRIPT, "cannot identify image file"),
        (pickle.dumps(Evil()), "cannot identify image file"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'><script/></svg>", "cannot identify image file"),
        (b"", "cannot identify image file"),
    ],
)
def test_malicious_images(command: Any, content: bytes, words: str, tmp_path: Path) -> None:
    """Only plain picture formats are decoded, whatever a file calls itself, and none that is absurdly large."""
    pytest.importorskip("PIL")
    from PIL import Image

    for name in ("a", "b"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (8, 8)).save(tmp_path / "pictures" / name / f"{i}.png")
    (tmp_path / "pictures" / "a" / "9.png").write_bytes(content)
    arguments = ["--data", tmp_path / "pictures", "--net", "linear", "--clients", 2, "--data-root", tmp_path / "cache"]
    assert words in refused(command("run", *arguments, "--workers", 1), 65)
    assert not (tmp_path / "runs").exists()


# Places


@pytest.mark.parametrize(
    "name",
    [
        "lock",
        "metrics.jsonl",
        "times.jsonl",
        "summary.json",
        "environment.json",
        ".experiment.toml.tmp",
        ".SHA256SUMS.tmp",
        ".summary.json.tmp",
        "checkpoints",
        "clients",
        "checkpoints/round-000009",
        "checkpoints/.round-000003.tmp",
        "clients/000009.states",
    ],
)
@pytest.mark.parametrize("dangling", [False, True])
def test_links_in_a_run_folder_lead_nowhere(
    copied: Path, command: Any, name: str, dangling: bool, tmp_path: Path
) -> None:
    """A run folder of a stranger cannot make redgrape write, empty or remove what lies elsewhere."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    path = copied / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(outside / "nothing" if dangling else outside if "." not in path.name else outside / "precious")
    for arguments in (["resume", copied], ["resume", copied, "--rounds", 4]):
        line = refused(command(*arguments, "--workers", 1), 74)
        assert "is a link or a special file" in line
    refused(command("export", copied, tmp_path / "out"), 74)
    assert {p.name: p.read_text() for p in outside.iterdir()} == {"precious": "precious"}


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "environment.json", "experiment.toml", "lock"])
def test_pipes_are_not_waited_for(copied: Path, command: Any, name: str) -> None:
    (copied / name).unlink()
    os.mkfifo(copied / name)
    for arguments in (["show", copied], ["report", copied], ["resume", copied, "--workers", 1], ["ls", copied.parent]):
        outcome = command(*arguments)
        assert name == "lock" or outcome.code in (0, 74), outcome
        assert "Traceback" not in outcome.err


def test_readers_load_no_method(copied: Path, command: Any, canary: Path) -> None:
    """A method's file is code. Who only looks at a run does not run it."""
    evil = copied.parent / "evil.py"
    evil.write_text(f"import os\nopen(os.environ['{CANARY}'], 'w').close()\n")
    path = copied / "experiment.toml"
    path.write_text(re.sub(r'name = ".*remembering.py"', f'name = "{evil}"', path.read_text()))
    assert str(evil) in path.read_text()
    vouch_for(copied)
    for arguments in (["ls", copied.parent], ["show", copied], ["report", copied], ["privacy", copied]):
        assert command(*arguments).code == 0
    assert not canary.exists()


# Names


def check_clean(outcome: SimpleNamespace) -> None:
    text = outcome.out + outcome.err
    assert not [c for c in text if not c.isprintable() and c != "\n"], text


def test_names_say_nothing_to_the_terminal(command: Any, tmp_path: Path) -> None:
    """Class names, folders and method files with escapes, markup and formulas, through every command that prints."""
    n, names = 12 * len(NAMES), np.array(NAMES)
    y = np.arange(n) % len(NAMES)
    x = np.random.default_rng(0).normal(size=(n, 5)).astype(np.float32)
    np.savez(tmp_path / "own.npz", x=x, y=y, class_names=names)
    method = tmp_path / "evil\x1b[31m.py"
    method.write_text("from redgrape.methods.fedavg import FedAvg\n\n\nclass Mine(FedAvg):\n    '''\x1b[31mx'''\n")
    run, bad = tmp_path / "runs" / "run\x1b[31m\u202e", tmp_path / "no\x1b[31m"
    common = ["--data", tmp_path / "own.npz", "--net", "linear", "--clients", 2, "--rounds", 1, "--epochs", 1]
    for code, arguments in [
        (0, ["data", "show", *common, "--out", tmp_path / "f\x1b[31m.png"]),
        (0, ["run", *common, "--method", method, "--out", run, "--workers", 1]),
        (0, ["run", *common, "--method", method, "--dry-run", "--out", run]),
        (2, ["run", *common, "--method", method, "--out", run, "--workers", 1]),
        (0, ["resume", run, "--workers", 1]),
        (0, ["show", run]),
        (0, ["ls", tmp_path / "runs"]),
        (0, ["report", run, "--out", tmp_path / "r\x1b.html"]),
        (0, ["methods", method]),
        (0, ["compare", method, "fedavg", *common, "--workers", 1, "--out", tmp_path / "c\x1b[31m"]),
        (0, ["export", run, tmp_path / "model\x1b[31m"]),
        (0, ["evaluate", tmp_path / "model\x1b[31m", tmp_path / "own.npz"]),
        (0, ["predict", tmp_path / "model\x1b[31m", tmp_path / "own.npz"]),
        (74, ["resume", bad]),
        (74, ["show", bad]),
        (74, ["ls", bad]),
        (65, ["predict", bad, bad]),
        (2, ["run", bad]),
        (2, ["run", "--method", "\x1b[31m"]),
        (2, ["run", "-c", "\x1b[31m=3"]),
        (2, ["run", "-c", "data.ir='\x1b[31m'"]),
        (2, ["\x1b[31m"]),
    ]:
        outcome = command(*arguments)
        assert outcome.code == code, (arguments, outcome)
        check_clean(outcome)
    page = (tmp_path / "r\x1b.html").read_text()
    assert "<script>alert" not in page
    assert "\x1b" not in page


def test_damaged_runs_are_told_of_cleanly(copied: Path, command: Any) -> None:
    """Also where the damage is an escape."""
    (copied / "SHA256SUMS").unlink()
    for name in ("experiment.toml", "environment.json", "metrics.jsonl", "summary.json", "lock"):
        whole = (copied / name).read_bytes()
        (copied / name).write_bytes(b'{"\x1b[31m": "\xc2\x9b", \x1b]0;x\x07\n')
        for arguments in (["ls", copied.parent], ["show", copied], ["resume", copied, "--workers", 1, "--quiet"]):
            check_clean(command(*arguments))
        (copied / name).write_bytes(whole)


# The source


FORBIDDEN = re.compile(
    r"pickle\.load|(?<!safetensors\.)torch\.load\b|allow_pickle=True|yaml\.|(?<![.\w])(?:eval|exec)\(|shell=True|verify=False|0\.0\.0\.0|"
    r"extractall|os\.system|\bmarshal\b|\bshelve\b|joblib|\bdill\b"
)


def test_the_source_has_nothing_that_runs_data() -> None:
    """Two lines may: one reads the weights of the pretrained encoder, a file with a known digest of which torch takes
    tensors alone, and one reads what it has just written."""
    known = ("torch.load(path, weights_only=True)  # a known file", "# pickled in this line")
    source = Path(rg.__file__).parent
    found = [
        f"{path.name}: {line.strip()}"
        for path in source.rglob("*.py")
        for line in path.read_text().splitlines()
        if FORBIDDEN.search(line) and not any(words in line for words in known)
    ]
    assert found == []
    assert ADDRESS == "127.0.0.1"
