"""LDA: a linear discriminant from sums over the clients, without training.

The correction by rho is ours; the rest is Fisher's linear discriminant with a shrunken covariance. Clients send sums
over the features of the received encoder, in evaluation mode. A secure sum can add them up. The encoder stays as it is,
so it should be a pretrained one.

    client  n_k[c], s_k[c] = sum h over its examples of class c, Q_k = sum h h^T        once
    server  mu_c = s_c / N_c;   S = (Q - sum_c N_c mu_c mu_c^T) / (N - C)
            P = ((1 - g) S + g tr(S)/d I)^-1;   d_eff = tr(P S)
            w_c = P mu_c;   b_c = -1/2 [mu_c^T P mu_c - rho d_eff / N_c] + tau log(N_c / N)

A mean of few examples is longer than the true mean, E |mu_hat|^2 = |mu|^2 + tr(S) / n, so without rho the scores of
rare classes are too low. With rho = 0 and tau = 1 this is the usual LDA.

A client sends its sums in the first round in which it is asked, and zeros in later rounds. With all clients sampled,
one round is enough. With fewer, the head is that of the clients seen so far, each counted once.

With held_out > 0 the clients choose those of g and rho that are not given. It takes a second round:

    client  1  sends the sums of all but a share of its examples
            2  sends the sums of that share, and for each class the summed loss of every head on it
    server  1  makes a head for every g and rho of a small grid
            2  takes the g and rho with the smallest mean over classes of the mean loss, and makes the head of all sums
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from pydantic import Field
from torch import Tensor

from redgrape import determinism
from redgrape.errors import ConfigError
from redgrape.exchange import Parts, Received
from redgrape.learning import class_statistics
from redgrape.method import ClientSite, Method, ServerSite, Site
from redgrape.tree import Tensors, Tree

VALUES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)  # of g and rho to choose from


class LDA(Method):
    """A linear discriminant on the features of the encoder, from one round of sums."""

    g: float | None = Field(
        None, ge=0, le=1, description="shrinkage of the covariance towards a multiple of the identity; none: 0.5"
    )
    rho: float | None = Field(
        None, ge=0, le=1, description="correction for few examples; none: 1 for up to 20 classes, else 0.5"
    )
    held_out: float = Field(
        0.0, ge=0, le=0.5, description="share of a client's examples that chooses g and rho, in a second round; 0: none"
    )
    tau: float = Field(0.0, ge=0, le=1, description="weight of the class shares; 0: all classes are equally likely")

    presets = {
        "paper": {},
        "chosen": {"held_out": 0.2},
        "usual": {"rho": 0.0, "tau": 1.0},
        "post_hoc": {},
    }
    fidelity = "ours; the correction by rho was found in no paper, the rest is textbook LDA"
    sums_of_states = ("sums",)

    def parts(self, model: Tensors, site: Site) -> Parts:
        return {"sums": class_statistics.part(self._zeros(model, site))}

    def _zeros(self, model: Tensors, site: Site) -> Tensors:
        sums = class_statistics.zeros(model, site)
        if self.held_out:
            grid = tuple(map(len, self._grid(site)))
            sums["losses"] = torch.zeros(site.num_classes, *grid, dtype=torch.float64)
            sums["judging"] = torch.zeros_like(sums["examples"])
        return sums

    def _grid(self, site: Site) -> tuple[Sequence[float], Sequence[float]]:
        """The values of g and of rho to choose from; the first of each is taken if there is no loss."""
        usual = {"g": 0.5, "rho": class_statistics.usual_rho(site.num_classes)}
        given = {name: value for name in usual if (value := getattr(self, name)) is not None}
        more = () if not self.held_out else VALUES
        g, rho = ([given[name]] if name in given else [first, *more] for name, first in usual.items())
        return g, rho

    def init_server(self, model: Tensors, site: ServerSite) -> Tree:
        if self.held_out and site.rounds < 2:
            raise ConfigError(
                f"method.held_out is {self.held_out:g}, and g and rho are chosen in a second round; set rounds=2"
            )
        return {"model": model, "sums": self._zeros(model, site)}

    def broadcast(self, server: Tree) -> Tree:
        return {name: server[name] for name in ("model", "heads") if name in server}

    def init_client(self, broadcast: Tree) -> Tree:
        return {"visits": torch.tensor(0)}

    def client_update(self, broadcast: Tree, state: Tree, site: ClientSite) -> tuple[Tree, Tree]:
        net, visits = site.load(broadcast["model"]), int(state["visits"])
        rows = self._share(site, visits)
        sums = {**self._zeros(broadcast["model"], site), **class_statistics.of_rows(net, site, rows)}
        if self.held_out and visits and "heads" in broadcast:
            sums["losses"] = class_statistics.class_losses(net, site, rows, broadcast["heads"])
            sums["judging"] = sums["examples"].clone()
        return {"sums": sums}, {"visits": state["visits"] + 1}

    def _share(self, site: ClientSite, visits: int) -> Tensor:
        """The rows whose sums the client sends: all but the held-out share at first, then that share, then none. With
        a floor, a class of which a share would have fewer than min_count examples is in the first as a whole."""
        rows = class_statistics.reported_rows(site)
        # The same share in both rounds, so the key has no round.
        draws = torch.rand(len(rows), generator=determinism.torch_stream(site.seed, "held out", site.client))
        held_out, y = draws < self.held_out, site.data.labels[rows]
        if site.min_count > 1:
            both = [torch.bincount(y[share], minlength=site.num_classes) for share in (held_out, ~held_out)]
            held_out &= (torch.minimum(*both) >= site.min_count)[y]
        return rows[held_out == bool(visits)][: len(rows) if visits < 2 else 0]

    def server_update(self, server: Tree, received: Received, site: ServerSite) -> Tree:
        new = received.total("sums")
        if not new["examples"].any():
            return server
        sums, model = class_statistics.added(server["sums"], new), server["model"]
        spread, (g, rho) = class_statistics.Spread.of(sums), self._grid(site)
        W, b = spread.discriminants(g, rho)
        i, j = self._best(sums)
        prior = self.tau * torch.log(spread.examples / spread.examples.sum())
        model = class_statistics.with_head(server["model"], sums, W[i], b[i, j] + prior)
        made = {"model": model, "sums": sums, "chosen": torch.tensor([g[i], rho[j]], dtype=torch.float64)}
        if self.held_out:
            heads = class_statistics.of_all_classes(sums["examples"], W, b)
            made["heads"] = {name: t.to(model["classifier.weight"].dtype) for name, t in heads.items()}
        return made

    def _best(self, sums: Tensors) -> tuple[int, int]:
        """The place in the grid with the smallest mean over classes of the mean loss; the first without losses. A
        class of which all examples judge has no row in the heads, and its loss says nothing about them."""
        if not self.held_out or not (judged := (sums["judging"] > 0) & (sums["examples"] > sums["judging"])).any():
            return 0, 0
        means = (sums["losses"][judged] / sums["judging"][judged, None, None]).mean(dim=0)
        i, j = divmod(int(means.argmin()), means.shape[1])
        return i, j

    def log(self, server: Tree, received: Received) -> Mapping[str, Tensor]:
        chosen = {"chosen": server["chosen"]} if "chosen" in server else {}
        return {"class_examples": server["sums"]["examples"], **chosen}
