"""The local training that all methods share: options, optimizer, order of batches, and the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

import torch
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field
from torch import Tensor

from redgrape.data.augment import NO_AUGMENTATION
from redgrape.data.examples import place
from redgrape.exchange.parts import Count, Direction, Parts, Scalar, Statistics, Weights
from redgrape.learning.features import batchnorms, momenta
from redgrape.learning.schedule import MILESTONES, Schedule, decay, warm_up
from redgrape.learning.sgd import Optimizer, Sgd
from redgrape.nets.net import Net
from redgrape.tree import Tensors
from redgrape.validation import LARGEST, shown

if TYPE_CHECKING:
    from redgrape.method import ClientSite, Site


F = TypeVar("F", bound=Callable[..., Any])


def _whole(value: float) -> float:
    if math.isfinite(value) and value != int(value):
        raise ValueError(f"it is {value}, but it is a number of examples: pass a whole number or inf")
    return value


WholeOrInfinite: TypeAlias = Annotated[float, AfterValidator(_whole)]


def stackable(function: F) -> F:
    """Mark a `client_update`, `criterion` or `regulariser` that also works for several clients at once
    (engines/stacked.py): it treats tensors element by element, or through the net, the loss of a batch and the
    optimizer."""
    function.stackable = True  # type: ignore[attr-defined]  # a function takes any attribute
    return function


def replaceable(function: F) -> F:
    """Mark a `criterion` of a whole method that the loss of a combination may replace."""
    function.replaceable = True  # type: ignore[attr-defined]  # a function takes any attribute
    return function


def holds_for_stacks(method: LocalTraining) -> bool:
    """Whether everything that runs at a client is `stackable`. An override must be marked again."""
    run = [getattr(method, name) for name in ("client_update", "criterion", "regulariser") if hasattr(method, name)]
    return all(getattr(function, "stackable", False) for function in run)


class Losses:
    """The mean training loss of a client's round."""

    def __init__(self, net: Net, examples: int) -> None:
        weight = net.classifier.weight
        self._total = torch.zeros((), dtype=weight.dtype, device=weight.device)
        self._examples = examples

    def add(self, loss: Tensor, y: Tensor) -> None:
        """Add the loss of a batch with these labels."""
        self._total += loss.detach() * len(y)

    def mean(self) -> Tensor:
        return (self._total / self._examples).cpu()


def _rising(values: Any) -> Any:
    """A list, as TOML has it, as a tuple."""
    values = tuple(values) if isinstance(values, list) else values
    numbers = isinstance(values, tuple) and values and all(isinstance(v, float) and 0 < v < 1 for v in values)
    if not numbers or any(a >= b for a, b in pairwise(values)):
        raise ValueError(f"it is {shown(values)}; it must be rising shares of the rounds, such as [0.5, 0.75]")
    return values


Milestones: TypeAlias = Annotated[tuple[float, ...], BeforeValidator(_rising)]
YOUNGER = ("lr_milestones", "lr_warmup")  # options that experiments name only if they are set


class LocalTraining(BaseModel):
    """The local training options of every method. The defaults are the paper's settings for MNIST."""

    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="local optimizer, new in every round")
    lr: float = Field(0.01, gt=0, le=LARGEST, description="local learning rate")
    lr_schedule: Schedule = Field("constant", description="decay of lr over the rounds")
    lr_final: float = Field(0.01, ge=0, le=1, description="fraction of lr in the last round, if it decays")
    lr_milestones: Milestones = Field(
        MILESTONES, description="shares of the rounds after which lr falls, if the schedule is milestones"
    )
    lr_warmup: int = Field(0, ge=0, le=10**9, description="first rounds in which lr rises linearly")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd")
    weight_decay: float = Field(0.0, ge=0, le=LARGEST, description="weight decay of the local optimizer")
    batch_size: int = Field(64, ge=1, le=10**9, description="examples per local step")
    epochs: int = Field(5, ge=0, le=10**9, description="passes over a client's data in a round; 0 trains nothing")
    clip_norm: float | None = Field(
        None, gt=0, le=LARGEST, description="clip the gradient of all parameters to this global norm"
    )
    server_lr: float = Field(1.0, gt=0, le=LARGEST, description="server learning rate")
    freeze_encoder: bool = Field(False, description="train the classifier only; the encoder keeps its initial weights")

    def learning_rate(self, site: Site) -> float:
        decayed = self.lr * decay(self.lr_schedule, site.round, site.rounds, self.lr_final, self.lr_milestones)
        return decayed * warm_up(site.round, self.lr_warmup)

    def trainable(self, model: Tensors, site: Site) -> Net:
        """A net with these weights. Only its trained parts require gradients."""
        net = site.load(model)
        if self.freeze_encoder:
            net.encoder.requires_grad_(False).eval()
        return net

    def load_for_training(self, model: Tensors, site: ClientSite) -> Net:
        net = self.trainable(model, site)
        if len(site.data) == 1:  # BatchNorm has no statistics of a single example
            for layer in batchnorms(net):
                layer.eval()
        return net

    def make_optimizer(self, parameters: Iterable[Tensor], site: Site) -> Optimizer:
        trained = [p for p in parameters if p.requires_grad]
        lr = self.learning_rate(site)
        match self.optimizer:
            case "sgd":
                return Sgd(trained, lr, self.momentum, self.weight_decay)
            case "adam":
                return torch.optim.Adam(trained, lr=lr, weight_decay=self.weight_decay, fused=True)
            case "adamw":
                return torch.optim.AdamW(trained, lr=lr, weight_decay=self.weight_decay, fused=True)

    def batches(self, site: ClientSite, net: Net) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled mini-batches of the client's data, for `epochs` passes. For a stack of clients, their batches are
        concatenated."""
        if site.members:
            yield from self._batches_of_all(site.members, net)
            return
        dtype = net.classifier.weight.dtype
        data = site.data.converted(dtype)  # once per round, not per epoch
        labels, has_batchnorm = data.labels, bool(batchnorms(net))
        shuffle = site.generator("batches")
        augment = site.generator("augment") if data.augment != NO_AUGMENTATION else None
        for _ in range(self.epochs):
            for rows in self._cut(self.order(site, shuffle), has_batchnorm):
                yield place(data.inputs(rows, dtype, augment), site.device), labels[rows].to(site.device)

    def _batches_of_all(self, members: Sequence[ClientSite], net: Net) -> Iterator[tuple[Tensor, Tensor]]:
        dtype = net.classifier.weight.dtype
        data = [member.data.converted(dtype) for member in members]
        if any(d.augment != NO_AUGMENTATION or d.rows is not None or d.x.dtype != dtype for d in data):
            for batches in zip(*(self.batches(member, net) for member in members), strict=True):
                x, y = zip(*batches, strict=True)
                yield torch.cat(x), torch.cat(y)
            return
        inputs, labels = torch.stack([d.x for d in data]), torch.stack([d.y for d in data])
        device = members[0].device
        each = torch.arange(len(members)).unsqueeze(1)
        shuffles = [member.generator("batches") for member in members]
        for _ in range(self.epochs):
            orders = torch.stack([self.order(m, shuffle) for m, shuffle in zip(members, shuffles, strict=True)])
            for rows in orders.split(self.batch_size, dim=1):
                yield place(inputs[each, rows].flatten(0, 1), device), labels[each, rows].flatten().to(device)

    def order(self, site: ClientSite, random: torch.Generator) -> Tensor:
        """The rows of the client's data in one pass. A sampler overrides this; its passes have the same length."""
        return torch.randperm(len(site.data), generator=random)

    def losses(self, net: Net, site: ClientSite) -> Losses:
        return Losses(net, max(1, self.epochs * len(site.data)))

    def report(self, net: Net, start: Tensors, losses: Losses, site: ClientSite) -> dict[str, Any]:
        """The `training_parts` that a client sends after training this net from `start`."""
        delta = {name: p.detach().cpu() - start[name] for name, p in net.named_parameters() if p.requires_grad}
        count = torch.tensor(len(site.data))
        return {"delta": delta, "buffers": _statistics(net), "count": count, "loss": losses.mean()}

    def training_parts(self, model: Tensors, site: Site, weights: Weights = "examples") -> Parts:
        """delta = new - old of the trained parameters, and the data about its training. `weights`: how clients are
        weighted."""
        net = self.trainable(model, site)
        trained = {name: model[name] for name, p in net.named_parameters() if p.requires_grad}
        loss = torch.zeros((), dtype=net.classifier.weight.dtype)
        parts: Parts = {"delta": Direction(trained, weights), "count": Count(), "loss": Scalar(loss)}
        if statistics := _statistics(net):
            parts["buffers"] = Statistics({name: model[name] for name in statistics}, momenta(net))
        return parts

    def steps(self, examples: int, *, batchnorm: bool = False) -> int:
        """The number of local steps per round on this many examples."""
        joined = batchnorm and examples > self.batch_size and examples % self.batch_size == 1  # see _cut
        return self.epochs * (-(-examples // self.batch_size) - joined)

    def effective_steps(self, steps: int) -> float:
        """The number of plain sgd steps with a constant gradient that go as far as S steps with momentum m: the sum
        over s = 1 .. S of (1 - m^s) / (1 - m)."""
        m = self.momentum
        return sum((1 - m**s) / (1 - m) for s in range(1, steps + 1))

    def _cut(self, order: Tensor, has_batchnorm: bool) -> list[Tensor]:
        batches = list(order.split(self.batch_size))
        if has_batchnorm and len(batches) > 1 and len(batches[-1]) == 1:
            # BatchNorm has no statistics of a single example: a last batch of one joins the batch before it.
            batches[-2:] = [torch.cat(batches[-2:])]
        return batches

    def step(self, optimizer: Optimizer) -> None:
        """One step on the gradients in .grad, clipped if clip_norm is set."""
        if self.clip_norm is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        optimizer.step()


def _statistics(net: Net) -> Tensors:
    """Values that are not trained but change in training, such as running statistics; none for a frozen encoder. Whole
    numbers, such as BatchNorm's batch counter, say nothing about the data: the server keeps its own."""
    if not net.encoder.training or next(net.buffers(), None) is None:
        return {}
    parameters = {name for name, _ in net.named_parameters()}
    return {
        name: t.detach().cpu().clone()
        for name, t in net.state_dict().items()
        if name not in parameters and t.is_floating_point()
    }


def zeros_like_parameters(model: Tensors, site: Site) -> Tensors:
    """A zero for every parameter of the model, and none for its buffers."""
    return {name: torch.zeros_like(model[name]) for name, _ in site.load(model).named_parameters()}
