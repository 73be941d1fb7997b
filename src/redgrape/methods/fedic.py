"""FEDIC: calibrated distillation from an ensemble of the clients' models.

Shang et al., "FEDIC: Federated Learning on Non-IID and Long-Tailed Data via Calibrated Distillation", ICME 2022,
https://arxiv.org/abs/2205.00172. The clients' models together know more than their average. On a small balanced set
the server learns how to weight their logits, how to calibrate the ensemble by class, and how far to trust a
fine-tuned model instead. It distils the result into the averaged model. The method needs extra data:
`data.auxiliary` examples per class, held out before the long tail is cut. Of a rare class these may be more than all
clients hold.

    server  theta <- FedAvg                                      theta_2 <- theta fine-tuned on the balanced set
            a_j = sigmoid(z_j . s + b_0), normalised over clients j;     ensemble = sum_j a_j z_j
            calibrated = ensemble * scale + bias;     gate = sigmoid(w . mean_j h_j + w_0)
            teacher = gate * calibrated + (1 - gate) * z_2       all of it trained on the balanced set
            theta <- theta trained on  1/2 KL(teacher / T || student / T) + 1/2 CE
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from redgrape import determinism, tree
from redgrape.exchange import Received
from redgrape.learning.sums import BATCH
from redgrape.method import ServerSite
from redgrape.methods.fedavg import FedAvg
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree
from redgrape.validation import LARGEST


class FEDIC(FedAvg):
    """Distils a calibrated ensemble of the clients' models into the average (needs auxiliary data)."""

    server_steps: int = Field(
        100, ge=1, le=10**9, description="steps of fine-tuning, of calibration and of distillation"
    )
    adam_lr: float = Field(1e-3, gt=0, le=LARGEST, description="learning rate of all three (Adam)")
    adam_weight_decay: float = Field(2e-4, ge=0, le=LARGEST, description="weight decay of net training")
    labelled_batch: int = Field(20, ge=1, le=10**9, description="balanced examples per step")
    transfer_batch: int = Field(128, ge=1, le=10**9, description="examples per step of distillation")
    temperature: float = Field(2.0, gt=0, le=LARGEST, description="T of the distillation")

    uses_auxiliary = True
    cheap = {"server_steps": 2}
    presets = {"paper": {}}
    fidelity = (
        "from the authors' code (shangxinyi/FEDIC at 76a1d75); the balanced set also serves as the unlabelled "
        "transfer set, which the original takes from another data set; images at the server are not augmented; Adam "
        "is reset each round; the gate starts half open, which is our choice"
    )

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        site.auxiliary_set()
        C, d = model["classifier.weight"].shape
        return {"model": model, "calibration": first_calibration(C, d, model["classifier.weight"].dtype)}

    def needs_single(self) -> str:
        return "the server runs each client's own model"

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        averaged = received.moved(server["model"], self.server_lr)
        y = site.auxiliary_set().labels.to(site.device)
        deltas = received.each("delta")
        clients = [
            _outputs(site.load({**tree.add(server["model"], delta), **statistics}), site)
            for delta, statistics in zip(deltas.values(), received.each("buffers").values(), strict=True)
        ]
        z = torch.stack([logits for logits, _ in clients])  # [clients, n, C]
        h = torch.stack([features for _, features in clients]).mean(dim=0)  # [n, d]
        with determinism.global_stream(
            determinism.key(site.seed, "server training", site.round)
        ):  # dropout draws from it
            z_2 = _outputs(self._fine_tuned(averaged, y, site), site)[0]
            calibration = self._calibrated(server["calibration"], z, h, z_2, y, site)
            with torch.no_grad():
                teacher = teacher_logits(calibration, z, h, z_2)
            student = self._distilled(averaged, teacher, y, site)
        return {
            "model": {name: t.detach().cpu().clone().contiguous() for name, t in student.state_dict().items()},
            "calibration": {name: t.detach().cpu().clone() for name, t in calibration.items()},
        }

    def _fine_tuned(self, model: Tensors, y: Tensor, site: ServerSite) -> Net:
        net, optimizer = self._trainable(model, site)
        for rows in _draws(len(y), self.labelled_batch, self.server_steps, site.generator("fine-tuning")):
            optimizer.zero_grad()
            F.cross_entropy(net(site.inputs(rows, net.classifier.weight.dtype)), y[rows]).backward()
            optimizer.step()
        return net

    def _calibrated(self, start: Tensors, z: Tensor, h: Tensor, z_2: Tensor, y: Tensor, site: ServerSite) -> Tensors:
        """The calibration, trained further from the last round's by the teacher's loss on the balanced set."""
        calibration = {name: t.to(z.device).clone().requires_grad_() for name, t in start.items()}
        optimizer = torch.optim.Adam(calibration.values(), lr=self.adam_lr)
        for rows in _draws(len(y), self.labelled_batch, self.server_steps, site.generator("calibration")):
            optimizer.zero_grad()
            F.cross_entropy(teacher_logits(calibration, z[:, rows], h[rows], z_2[rows]), y[rows]).backward()
            optimizer.step()
        return calibration

    def _distilled(self, model: Tensors, teacher: Tensor, y: Tensor, site: ServerSite) -> Net:
        net, optimizer = self._trainable(model, site)
        target = torch.log_softmax(teacher / self.temperature, dim=1)
        transfer = _draws(len(y), self.transfer_batch, self.server_steps, site.generator("transfer"))
        labelled = _draws(len(y), self.labelled_batch, self.server_steps, site.generator("distillation"))
        for unlabelled_rows, rows in zip(transfer, labelled, strict=True):
            optimizer.zero_grad()
            z = net(site.inputs(unlabelled_rows, net.classifier.weight.dtype))
            student = torch.log_softmax(z / self.temperature, dim=1)
            kl = F.kl_div(student, target[unlabelled_rows], reduction="batchmean", log_target=True)
            ce = F.cross_entropy(net(site.inputs(rows, net.classifier.weight.dtype)), y[rows])
            (0.5 * kl + 0.5 * ce).backward()
            optimizer.step()
        return net

    def _trainable(self, model: Tensors, site: ServerSite) -> tuple[Net, torch.optim.Optimizer]:
        net = site.load(model)
        if self.freeze_encoder:
            net.encoder.requires_grad_(False).eval()
        trained = [p for p in net.parameters() if p.requires_grad]
        return net, torch.optim.Adam(trained, lr=self.adam_lr, weight_decay=self.adam_weight_decay, fused=True)


def first_calibration(C: int, d: int, dtype: torch.dtype) -> Tensors:
    """Clients are weighted by the sum of their logits, the ensemble is unchanged, and half of it passes the gate."""
    ones, zeros = torch.ones(C, dtype=dtype), torch.zeros(C, dtype=dtype)
    gate = {"w": torch.zeros(d, dtype=dtype), "w_0": torch.zeros(1, dtype=dtype)}
    return {"s": ones, "b_0": torch.zeros(1, dtype=dtype), "scale": ones.clone(), "bias": zeros, **gate}


def teacher_logits(calibration: Tensors, z: Tensor, h: Tensor, z_2: Tensor) -> Tensor:
    """Teacher logits from the clients' logits z [clients, n, C], their mean features h [n, d] and the fine-tuned
    model's z_2."""
    # a_j / sum_j a_j in logarithms: for very negative inputs all sigmoids are zero
    a = torch.softmax(F.logsigmoid(z @ calibration["s"] + calibration["b_0"]), dim=0)
    ensemble = (a.unsqueeze(2) * z).sum(dim=0)
    gate = torch.sigmoid(h @ calibration["w"] + calibration["w_0"]).unsqueeze(1)
    return gate * (ensemble * calibration["scale"] + calibration["bias"]) + (1 - gate) * z_2


@torch.no_grad()
def _outputs(net: Net, site: ServerSite) -> tuple[Tensor, Tensor]:
    """Logits and features of the balanced set, in evaluation mode."""
    net.eval()
    batches = torch.arange(len(site.auxiliary_set())).split(BATCH)
    h = torch.cat([net.encoder(site.inputs(rows, net.classifier.weight.dtype)) for rows in batches])
    return net.classifier(h), h


def _draws(n: int, size: int, steps: int, random: torch.Generator) -> Iterator[Tensor]:
    """`steps` random subsets of n rows, of at least two rows each if there are two, because BatchNorm needs them."""
    for _ in range(steps):
        yield torch.randperm(n, generator=random)[: max(2, size)]
