"""Log a run to TensorBoard, in its folder `tensorboard`. The log does not affect the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redgrape.errors import needed
from redgrape.runs.figures import FIGURES, OF_MANY_CLASSES
from redgrape.training import Step


class TensorBoard:
    """Writes the scalars of each step. A round repeated after a crash replaces the earlier one."""

    def __init__(self, run: Path) -> None:
        self._folder = run / "tensorboard"
        self._writer: Any = None
        module = needed("torch.utils.tensorboard", "--tensorboard needs TensorBoard", "tensorboard")
        self._open = module.SummaryWriter

    def step(self, step: Step) -> None:
        round = step.state.round
        if self._writer is None:  # purge_step hides what an earlier process wrote from this round on
            self._writer = self._open(str(self._folder), purge_step=round)
        for name, value in scalars(step).items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def scalars(step: Step) -> dict[str, float]:
    """The scalars by TensorBoard name. Missing values are left out."""
    record = step.record
    values = {
        "train/loss": record["train_loss"],
        "bytes/down": record["bytes_down"],
        "bytes/up": record["bytes_up"],
        **{f"seconds/{name}": value for name, value in step.seconds.items()},
    }
    for judged_on in ("test", "validation"):
        if judged_on in record:
            names = (*FIGURES, *OF_MANY_CLASSES, "loss")
            values |= {f"{judged_on}/{figure}": record[judged_on].get(figure) for figure in names}
    return {name: value for name, value in values.items() if value is not None}
