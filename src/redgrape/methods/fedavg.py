"""FedAvg: federated averaging.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
https://arxiv.org/abs/1602.05629. Every client trains the global model on its own data for a few epochs. The server
averages their changes, weighted by their numbers of examples. RedGrape's paper calls it FedAvg+CE.

    server  sends theta                                                         to the sampled clients
    client  theta_k <- theta; for each batch: theta_k <- theta_k - eta_l grad CE(theta_k; batch)
    client  sends delta_k = theta_k - theta, n_k
    server  theta <- theta + eta_s sum_k n_k / (sum_i n_i) delta_k
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from redgrape.exchange import Parts, Received
from redgrape.learning.local_training import stackable
from redgrape.method import ClientSite, Method, ServerSite, Site
from redgrape.nets.net import Net
from redgrape.tree import Tensors, Tree


class FedAvg(Method):
    """Federated averaging of models trained with the cross-entropy loss."""

    presets = {
        "paper": {},
        "released": {"clip_norm": 1.0},  # the released RedGrape code clips the gradient in every method
    }
    fidelity = "from RedGrape's paper, Eq. (2), without its factor 1/|C|, which would shrink every step"

    def parts(self, model: Tensors, site: Site) -> Parts:
        return self.training_parts(model, site)

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        return {"model": model}

    def broadcast(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    @stackable
    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net = self.load_for_training(broadcast["model"], site)
        criterion, regularise = self.criterion(broadcast, site), self.regulariser(net, broadcast, state, site)
        optimizer = self.make_optimizer(net.parameters(), site)
        losses = self.losses(net, site)
        for x, y in self.batches(site, net):
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            regularise()
            self.step(optimizer)
            losses.add(loss, y)
        return self.report(net, broadcast["model"], losses, site), state

    @stackable
    def criterion(self, broadcast: Tree, site: ClientSite) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss of a batch's logits and labels. A method that only changes the loss overrides this."""
        return F.cross_entropy

    @stackable
    def regulariser(self, net: Net, broadcast: Tree, state: Tree, site: ClientSite) -> Callable[[], None]:
        """Made for a round; called after each backward pass, to add the gradient of a local regulariser."""
        return lambda: None

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        return {"model": received.moved(server["model"], self.server_lr)}
