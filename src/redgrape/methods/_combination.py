"""Methods combined by name: `vine+balanced_softmax+fedprox` is Vine with that loss and that regulariser.

An ingredient is a method that makes one choice (`Method.ingredient`) and leaves the rest to the next
class: its other functions call `super()` and add to what they get. So a combination is a class that inherits from its
ingredients and then from one whole method, FedAvg if none is named. The order of the names has no meaning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from pydantic import create_model

from redgrape.errors import ConfigError

if TYPE_CHECKING:
    from redgrape.method import Method

# Each choice: the function that local training calls for it, and the function that an ingredient overrides. Client
# weights and heads are none of local training.
CHOICES = {
    "loss": ("criterion", "criterion"),
    "regulariser": ("regulariser", "regulariser"),
    "sampler": ("batches", "order"),
    "client weights": ("", ""),
    "head": ("", ""),
}


def combined(named: dict[str, type[Method]]) -> type[Method]:
    """One class of these methods. ConfigError if two make the same choice, or the whole method does not take one."""
    parts = dict(sorted(named.items()))
    whole = {name: method for name, method in parts.items() if not method.ingredient}
    if len(whole) > 1:
        first, second = list(whole)[:2]
        raise ConfigError(
            f"'{first}' and '{second}' are both whole methods; a combination has one, and a {', '.join(CHOICES)}"
        )
    chosen: dict[str, str] = {}
    for name, method in parts.items():
        if method.ingredient in chosen:
            raise ConfigError(f"'{chosen[method.ingredient]}' and '{name}' are both a {method.ingredient}; choose one")
        if method.ingredient:
            chosen[method.ingredient] = name
    for name, method in whole.items():
        for choice, ingredient in chosen.items():
            called, overridden = CHOICES[choice]
            refused = f"'{name}' cannot be combined with '{ingredient}'"
            if not _takes(method, called):
                raise ConfigError(f"{refused}: its training takes no {choice}")
            own = getattr(method, overridden, None)
            if own is not getattr(_fedavg(), overridden, None) and not getattr(own, "replaceable", False):
                raise ConfigError(f"{refused}: it has a {choice} of its own")
    ingredients = [parts[name] for name in chosen.values()]
    named = {**{chosen[method.ingredient]: method for method in ingredients}, **whole}
    _check_names(named, "hyper-parameter", lambda method: method.model_fields)
    _check_names(named, "function", lambda method: (name for name in vars(method) if re.match("_[a-z]", name)))
    return _inherit("+".join([*whole, *chosen.values()]), [*ingredients, *whole.values()])


def _takes(method: type[Method], function: str) -> bool:
    """Whether the method's local training calls this function. Ingredients build on FedAvg, and so must the method."""
    if not issubclass(method, _fedavg()):
        return False
    if not function:
        return True
    for cls in method.__mro__:
        if code := getattr(vars(cls).get("client_update"), "__code__", None):
            if function in code.co_names:
                return True
            if "super" not in code.co_names:
                return False
    return False


def _fedavg() -> type[Method]:
    from redgrape.methods.fedavg import FedAvg  # not at the top: FedAvg itself is found by its name

    return FedAvg


def _check_names(named: dict[str, type[Method]], kind: str, names: Callable[[type[Method]], Iterable[str]]) -> None:
    """Raise ConfigError if two methods have a name of their own in common: one would replace the other's."""
    owners: dict[str, str] = {}
    for name, method in named.items():
        for own in sorted({*names(method)} - {*names(_fedavg())}):
            if own in owners:
                raise ConfigError(f"'{owners[own]}' and '{name}' cannot be combined: both have a {kind} '{own}'")
            owners[own] = name


def _inherit(name: str, bases: Sequence[type[Method]]) -> type[Method]:
    fields: dict[str, Any] = {}
    for base in reversed(bases):  # pydantic would also take what a base only inherits
        fields |= {
            field: (info.annotation, info)
            for field, info in base.model_fields.items()
            if field in vars(base).get("__annotations__", {}) or field not in fields
        }
    made = cast("type[Method]", create_model(name, __base__=tuple(bases), __module__=__name__, **fields))
    made.__doc__ = "\n".join(f"{base.__name__}: {(base.__doc__ or '').strip()}" for base in reversed(bases))
    made.presets = {"paper": {}}
    made.sums_of_states = tuple(group for base in bases for group in base.sums_of_states)
    made.uses_auxiliary = any(base.uses_auxiliary for base in bases)
    made.cheap = {key: value for base in bases for key, value in base.cheap.items()}
    made.fidelity = "a combination of ours; each part as on its own page"
    return made
