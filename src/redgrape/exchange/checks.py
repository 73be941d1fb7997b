"""What the server requires of an update, whichever engine it came through.

A method describes its updates by their parts. Updates are neither repaired nor broadcast to another shape: one that
does not match its description is rejected, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from redgrape import tree
from redgrape.data.federation import Declared
from redgrape.exchange.parts import ClassRows, Count, Parts, Scalar, Statistics, Sum, Weight, class_rows, described
from redgrape.tree import Tensors, Tree

MOST_EXAMPLES = 10**9  # the most a client may claim if it has not declared its number
UNDECLARED = Declared(MOST_EXAMPLES)
LONGEST = 1e4  # times the model's length; a longer part of an update means that training diverges
_SLACK = 1e-3  # tolerance in the checks of a class gradient
_ROUNDING = 1e-6  # of a weight in a secure sum
_TINY = 1e-5  # for a class learnt to the last bit, whose gradient is only rounding


class UpdateRejected(Exception):
    """A rejected update; the message is the reason."""


class NotFinite(UpdateRejected):
    """An update with NaN or infinity: training diverges."""


class TooLong(NotFinite):
    """An update too large to be plausible: training diverges, or the client lies."""


class Inspection:
    """Checks every update of a round against its parts and the model that was sent. Made once per round."""

    def __init__(self, parts: Parts, model: Tensors, num_classes: int) -> None:
        self._parts, self._num_classes = parts, num_classes
        self._expected = described(parts)
        self._rows = row_prefixes(parts)
        self._own = max(1.0, length(model))

    def lengths(self, update: Any, declared: Declared = UNDECLARED) -> dict[str, float]:
        """The length of each part of an update, over its real numbers only. UpdateRejected if the update does not match
        its parts; TooLong if a part is longer than training could make it. `declared`: what the client declared about
        itself. Running statistics have no meaningful length, weights have a bound of their own, and sums over examples
        are as long as the data."""
        self._check(update, declared)
        measured = (name for name, part in self._parts.items() if not isinstance(part, Statistics | Weight))
        found = {name: length({name: update.get(name, {})}) for name in measured}
        for name, number in found.items():
            part = self._parts[name]
            of_data = isinstance(part, Sum) and part.counted
            if number > LONGEST * self._own and not of_data:
                own = f"over {LONGEST:g} times that of the model, {self._own:.3g}"
                raise TooLong(f"'{name}' has length {number:.3g}, {own}")
        return found

    def _check(self, update: Any, declared: Declared) -> None:
        """Raise UpdateRejected if the update does not match its parts."""
        flat = named_tensors(update)
        check_names(flat, self._expected)
        for name, wanted in self._expected.items():
            _check_kind(name, flat[name], wanted, is_rows=name.startswith(self._rows))
        check_finite(flat)
        for name, part in self._parts.items():
            match part:
                case Count():
                    _check_count(flat[name], declared)
                case Weight(most=most):
                    _check_weight(float(flat[name]), most, int(flat["count"]))
                case Scalar(least=least) if least is not None and float(flat[name]) < least:
                    raise UpdateRejected(f"'{name}' is {float(flat[name]):g}; it cannot be below {least:g}")
                case Statistics():
                    for tensor in part.like:
                        if tensor.endswith("running_var") and (flat[f"{name}/{tensor}"] < 0).any():
                            raise UpdateRejected(f"tensor '{name}/{tensor}' is negative")
                case Sum(counted=counted) if counted:
                    _check_counted(f"{name}/{counted}", flat[f"{name}/{counted}"], declared)
                case ClassRows():
                    rows = {t: flat[f"{name}/{t}"] for t in update[name]}
                    _check_classes(rows, name, part, declared, self._num_classes)


def check_names(flat: Mapping[str, object], expected: Iterable[str], what: str = "update") -> None:
    wanted = set(expected)
    if missing := wanted - flat.keys():
        raise UpdateRejected(f"tensor '{min(missing)}' is missing")
    if more := flat.keys() - wanted:
        raise UpdateRejected(f"tensor '{min(more)}' is not part of this {what}")


def check_survey(answer: Any, like: Tree, examples: int, *, of_sum: bool = False) -> None:
    """Raise UpdateRejected if a client's answer to a survey does not match `like`, the answer of a client without
    examples. Whole numbers count examples; the client has `examples` of them. `of_sum`: the answer is the sum over all
    clients, and its real numbers may be wider."""
    flat, expected = named_tensors(answer), tree.flatten(like)
    check_names(flat, expected, "answer")
    for name, wanted in expected.items():
        wider = of_sum and wanted.is_floating_point() and flat[name].is_floating_point()
        _check_kind(name, flat[name], wanted.to(flat[name].dtype) if wider else wanted)
    check_finite(flat)
    for name, wanted in expected.items():
        if wanted.is_floating_point() or wanted.dtype == torch.bool:
            continue
        counts = flat[name]
        if (counts < 0).any() or (counts > examples).any() or int(counts.sum()) > examples:
            raise UpdateRejected(f"'{name}' must count examples, of which there are {examples} at most")
        if of_sum and not counts.any():
            raise UpdateRejected(f"'{name}' counts no example at all")


def check_sum(total: Any, like: Tree, parts: Parts, clients: int) -> None:
    """Raise UpdateRejected if this is not a sum of this many clients' summands. `like`: an empty summand."""
    flat, expected = named_tensors(total), tree.flatten(like)
    check_names(flat, expected)
    for name, wanted in expected.items():
        _check_kind(name, flat[name], wanted)
    check_finite(flat)
    for name, part in parts.items():
        if isinstance(part, Count) and not clients <= int(flat[name]) <= clients * MOST_EXAMPLES:
            raise UpdateRejected(
                f"'{name}' is {int(flat[name])} in all; {clients} clients have at least one example each"
            )
        if isinstance(part, Weight):
            _check_weight(float(flat[name]), part.most, int(flat["count"]))
        if isinstance(part, ClassRows):
            number = flat[f"{name}/clients"]
            counts = flat.get(f"{name}/counts", number)
            if (number < 0).any() or (number > clients).any() or (counts < number).any():
                raise UpdateRejected(f"the numbers of clients that report a class cannot be those of {clients} clients")


def row_prefixes(parts: Parts) -> tuple[str, ...]:
    return tuple(f"{name}/" for name in class_rows(parts))


def nothing(parts: Parts) -> Tree:
    """What a client without examples would send."""
    rows = row_prefixes(parts)
    return tree.unflatten(
        {
            name: t.new_zeros(0, *t.shape) if name.startswith(rows) else torch.zeros_like(t)
            for name, t in described(parts).items()
        }
    )


def length(group: Tree) -> float:
    """The length over all real numbers of the group together."""
    lengths = []
    for value in group.values():
        if isinstance(value, Mapping):
            lengths.append(length(value))
        elif value.is_floating_point():
            lengths.append(float(torch.linalg.vector_norm(value)))
    return math.hypot(*lengths)


def named_tensors(update: Any) -> Tensors:
    """The update's tensors by their joined names; UpdateRejected if it is anything but named tensors."""
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
            raise UpdateRejected(f"tensor '{name}' is not a plain tensor of real numbers in memory")
    return flat


def check_finite(flat: Tensors) -> None:
    if name := first_not_finite(flat):
        raise NotFinite(f"tensor '{name}' is not finite")


def first_not_finite(flat: Tensors) -> str | None:
    for name, t in flat.items():
        # The sum is nearly always finite, and far cheaper than checking each number.
        if t.is_floating_point() and not math.isfinite(t.sum()) and not torch.isfinite(t).all():
            return name
    return None


def _check_kind(name: str, t: Tensor, wanted: Tensor, *, is_rows: bool = False) -> None:
    if t.dtype != wanted.dtype:
        raise UpdateRejected(f"tensor '{name}' is {t.dtype}; it must be {wanted.dtype}")
    if is_rows:
        if t.dim() == 0 or t.shape[1:] != wanted.shape:
            raise UpdateRejected(f"tensor '{name}' is {list(t.shape)}; each of its rows must be {list(wanted.shape)}")
    elif t.shape != wanted.shape:
        raise UpdateRejected(f"tensor '{name}' is {list(t.shape)}; it must be {list(wanted.shape)}")


def _check_count(count: Tensor, declared: Declared) -> None:
    if not 1 <= int(count) <= declared.examples:
        raise UpdateRejected(
            f"'count' is {int(count)}; this client can have trained on 1 to {declared.examples} examples"
        )


def _check_weight(weight: float, most: float, examples: int) -> None:
    if not 0 < weight <= most * examples * (1 + _ROUNDING):
        raise UpdateRejected(
            f"'weight' is {weight:g}; with {examples} examples it must be above 0 and at most {most * examples:g}"
        )


def _check_counted(name: str, counts: Tensor, declared: Declared) -> None:
    """Check that a client counts examples of classes that it can have."""
    if (counts < 0).any() or not declared.can_hold(counts, torch.arange(len(counts))):
        raise UpdateRejected(f"'{name}' claims more examples of a class than this client can have, or fewer than none")


def _check_classes(rows: Tensors, name: str, part: ClassRows, declared: Declared, num_classes: int) -> None:
    """Check that the rows belong to existing classes that the client has, each named once."""
    classes = rows["classes"]
    if len(classes) and (int(classes.min()) < 0 or int(classes.max()) >= num_classes):
        raise UpdateRejected(f"'{name}/classes' names a class outside 0 to {num_classes - 1}")
    if (classes.diff() <= 0).any():
        raise UpdateRejected(f"'{name}/classes' must name every class once, in rising order")
    for tensor, t in rows.items():
        if len(t) != len(classes):
            raise UpdateRejected(f"tensor '{name}/{tensor}' has {len(t)} rows for {len(classes)} classes")
    if declared.class_counts is not None and (lacking := classes[declared.class_counts[classes] == 0]).numel():
        raise UpdateRejected(f"'{name}/classes' names class {int(lacking[0])}, which this client lacks")
    if part.weights == "count" and ((rows["counts"] < 1).any() or not declared.can_hold(rows["counts"], classes)):
        raise UpdateRejected(f"'{name}/counts' claims more examples of a class than this client can have, or none")
    if len(classes) and part.gradient:
        wrong = _wrong_bias(rows, classes) | (_wrong_signs(rows, classes) if part.signed else False)
        if wrong.any():
            raise UpdateRejected(
                f"'{name}' of class {int(classes[wrong][0])} is not a gradient of a cross-entropy: it must be below "
                "zero for its own class and above for the others"
            )


def _wrong_bias(gradients: Tensors, classes: Tensor) -> Tensor:
    """A class's mean gradient for the bias is the mean of p - e_c: below zero for the class itself, above zero for all
    others, and within one of zero. A gradient reversed to push away from its class violates this."""
    if "bias" not in gradients:
        return torch.zeros(len(classes), dtype=torch.bool)
    bias = gradients["bias"].double()
    towards = torch.where(_own(classes, bias), -bias, bias)
    return ((towards < -_SLACK) | (towards > 1 + _SLACK)).any(dim=1)


def _wrong_signs(gradients: Tensors, classes: Tensor) -> Tensor:
    """A class's mean gradient for the weights is the mean of (p - e_c) h^T. So for h >= 0 every number of a row has the
    sign of the bias's number."""
    table = gradients["weight"]
    least, most = table.amin(dim=2).double(), table.amax(dim=2).double()
    own = _own(classes, least)
    largest = torch.maximum(-least, most).amax(dim=1)
    slack = (_SLACK * largest + _TINY)[:, None]
    return torch.where(own, most > slack, least < -slack).any(dim=1)


def _own(classes: Tensor, table: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(classes, table.shape[1]).bool()
