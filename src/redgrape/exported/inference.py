"""Apply a model to new data: read files, predict classes, and evaluate if labels are known."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from redgrape.data import images, user_data
from redgrape.data.columns import Columns
from redgrape.data.examples import Examples
from redgrape.data.federation import Groups
from redgrape.data.table import Table, is_table, listed, not_read, read
from redgrape.errors import DataError
from redgrape.exported.model import Model
from redgrape.learning import evaluation, sums
from redgrape.learning.calibration import Calibration
from redgrape.learning.sums import BATCH
from redgrape.reading.judged import FEW
from redgrape.runs import durable
from redgrape.tree import Tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Sites = NDArray[np.str_]


@dataclass(frozen=True)
class Prediction:
    """The predicted class of an example, the runner-up, and the probability of every class."""

    name: str
    label: str
    probability: float
    runner_up: str
    runner_up_probability: float
    probabilities: dict[str, float]


def predict_file(path: Path, model: Model) -> list[Prediction]:
    """Predict an image, each image in a folder, each row of `x` in an .npz file, or each row of a table."""
    inputs, names = read_inputs(path, model)
    z = model.scaled_logits(inputs)
    order = model.judged(z).argsort(dim=1, descending=True, stable=True)[:, :2]
    known = model.class_names
    return [
        Prediction(name, known[a], p[a], known[b], p[b], dict(zip(known, p, strict=True)))
        for name, (a, b), p in zip(names, order.tolist(), z.softmax(dim=1).tolist(), strict=True)
    ]


def as_csv(predictions: Sequence[Prediction], class_names: Sequence[str]) -> str:
    """A line of titles, and a line for each prediction. The last columns are the probabilities of all classes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = [field.name for field in fields(Prediction) if field.name != "probabilities"]
    writer.writerow([*columns, *(f"p({name})" for name in class_names)])
    for prediction in predictions:
        *first, probabilities = astuple(prediction)
        writer.writerow([*first, *probabilities.values()])
    return text.getvalue()


def read_inputs(path: Path, model: Model) -> tuple[Any, list[str]]:
    """Unlabelled inputs and their names: an image, a folder of images with or without sub-folders, `x` in an .npz file,
    or the rows of a table, counted from 1. Images are converted to the size and colours of the model."""
    _check_exists(path, "an image, a folder of images, an .npz file with `x` or a table")
    if path.is_dir():
        with durable.storage_errors("read", path):
            files = sorted(file for file in path.rglob("*") if _is_image(file.relative_to(path)) and file.is_file())
        if not files:
            raise DataError(f"'{path}' holds no images ({' '.join(sorted(images.SUFFIXES))})")
        return _decoded(files, model), [file.relative_to(path).as_posix() for file in files]
    if is_table(path.name):
        rows = read(path)
        return _columns_of(model, path).inputs(rows), [str(row + 1) for row in range(len(rows))]
    if path.suffix == ".npz":
        x = user_data.as_inputs(user_data.Arrays(path)["x"], f"{path}: x")
        return x, [str(row) for row in range(len(x))]
    _refuse_unread(path)
    return _decoded([path], model), [path.name]


def read_labelled(path: Path, model: Model) -> Examples:
    """Labelled examples: a folder of images or a manifest, as for training, an .npz file with `x` and `y`, or a table
    with the columns of the training data. If the data names a test set (`test/`, `x_test`, rows marked `test`), only
    that is read."""
    _check_exists(path, "a folder of images, a manifest.csv, an .npz file with `x` and `y`, or a table")
    if is_table(path.name) and path.is_file():
        return _labelled_table(path, model)
    _refuse_unread(path)
    return _labelled_images(path, model) if _lists_images(path) else _labelled_npz(path, model)


def _check_exists(path: Path, instead: str) -> None:
    with durable.storage_errors("read", path):
        if not path.exists():
            raise DataError(f"'{path}' does not exist; pass {instead}")


def _lists_images(path: Path) -> bool:
    return path.is_dir() or images.is_manifest(path)


def _listed(path: Path, model: Model) -> list[images.Listed]:
    with durable.storage_errors("read", path):
        return images.for_evaluation(path, is_split="test" not in model.class_names)


def _refuse_unread(path: Path) -> None:
    if path.is_file() and (advice := not_read(str(path))):
        raise DataError(advice)


def names_test_set(path: Path, model: Model) -> bool:
    """Whether the data names a test set. If not, all of it is used, even examples that the model was trained on."""
    if is_table(path.name) and path.is_file():
        return _names_test_rows(_columns_of(model, path), read(path))
    if _lists_images(path):
        return any(split == "test" for *_, split in _listed(path, model))
    arrays = user_data.Arrays(path)
    return "x_test" in arrays or "test" in arrays


def unknown_values(path: Path, model: Model) -> list[str]:
    """A note for each column of a table with categories that the model does not know: to it they are all zeros."""
    if not (path.is_file() and is_table(path.name)):
        return []
    rows, notes = read(path), []
    for column in _columns_of(model, path).columns:
        cells, known = rows[column.name], column.categories
        counts = dict(zip(cells.values, np.bincount(cells.codes, minlength=len(cells.values)).tolist(), strict=True))
        missing = counts.pop("", 0)
        strange = [] if known is None else sorted(counts.keys() - set(known))
        if known is not None and strange:
            notes.append(
                f"column '{column.name}': {sum(counts[value] for value in strange)} of {len(rows) - missing} values "
                f"are unknown to the model ({listed(strange)}); it knows {listed(known)}"
            )
    return notes


def _labelled_images(path: Path, model: Model) -> Examples:
    listed = _listed(path, model)
    if not listed:
        raise DataError(f"'{path}' has no sub-folders; put labelled images in one sub-folder per class")
    names, labels = np.unique([name for _, name, *_ in listed], return_inverse=True)
    numbers = torch.tensor(_class_numbers(names.tolist(), model, path))
    return Examples(_decoded([file for file, *_ in listed], model), numbers[labels])


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


def evaluate_model(model: Model, examples: Examples) -> dict[str, Any]:
    """Evaluate the model on examples whose labels are indices of its classes; `evaluation.detailed` has the figures. If
    the model is calibrated, they are those after, as it predicts, and `uncalibrated` has those before."""
    if len(examples) == 0:
        raise DataError("there are no examples to evaluate")
    C = len(model.class_names)
    examples = model.arranged(examples)
    examples.check(C, "evaluation data")

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for start in sums.batch_starts(examples):
            yield model.batch_logits(examples, start), examples.labels[start : start + BATCH]

    place = (Groups((), (), ()), model.class_names)
    found = evaluate_batches(batches(), *place)
    if model.calibration is None:
        return found
    before = {name: found[name] for name in BY_CALIBRATION}
    after = evaluate_calibrated(batches(), *place, model.calibration)
    return {**after, "calibration": model.card["calibration"], "uncalibrated": before}


BY_CALIBRATION = ("accuracy", "balanced", "macro_f1", "head", "middle", "tail", "nll", "brier", "ece", "reliability")


def evaluate_calibrated(
    batches: Iterable[tuple[Tensor, Tensor]], groups: Groups, class_names: Sequence[str], chosen: Calibration
) -> dict[str, Any]:
    scaled = ((chosen.scaled(z), y) for z, y in batches)
    return evaluate_batches(scaled, groups, class_names, offsets=chosen.offsets)


def evaluate_batches(
    batches: Iterable[tuple[Tensor, Tensor]],
    groups: Groups,
    class_names: Sequence[str],
    sites: Sites | None = None,
    offsets: Tensor | None = None,
) -> dict[str, Any]:
    """All figures from logits and labels, batch by batch; also those of each site if the `sites` of the examples are
    given. `offsets`: see `sums.of_logits`."""
    more: Tensors = {}

    def passed_on() -> Iterator[tuple[Tensor, Tensor]]:
        for z, y in batches:
            for name, t in sums.of_scores(z, y).items():
                more[name] = more[name].add_(t) if name in more else t
            yield z, y

    total = sums.of_logits(passed_on(), offsets)
    scores = evaluation.combine([total])
    found = {**evaluation.detailed(scores, more, groups, class_names), "confusion": scores.confusion_cells()}
    if sites is None:
        return found
    rows = evaluation.by_site(total["cells"], sites, groups, len(class_names))
    return {**found, "sites": rows, "worst_sites": evaluation.worst_sites(rows, FEW)}
