"""FedRS: a restricted softmax holds back the classes that a client lacks.

Li and Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data", KDD 2021,
https://doi.org/10.1145/3447548.3467254. A client without examples of a class only pushes this class's row away from
its features. FedRS makes these rows move less: it scales their logits down in training. With alpha = 1 it is FedAvg.

    client  loss = CE(psi_k * z, y),   psi_kc = 1 if the client holds class c, else alpha         scale=missing
                                       psi_kc = alpha + (1 - alpha) n_kc / max_j n_kj             scale=proportional
    inference uses z
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from redgrape.learning.margins import missing_scales, proportional_scales
from redgrape.method import ClientSite
from redgrape.methods.fedavg import FedAvg
from redgrape.tree import Tree


class FedRS(FedAvg):
    """FedAvg whose clients scale down the training logits of classes that they lack."""

    alpha: float = Field(0.5, ge=0, le=1, description="scale of the logit of a class without local examples")
    scale: Literal["missing", "proportional"] = Field(
        "missing", description="scale the logits of missing classes only, or all in proportion to the class counts"
    )

    presets = {"paper": {}, "released": {"scale": "proportional"}}
    ingredient = "loss"
    fidelity = (
        "from a secondary source, which states the paper's scale and that of the authors' code; both have a classifier "
        "without bias, and here the bias is scaled with its logit"
    )

    def criterion(self, broadcast: Tree, site: ClientSite) -> Callable[[Tensor, Tensor], Tensor]:
        scales = missing_scales if self.scale == "missing" else proportional_scales
        psi = scales(site.class_counts, self.alpha).to(site.device)
        return lambda z, y: F.cross_entropy(z * psi.to(z.dtype), y)
