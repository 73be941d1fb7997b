"""The local training that all methods share."""

from __future__ import annotations

import pytest
import torch

from redgrape.methods.fedavg import FedAvg


@pytest.mark.parametrize("batchnorm", [False, True])
@pytest.mark.parametrize("examples", range(1, 12))
def test_steps_are_the_batches_of_a_round(examples: int, batchnorm: bool) -> None:
    """A last batch of one joins the one before it if the net has BatchNorm; SCAFFOLD divides by the number of steps."""
    method = FedAvg(batch_size=3, epochs=2)
    batches = method._cut(torch.arange(examples), batchnorm)
    assert method.steps(examples, batchnorm=batchnorm) == 2 * len(batches)
