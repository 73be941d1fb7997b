"""RedGrape read literally from the paper: slow, plain, and sharing no code with the package.

Every quantity is what its equation says it is: one call of autograd for every gradient, one loop over the rounds, the
clients, the local steps and the classes. The equations are named by their labels in the paper. Batches are full, so
that a local epoch is one step, and no client has more than T examples of a class, so that D_bal is unique: nothing here
is random.

A model is {"P": ..., "W": ..., "W_hat": ...}, each part {"weight": tensor, "bias": tensor}. The encoder is
f(x; P) = tanh(P x + bias). Where the paper leaves a choice open (the bias, the norm, what goes into the optimizer), the
choice is a field of `Setting`.

`MUTANTS` are deliberate errors, one line each; a test that cannot tell them from the truth has no power.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Part = dict[str, Tensor]  # {"weight": ..., "bias": ...}
Model = dict[str, Part]  # {"P": ..., "W": ..., "W_hat": ...}
Data = tuple[Tensor, Tensor]  # inputs and labels
Table = dict[int, Part]  # class -> its gradient prototype

MUTANTS = {
    # the server
    "server step flipped": "theta - eta_s * mean delta, as Eq. server aggregation is printed",
    "server average unweighted": "every client counts the same, whatever its size",
    "server divides by clients": "the extra 1/|C^t| of the paper's FedAvg equation",
    "server_lr ignored": "eta_s = 1 whatever was asked",
    "W_hat not aggregated": "the server's W_hat stays where it started",
    "momentum kept across rounds": "a client's momentum outlives its round",
    # the prototypes
    "prototype uses both heads": "L(P, W + W_hat; D_kc) instead of L(P, W; D_kc)",
    "prototype summed over samples": "the sum over D_kc instead of its mean",
    "prototypes after training": "at the client's trained model instead of the received one",
    "prototypes of this round": "the server's table is refreshed before the local training instead of after it",
    "prototypes one round late": "the table of round t-2 is used in round t",
    "prototypes weighted by count": "clients weighted by their number of examples of the class",
    "prototypes over all sampled": "divided by |C^t| instead of |C_c^t|",
    "own prototypes": "a client uses its own prototype where it has one instead of the global one",
    "old prototypes dropped": "a class that nobody holds in this round loses its prototype",
    "old prototypes unused": "the server keeps them, but the clients use only those of the last round",
    "min_count ignored": "a class of a single example has a prototype all the same",
    # the balanced gradient
    "threshold strict": "n > T instead of n >= T",
    "threshold of one": "real data for every class the client has",
    "real gradient uses both heads": "L(P, W + W_hat; D_bal_c) instead of L(P, W; D_bal_c)",
    "real gradient summed over samples": "the sum over D_bal_c instead of its mean",
    "real gradient frozen": "at the received model instead of the current one",
    "real classes averaged": "the mean over the real classes, added to the prototypes' sum",
    "absent class skipped": "no prototype for a class the client has no example of",
    "unseen class imputed": "a class that nobody has gets the mean of the missing classes' prototypes",
    "features not detached": "the balanced loss reaches the encoder",
    "encoder steps first": "the balanced gradient sees the encoder after its step",
    # the update of W
    "re-balancing in round 1": "it starts with the real classes instead of waiting for prototypes",
    "re-balancing from round 3": "it starts a round late",
    "re-balancing flipped": "minus lambda",
    "lambda omitted": "lambda = 1",
    "ratio inverted": "||g_bal|| / ||g_local||",
    "ratio omitted": "g_bal as it is",
    "ratio over the model": "||g_local|| over all of P, W and W_hat",
    "ratio after clipping": "||g_local|| of the clipped gradient",
    "ratio with weight decay": "||g_local|| of the gradient with weight decay",
    "norm swapped": "joint for per_tensor and the reverse",
    "placement swapped": "in_gradient for after_step and the reverse",
    "bias not re-balanced": "only the weight",
    "W_hat re-balanced": "the term goes to both heads",
    "instance loss uses W alone": "W_hat takes no part in Eq. updating W_hat and P",
    "learning rate twice": "eta_l^2 in after_step",
    "balanced gradient after the step": "in after_step, g_bal at the model after the optimizer's step",
    "clipped before the bracket": "in in_gradient, only the local gradient is clipped",
    "clipped without W_hat": "the global norm leaves W_hat out",
    "clipping scales up": "a gradient shorter than clip_norm is made that long",
}

EQUIVALENT = {
    "1/C forgotten": "g_bal is divided by its own norm, so no common factor of it matters",
    "balanced set pooled": "every class of D_bal has T examples: the mean over all, times |L_bal|, is the classes' sum",
}


@dataclass(frozen=True)
class Setting:
    """The choices, with the names and the defaults of the literal reading."""

    lam: float = 0.1
    threshold: float = 8
    placement: str = "in_gradient"
    norm: str = "joint"
    extra_init: str = "zeros"
    unseen: str = "skip"
    balanced_draw: str = "round"  # of no consequence here: T examples of T are the same ones whenever they are drawn
    prototype_weights: str = "uniform"
    min_count: int = 1
    use_prototypes: bool = True
    use_real_data: bool = True
    two_stream: bool = True
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    epochs: int = 1
    clip_norm: float | None = None
    server_lr: float = 1.0


@dataclass(frozen=True)
class Outcome:
    model: Model
    prototypes: Table


def run(
    P: Part,
    W: Part,
    clients: Sequence[Data],
    sampled: Sequence[Sequence[int]],
    setting: Setting,
    mutate: str | None = None,
    W_hat: Part | None = None,
) -> Outcome:
    """Train from encoder P and classifier W; `sampled` holds C^t, the clients of each round. W_hat, where it is random,
    is given."""
    if mutate is not None and mutate not in MUTANTS | EQUIVALENT:
        raise KeyError(mutate)
    theta: Model = {"P": P, "W": W}
    if setting.two_stream:
        theta["W_hat"] = {"zeros": zeros(W), "copy": W}.get(setting.extra_init) or dict(W_hat or {})
    return _Run(setting, len(W["bias"]), mutate).rounds(theta, clients, sampled)


def f(x: Tensor, P: Part) -> Tensor:
    """h := f(x; P)."""
    return torch.tanh(x @ P["weight"].T + P["bias"])


def L(P: Part, heads: Sequence[Part], data: Data) -> Tensor:
    """The mean cross-entropy of z = W h + W_hat h (text under Eq. updating W_hat and P), or of W h alone."""
    x, y = data
    h = f(x, P)
    z = sum(h @ W["weight"].T + W["bias"] for W in heads)
    return (z.logsumexp(1) - z[torch.arange(len(y)), y]).mean()


def grad(loss: Callable[[Part], Tensor], at: Part) -> Part:
    """The gradient of `loss` at `at`, by autograd."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in at.items()}
    gradients = torch.autograd.grad(loss(leaves), list(leaves.values()))
    return dict(zip(leaves, gradients, strict=True))


def of_class(data: Data, c: int) -> Data:
    """D_{k,c}: the examples of class c."""
    x, y = data
    rows = [i for i in range(len(y)) if y[i] == c]
    return x[rows], y[rows]


def norm(*parts: Part) -> Tensor:
    """The Frobenius norm of all tensors together."""
    return sum((value**2).sum() for part in parts for value in part.values()) ** 0.5


def add(a: Part, b: Part, scale: float | Tensor = 1.0) -> Part:
    """a + scale * b."""
    return {name: a[name] + scale * b[name] for name in a}


def zeros(like: Part) -> Part:
    return {name: torch.zeros_like(value) for name, value in like.items()}


@dataclass(frozen=True)
class _Run:
    s: Setting
    C: int  # |L|
    mutate: str | None

    def rounds(self, theta: Model, clients: Sequence[Data], sampled: Sequence[Sequence[int]]) -> Outcome:
        G: Table = {}  # the global prototypes; none before the first round
        G_before: Table = {}
        last: set[int] = set()  # the classes of the last round's clients
        momenta: dict[int, Model] = {}
        for t, C_t in enumerate(sampled, start=1):
            # Alg. 1, line 1: at the received model, before any step
            g_pro = {k: self.local_prototypes(theta, clients[k]) for k in C_t}
            received = G  # g^pro at W^{t-2}, made in round t-1
            if self.mutate == "prototypes of this round":
                received = self.global_prototypes(G, g_pro, clients)
            if self.mutate == "prototypes one round late":
                received = G_before
            if self.mutate == "old prototypes unused":
                received = {c: G[c] for c in last}
            last = {c for k in C_t for c in g_pro[k]}
            trained: dict[int, Model] = {}
            for k in C_t:
                momentum = momenta.get(k, {}) if self.mutate == "momentum kept across rounds" else {}
                mine = received | g_pro[k] if self.mutate == "own prototypes" else received
                trained[k], momenta[k] = self.local_training(t, theta, clients[k], mine, momentum)
            if self.mutate == "prototypes after training":
                g_pro = {k: self.local_prototypes(trained[k], clients[k]) for k in C_t}
            theta = self.aggregate(theta, trained, clients)  # Eq. server aggregation
            G, G_before = self.global_prototypes(G, g_pro, clients), G  # Eq. update global gradient prototypes
        return Outcome(theta, G)

    def local_prototypes(self, theta: Model, data: Data) -> Table:
        """Eq. gradient prototypes of last round: grad_W L(P, W; D_kc), on all of D_kc, with W alone."""
        heads = [theta["W_hat"]] if self.mutate == "prototype uses both heads" and self.s.two_stream else []
        table: Table = {}
        for c in range(self.C) if self.s.use_prototypes else ():
            D_kc = of_class(data, c)
            n = len(D_kc[1])
            if n >= (1 if self.mutate == "min_count ignored" else max(1, self.s.min_count)):  # c in L_k
                table[c] = grad(lambda W, D=D_kc: L(theta["P"], [W, *heads], D), theta["W"])
                if self.mutate == "prototype summed over samples":
                    table[c] = add(zeros(table[c]), table[c], n)
        return table

    def global_prototypes(self, G: Table, g_pro: Mapping[int, Table], clients: Sequence[Data]) -> Table:
        """Eq. update global gradient prototypes."""
        new: Table = {}
        for c in range(self.C):
            C_c = [k for k in g_pro if c in g_pro[k]]  # C_c^t: sampled, and have class c
            if C_c:
                by_count = self.s.prototype_weights == "count" or self.mutate == "prototypes weighted by count"
                weights = {k: len(of_class(clients[k], c)[1]) if by_count else 1 for k in C_c}
                total = len(g_pro) if self.mutate == "prototypes over all sampled" else sum(weights.values())
                new[c] = zeros(g_pro[C_c[0]][c])
                for k in C_c:  # first case: 1/|C_c^t| sum over C_c^t
                    new[c] = add(new[c], g_pro[k][c], weights[k] / total)
            elif c in G and self.mutate != "old prototypes dropped":
                new[c] = G[c]  # second case: C_c^t is empty
        return new

    def local_training(self, t: int, theta: Model, data: Data, G: Table, momentum: Model) -> tuple[Model, Model]:
        """Alg. 1, lines 2 to 7."""
        s, received = self.s, theta
        for _ in range(s.epochs):
            P, W = theta["P"], theta["W"]
            others = [theta["W_hat"]] if s.two_stream and self.mutate != "instance loss uses W alone" else []
            g: Model = {
                "P": grad(lambda P: L(P, [W, *others], data), P),  # noqa: B023  Eq. updating W_hat and P
                "W": grad(lambda W: L(P, [W, *others], data), W),  # noqa: B023  Eq. first part of W
            }
            if s.two_stream:
                g["W_hat"] = zeros(W)
            if others:  # Eq. updating W_hat and P
                g["W_hat"] = grad(lambda W_hat: L(P, [W, W_hat], data), theta["W_hat"])  # noqa: B023
            term, into_P = self.re_balancing(t, theta, received, g, data, G, momentum)
            in_gradient = (s.placement == "in_gradient") != (self.mutate == "placement swapped")
            if self.mutate == "clipped before the bracket":
                g = self.clipped(g)
            if in_gradient:  # Eq. updating W: the bracket
                g["W"] = add(g["W"], term)
                if self.mutate == "W_hat re-balanced":
                    g["W_hat"] = add(g["W_hat"], term)
            g["P"] = add(g["P"], into_P)
            if self.mutate != "clipped before the bracket":
                g = self.clipped(g)
            theta, momentum = self.optimizer_step(theta, g, momentum)
            if not in_gradient:  # Eq. updating W: the second part on its own, after the optimizer's step
                if self.mutate == "balanced gradient after the step":
                    term, _ = self.re_balancing(t, theta, received, g, data, G, momentum)
                eta = s.lr**2 if self.mutate == "learning rate twice" else s.lr
                theta["W"] = add(theta["W"], term, -eta)
                if self.mutate == "W_hat re-balanced":
                    theta["W_hat"] = add(theta["W_hat"], term, -eta)
        return theta, momentum

    def re_balancing(
        self, t: int, theta: Model, received: Model, g: Model, data: Data, G: Table, momentum: Model
    ) -> tuple[Part, Part]:
        """Eq. updating W: lambda g_bal ||g_local|| / ||g_bal||; and zero, the balanced loss's gradient for P."""
        nothing = zeros(theta["W"]), zeros(theta["P"])
        if t < {"re-balancing in round 1": 1, "re-balancing from round 3": 3}.get(self.mutate or "", 2):
            return nothing  # footnote of Eq. updating W: from the second round on
        if self.mutate == "encoder steps first":
            theta = theta | {"P": self.optimizer_step(theta, self.clipped(g), momentum)[0]["P"]}
        found = self.balanced_gradient(theta, received, data, G)
        if found is None:
            return nothing
        g_bal, into_P = found
        g_local = g["W"]
        if self.mutate == "ratio after clipping":
            g_local = self.clipped(g)["W"]
        if self.mutate == "ratio with weight decay":
            g_local = add(g_local, theta["W"], self.s.weight_decay)
        lam = {"re-balancing flipped": -self.s.lam, "lambda omitted": 1.0}.get(self.mutate or "", self.s.lam)
        joint = (self.s.norm == "joint") != (self.mutate == "norm swapped")
        term: Part = {}
        for name in g_bal:  # W is weight and bias: one ratio for both, or one for each
            top, bottom = (g_local, g_bal) if joint else ({name: g_local[name]}, {name: g_bal[name]})
            ratio = norm(top) / norm(bottom)
            if self.mutate == "ratio over the model":
                ratio = norm(*g.values()) / norm(bottom)
            if self.mutate == "ratio inverted":
                ratio = 1 / ratio
            if self.mutate == "ratio omitted":
                ratio = 1.0
            term[name] = lam * g_bal[name] * ratio
        if self.mutate == "bias not re-balanced":
            term["bias"] = torch.zeros_like(term["bias"])
        return term, into_P

    def balanced_gradient(self, theta: Model, received: Model, data: Data, G: Table) -> tuple[Part, Part] | None:
        """Eq. mixed balanced gradients, and what the balanced loss would send to P if its features were not constant;
        None where no class has anything to say."""
        s = self.s
        T = {"threshold strict": s.threshold + 1, "threshold of one": 1}.get(self.mutate or "", s.threshold)
        n = [len(of_class(data, c)[1]) for c in range(self.C)]
        L_bal = [c for c in range(self.C) if n[c] >= T and s.use_real_data]  # (1): "reaches a threshold T"
        missing = [c for c in range(self.C) if c not in L_bal]  # (2): L \ L_bal
        known = [c for c in missing if c in G]
        if self.mutate == "absent class skipped":
            known = [c for c in known if n[c]]
        if not L_bal and not known:
            return None
        at = received if self.mutate == "real gradient frozen" else theta
        both = self.mutate == "real gradient uses both heads" and s.two_stream
        heads = [theta["W_hat"]] if both else []
        real, into_P = zeros(theta["W"]), zeros(theta["P"])
        for c in L_bal:  # Eq. real data gradient: grad_W L(P, W; D_bal_c), with D_bal_c all T examples of c
            D_c = of_class(data, c)
            g_c = grad(lambda W, D=D_c: L(at["P"], [W, *heads], D), at["W"])
            real = add(real, g_c, n[c] if self.mutate == "real gradient summed over samples" else 1.0)
            if self.mutate == "features not detached":
                into_P = add(into_P, grad(lambda P, D=D_c: L(P, [theta["W"]], D), theta["P"]), 1 / self.C)
        if self.mutate == "real classes averaged" and L_bal:
            real = add(zeros(real), real, 1 / len(L_bal))
        if self.mutate == "balanced set pooled" and L_bal:
            parts = [of_class(data, c) for c in L_bal]
            D_bal = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
            mean = grad(lambda W: L(theta["P"], [W], D_bal), theta["W"])
            real = add(zeros(mean), mean, len(L_bal))
        pro = zeros(theta["W"])
        for c in known:  # Eq. gradient prototypes: the global one stands in for class c
            pro = add(pro, G[c])
        if known and (s.unseen == "mean" or self.mutate == "unseen class imputed"):
            # the known prototypes' mean stands in for the rest of L \ L_bal
            pro = add(zeros(pro), pro, len(missing) / len(known))
        total = add(real, pro)
        return (total if self.mutate == "1/C forgotten" else add(zeros(total), total, 1 / self.C)), into_P

    def clipped(self, g: Model) -> Model:
        """The gradient scaled to a global norm of at most clip_norm, over P, W and W_hat together."""
        if self.s.clip_norm is None:
            return dict(g)
        measured = [g[part] for part in g if not (part == "W_hat" and self.mutate == "clipped without W_hat")]
        scale = self.s.clip_norm / (norm(*measured) + 1e-6)  # as torch's clip_grad_norm_
        if scale > 1 and self.mutate != "clipping scales up":
            scale = 1.0
        return {part: add(zeros(g[part]), g[part], scale) for part in g}

    def optimizer_step(self, theta: Model, g: Model, momentum: Model) -> tuple[Model, Model]:
        """SGD with momentum as PyTorch has it: the first buffer is the gradient. Eq. updating W_hat and P is the case
        without momentum."""
        after, buffers = {}, {}
        for part in theta:
            d = add(g[part], theta[part], self.s.weight_decay)
            buffers[part] = add(d, momentum[part], self.s.momentum) if part in momentum else d
            after[part] = add(theta[part], buffers[part], -self.s.lr)
        return after, buffers

    def aggregate(self, theta: Model, trained: Mapping[int, Model], clients: Sequence[Data]) -> Model:
        """Eq. server aggregation. Printed with a minus before theta_k - theta, which would go uphill: the sign is that
        of a step towards the clients."""
        sizes = {k: 1 if self.mutate == "server average unweighted" else len(clients[k][1]) for k in trained}
        eta_s = 1.0 if self.mutate == "server_lr ignored" else self.s.server_lr
        if self.mutate == "server step flipped":
            eta_s = -eta_s
        if self.mutate == "server divides by clients":
            eta_s = eta_s / len(trained)
        new: Model = {}
        for part in theta:
            new[part] = theta[part]
            if part == "W_hat" and self.mutate == "W_hat not aggregated":
                continue
            for k in trained:  # sum over C^t of |D_k| / sum |D_i| times the client's change
                delta = add(trained[k][part], theta[part], -1.0)
                new[part] = add(new[part], delta, eta_s * sizes[k] / sum(sizes.values()))
        return new
