"""What an update must be like before the server takes it, whichever engine it came through.

A method describes its updates (`Method.update_like`): a tree with a tensor of the right shape and dtype under every
name, and `Rows` where the number of rows is the client's to say. Nothing is repaired and nothing broadcast: an update
that is not as described is refused, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redgrape import tree
from redgrape.tree import Tensors, Tree

MOST_EXAMPLES = 10**9  # that a client may claim where it has not declared how many it holds
LONGEST = 1e4  # times the model's own length: no group of an update is longer, unless training diverges
_SLACK = 1e-3  # of what a class gradient must be
_TINY = 1e-5  # for a class that is learnt to the last bit, whose gradient is rounding alone


class UpdateRejected(Exception):
    """An update that is not taken; the message is the reason."""


class NotFinite(UpdateRejected):
    """An update with NaN or infinity in it, as training that diverges gives."""


class TooLong(NotFinite):
    """An update beyond all measure, as training that is about to leave the finite numbers gives, or a liar."""


@dataclass(frozen=True)
class Declared:
    """What a client said of itself when it joined: its examples, how many it has of each class where it tells, and its
    name where it has one."""

    examples: int
    class_counts: Tensor | None = None
    name: str = ""


@dataclass(frozen=True)
class Rows:
    """One such row for each class that the group's `classes` name. `gradient`: it is the mean gradient of the
    cross-entropy of the class's examples; `signed`: with respect to features that are never negative."""

    row: Tensor
    gradient: bool = False
    signed: bool = False


def class_rows(
    classifier: Tree, *, counted: bool = False, gradients: bool = False, signed: bool = False
) -> dict[str, Any]:
    """The description of a group that holds a tensor like each of the classifier's for some classes: their numbers as
    `classes`, and the examples behind each as `counts` where they are `counted`. `gradients`: each is the mean gradient
    of the cross-entropy of the class's examples, and must look like one; `signed`: also by the signs of its weights,
    since features are never negative (`features.never_negative`)."""
    number = Rows(torch.zeros((), dtype=torch.int64))
    rows = {"classes": number, **_rows(classifier, gradients, signed)}
    return rows | ({"counts": number} if counted else {})


def _rows(group: Tree, gradients: bool, signed: bool) -> dict[str, Any]:
    return {
        n: _rows(t, gradients, signed) if isinstance(t, Mapping) else Rows(t, gradients, signed)
        for n, t in group.items()
    }


def check(update: Any, like: Tree, declared: Declared | None, num_classes: int, *, exact: bool) -> None:
    """Raise UpdateRejected where the update is not as described. Names beyond the description are refused where it is
    `exact`; else they need only be finite, and a group of the description may be missing as a whole."""
    flat = named_tensors(update)
    expected = _flat(like)
    groups = {name.partition("/")[0] for name in flat}
    for name, wanted in expected.items():
        if name in flat:
            _check_kind(name, flat[name], wanted)
        elif exact or name.partition("/")[0] in groups:
            raise UpdateRejected(f"tensor '{name}' is missing")
    described = {name.partition("/")[0] for name in expected}
    for name in flat:
        if name not in expected and (exact or name.partition("/")[0] in described):
            raise UpdateRejected(f"tensor '{name}' is not part of this update")
    check_finite(flat)
    if "count" in flat:
        _check_count(flat["count"], declared)
    for name, t in flat.items():
        if name.startswith("buffers/") and name.endswith("running_var") and (t < 0).any():
            raise UpdateRejected(f"tensor '{name}' is negative")
    for name, wanted in expected.items():
        if isinstance(wanted, Rows) and name.endswith("/classes") and name in flat:
            _check_classes(flat, name.removesuffix("classes"), expected, declared, num_classes)


def check_survey(answer: Any, like: Tree, examples: int, *, exact: bool, of_sum: bool = False) -> None:
    """Raise UpdateRejected where a client's answer to a survey is not as described (`Method.survey_like`): what is
    described as whole numbers counts examples, of which the client has so many. Names beyond the description are
    refused where it is `exact`. `of_sum`: the answer is the sum over all clients, whose real numbers may be wider."""
    if not exact and answer == {}:
        return
    flat = named_tensors(answer)
    for name, wanted in like.items():
        if name not in flat:
            raise UpdateRejected(f"tensor '{name}' is missing")
        wider = of_sum and wanted.is_floating_point() and flat[name].is_floating_point()
        _check_kind(name, flat[name], wanted.to(flat[name].dtype) if wider else wanted)
    if exact and (others := flat.keys() - like.keys()):
        raise UpdateRejected(f"tensor '{min(others)}' is not part of this answer")
    check_finite(flat)
    for name, wanted in like.items():
        if wanted.is_floating_point() or wanted.dtype == torch.bool:
            continue
        counts = flat[name]
        if (counts < 0).any() or (counts > examples).any() or int(counts.sum()) > examples:
            raise UpdateRejected(f"'{name}' must count examples, of which there are {examples} at most")
        if of_sum and not counts.any():
            raise UpdateRejected(f"'{name}' counts no example at all")


def check_length(update: Tree, model: Tensors) -> None:
    """Raise TooLong where a group of the update is longer than training could make it. Running statistics have no
    length that means anything."""
    own = max(1.0, _length(model))
    for group, value in update.items():
        if group != "buffers" and (found := _length({group: value})) > LONGEST * own:
            raise TooLong(f"'{group}' has the length {found:.3g}, over {LONGEST:g} times that of the model, {own:.3g}")


def _length(group: Tree) -> float:
    lengths = []
    for value in group.values():
        if isinstance(value, Mapping):
            lengths.append(_length(value))
        elif value.is_floating_point():
            lengths.append(float(torch.linalg.vector_norm(value)))
    return math.hypot(*lengths)


def named_tensors(update: Any) -> Tensors:
    """The update's tensors by their joined names; UpdateRejected where it is anything else than named tensors."""
    if not isinstance(update, Mapping):
        raise UpdateRejected(f"the update is a {type(update).__name__}, not named tensors")
    try:
        tree.check_leaves(update, "update")
        flat = tree.flatten(update)
    except TypeError as error:
        raise UpdateRejected(str(error)) from error
    except RecursionError as error:
        raise UpdateRejected("the update is nested too deeply") from error
    if not flat:
        raise UpdateRejected("the update is empty")
    for name, t in flat.items():
        if t.layout != torch.strided or t.device.type != "cpu" or t.is_complex() or t.is_quantized:
            raise UpdateRejected(f"tensor '{name}' is no plain tensor of real numbers in memory")
    return flat


def check_finite(flat: Tensors) -> None:
    if name := first_not_finite(flat):
        raise NotFinite(f"tensor '{name}' is not finite")


def first_not_finite(flat: Tensors) -> str | None:
    for name, t in flat.items():
        # The sum is finite in nearly every case, and far cheaper than a look at each number.
        if t.is_floating_point() and not math.isfinite(t.sum()) and not torch.isfinite(t).all():
            return name
    return None


def _flat(like: Tree, prefix: str = "") -> dict[str, Tensor | Rows]:
    flat: dict[str, Tensor | Rows] = {}
    for name, value in like.items():
        flat |= _flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _check_kind(name: str, t: Tensor, wanted: Tensor | Rows) -> None:
    row = wanted.row if isinstance(wanted, Rows) else wanted
    if t.dtype != row.dtype:
        raise UpdateRejected(f"tensor '{name}' is {t.dtype}; it must be {row.dtype}")
    if isinstance(wanted, Rows):
        if t.dim() == 0 or t.shape[1:] != row.shape:
            raise UpdateRejected(f"tensor '{name}' is {list(t.shape)}; each of its rows must be {list(row.shape)}")
    elif t.shape != row.shape:
        raise UpdateRejected(f"tensor '{name}' is {list(t.shape)}; it must be {list(row.shape)}")


def _check_count(count: Tensor, declared: Declared | None) -> None:
    if count.dtype != torch.int64 or count.dim():
        raise UpdateRejected(f"'count' is {count.dtype} {list(count.shape)}; it must be one whole number, torch.int64")
    most = MOST_EXAMPLES if declared is None else declared.examples
    if not 1 <= int(count) <= most:
        raise UpdateRejected(f"'count' is {int(count)}; this client can have trained on 1 to {most} examples")


def _check_classes(
    flat: Tensors, group: str, expected: Mapping[str, Tensor | Rows], declared: Declared | None, num_classes: int
) -> None:
    """The rows of one group belong to classes that exist, each named once, and that the client has."""
    classes = flat[f"{group}classes"]
    if len(classes) and (int(classes.min()) < 0 or int(classes.max()) >= num_classes):
        raise UpdateRejected(f"'{group}classes' names a class outside 0 to {num_classes - 1}")
    if (classes.diff() <= 0).any():
        raise UpdateRejected(f"'{group}classes' must name every class once, in rising order")
    for name, wanted in expected.items():
        if isinstance(wanted, Rows) and name.startswith(group) and len(flat[name]) != len(classes):
            raise UpdateRejected(f"tensor '{name}' has {len(flat[name])} rows for {len(classes)} classes")
    held = None if declared is None or declared.class_counts is None else declared.class_counts[classes]
    if held is not None and (held == 0).any():
        raise UpdateRejected(f"'{group}classes' names class {int(classes[held == 0][0])}, which this client lacks")
    counts = flat.get(f"{group}counts")
    if counts is not None and f"{group}counts" in expected:
        most = torch.full_like(counts, MOST_EXAMPLES) if held is None else held
        if ((counts < 1) | (counts > most)).any():
            raise UpdateRejected(f"'{group}counts' claims more examples of a class than this client can have, or none")
    rows = {name: row for name, row in expected.items() if isinstance(row, Rows) and name.startswith(group)}
    if len(classes) and any(row.gradient for row in rows.values()):
        gradients = tree.unflatten({name.removeprefix(group): flat[name] for name, row in rows.items() if row.gradient})
        signed = any(row.signed for row in rows.values())
        wrong = _wrong_bias(gradients, classes) | (_wrong_signs(gradients, classes) if signed else False)
        if wrong.any():
            raise UpdateRejected(
                f"'{group.removesuffix('/')}' of class {int(classes[wrong][0])} is no gradient of a cross-entropy: it "
                "must lie below zero for its own class and above for the others"
            )


def _wrong_bias(gradients: Tree, classes: Tensor) -> Tensor:
    """A class's mean gradient for the bias is the mean of p - e_c: below zero for the class itself and above for all
    others, within one of zero. A prototype that was turned round, to push away from its class, is not."""
    if "bias" not in gradients:
        return torch.zeros(len(classes), dtype=torch.bool)
    bias = gradients["bias"].double()
    towards = torch.where(_own(classes, bias), -bias, bias)
    return ((towards < -_SLACK) | (towards > 1 + _SLACK)).any(dim=1)


def _wrong_signs(gradients: Tree, classes: Tensor) -> Tensor:
    """That for the weights is the mean of (p - e_c) h^T, so that for h >= 0 each row has the sign of the bias's number:
    every number of it."""
    table = gradients["weight"]
    least, most = table.amin(dim=2).double(), table.amax(dim=2).double()
    own = _own(classes, least)
    largest = torch.maximum(-least, most).amax(dim=1)
    slack = (_SLACK * largest + _TINY)[:, None]
    return torch.where(own, most > slack, least < -slack).any(dim=1)


def _own(classes: Tensor, table: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(classes, table.shape[1]).bool()
