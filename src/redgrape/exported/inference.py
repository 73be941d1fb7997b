"""Apply a model to new data: read files, predict classes, and evaluate if labels are known."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redgrape.data import images, user_data
from redgrape.data.examples import Examples
from redgrape.data.federation import Groups
from redgrape.data.table import Columns, Table, is_table, read
from redgrape.errors import DataError
from redgrape.exported.model import Model
from redgrape.learning import evaluation, sums
from redgrape.learning.sums import BATCH
from redgrape.runs import durable
from redgrape.tree import Tensors


@dataclass(frozen=True)
class Prediction:
    """The predicted class of an example, and the runner-up."""

    name: str
    label: str
    probability: float
    runner_up: str
    runner_up_probability: float


def predict_file(path: Path, model: Model) -> list[Prediction]:
    """Predict an image, each image in a folder, each row of `x` in an .npz file, or each row of a table."""
    inputs, names = read_inputs(path, model)
    z = model.logits(inputs)
    p = z.softmax(dim=1)
    order = z.argsort(dim=1, descending=True, stable=True)
    return [
        Prediction(name, model.class_names[a], float(p[row, a]), model.class_names[b], float(p[row, b]))
        for row, (name, (a, b)) in enumerate(zip(names, order[:, :2].tolist(), strict=True))
    ]


def as_csv(predictions: Sequence[Prediction]) -> str:
    """A line of titles, and a line for each prediction."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Prediction)])
    writer.writerows(astuple(prediction) for prediction in predictions)
    return text.getvalue()


def read_inputs(path: Path, model: Model) -> tuple[Any, list[str]]:
    """Unlabelled inputs and their names: an image, a folder of images with or without sub-folders, `x` in an .npz file,
    or the rows of a table, counted from 1. Images are converted to the size and colours of the model."""
    if path.is_dir():
        with durable.storage_errors("read", path):
            files = sorted(file for file in path.rglob("*") if _is_image(file.relative_to(path)) and file.is_file())
        if not files:
            raise DataError(f"'{path}' holds no images ({' '.join(sorted(images.SUFFIXES))})")
        return _decoded(files, model), [file.relative_to(path).as_posix() for file in files]
    if not path.exists():
        raise DataError(f"'{path}' does not exist; pass an image, a folder of images, an .npz file with `x` or a table")
    if is_table(path.name):
        rows = read(path)
        return _columns_of(model, path).inputs(rows), [str(row + 1) for row in range(len(rows))]
    if path.suffix == ".npz":
        x = user_data.as_inputs(user_data.Arrays(path)["x"], f"{path}: x")
        return x, [str(row) for row in range(len(x))]
    return _decoded([path], model), [path.name]


def read_labelled(path: Path, model: Model) -> Examples:
    """Labelled examples, from a folder of images with one sub-folder per class, an .npz file with `x` and `y`, or a
    table with the columns of the training data. If the data names a test set, as for training (`test/`, `x_test`, rows
    marked `test`), only that is read."""
    if is_table(path.name) and path.is_file():
        return _labelled_table(path, model)
    return _labelled_folder(path, model) if path.is_dir() else _labelled_npz(path, model)


def names_test_set(path: Path, model: Model) -> bool:
    """Whether the data names a test set. If not, all of it is used, even examples that the model was trained on."""
    if path.is_dir():
        return (path / "test").is_dir()
    if is_table(path.name):
        return _names_test_rows(_columns_of(model, path), read(path))
    arrays = user_data.Arrays(path)
    return "x_test" in arrays or "test" in arrays


def _labelled_folder(path: Path, model: Model) -> Examples:
    with durable.storage_errors("read", path):
        folders = images.visible_folders(path)
        if {folder.name for folder in folders} == {"train", "test"} and "test" not in model.class_names:
            folders = images.visible_folders(path / "test")
        files, labels = [], []
        for folder, label in zip(folders, _class_numbers([f.name for f in folders], model, path), strict=True):
            found = images.images_of_class(folder, path)
            files += found
            labels += [label] * len(found)
    if not files:
        raise DataError(f"'{path}' has no sub-folders; put labelled images in one sub-folder per class")
    return Examples(_decoded(files, model), torch.tensor(labels))


def _labelled_npz(path: Path, model: Model) -> Examples:
    arrays = user_data.Arrays(path)
    suffix = "_test" if "x_test" in arrays else ""
    x = user_data.as_inputs(arrays[f"x{suffix}"], f"{path}: x{suffix}")
    (y,), names = user_data.labels_of(arrays, f"y{suffix}")
    if "class_names" in arrays or arrays[f"y{suffix}"].dtype.kind == "U":  # the file may use another class order
        y = np.array(_class_numbers(names, model, path), np.int64)[y]
    examples = model.arranged(Examples(x, y))
    return examples.take(user_data.rows_for_test(arrays, len(y))) if "test" in arrays else examples


def _columns_of(model: Model, path: Path) -> Columns:
    if model.columns is None:
        raise DataError(f"'{path}' is a table; the model takes {model.takes}")
    return model.columns


def _labelled_table(path: Path, model: Model) -> Examples:
    columns, rows = _columns_of(model, path), read(path)
    names, labels = rows.names(columns.label, "class")
    x: Any = columns.inputs(rows)
    examples = Examples(x, torch.tensor(_class_numbers(names, model, path))[labels])
    return examples.take(rows.test_rows(columns.test or "")) if _names_test_rows(columns, rows) else examples


def _names_test_rows(columns: Columns, rows: Table) -> bool:
    return columns.test is not None and rows.test_column(columns.test) in rows.columns


def _class_numbers(names: Sequence[str], model: Model, path: Path) -> list[int]:
    for name in names:
        if name not in model.class_names:
            known = ", ".join(model.class_names[:10]) + (", ..." if len(model.class_names) > 10 else "")
            raise DataError(f"'{path}' has a class '{name}' that the model does not know; its classes are {known}")
    return [model.class_names.index(name) for name in names]


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in images.SUFFIXES and not any(part.startswith(".") for part in path.parts)


def _decoded(files: Sequence[Path], model: Model) -> Any:
    """The images as [n, channels, height, width]. Images of another size are resized as for training."""
    if not model.takes_pixels or len(model.shape) != 3 or model.shape[0] not in (1, 3):
        raise DataError(f"'{files[0]}': the model takes {model.takes}, not images; pass an .npz file with `x`")
    c, h, w = model.shape

    mode: images.Mode = "16 bits" if model.dtype == "uint16" else "L" if c == 1 else "RGB"

    def pixels(image: Any) -> Any:
        return images.pixels(image, mode, (w, h), model.letterbox)

    return np.stack([images.open_image(file, pixels) for file in files])


def evaluate_model(model: Model, examples: Examples, groups: Groups | None = None) -> dict[str, Any]:
    """Evaluate the model on examples whose labels are indices of its classes; `evaluation.detailed` has the figures."""
    if len(examples) == 0:
        raise DataError("there are no examples to evaluate")
    C = len(model.class_names)
    examples = model.arranged(examples)
    examples.check(C, "evaluation data")
    batches = ((model.batch_logits(examples, s), examples.labels[s : s + BATCH]) for s in sums.batch_starts(examples))
    return evaluate_batches(batches, groups or Groups((), (), ()), model.class_names)


def evaluate_batches(
    batches: Iterable[tuple[Tensor, Tensor]], groups: Groups, class_names: Sequence[str]
) -> dict[str, Any]:
    """All figures from logits and labels, batch by batch."""
    more: Tensors = {}

    def passed_on() -> Iterator[tuple[Tensor, Tensor]]:
        for z, y in batches:
            for name, t in sums.of_scores(z, y).items():
                more[name] = more[name].add_(t) if name in more else t
            yield z, y

    scores = evaluation.combine([sums.of_logits(passed_on())])
    return {**evaluation.detailed(scores, more, groups, class_names), "confusion": scores.confusion_cells()}
