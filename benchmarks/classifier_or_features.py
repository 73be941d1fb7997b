"""Where a method's advantage lies: in the classifier or in the features.

    python benchmarks/classifier_or_features.py --data-root DATA runs/A runs/B

Each finished run's encoder is kept as it is, and a new linear classifier is fitted to its features of the balanced set
that the run held out (`data.auxiliary`), which no client has seen. Where two runs differ with their own classifiers and
no longer with the new ones, their features are equally good, and what differed was the classifier.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from redgrape import nets
from redgrape.data.examples import Examples
from redgrape.data.prepare import prepare
from redgrape.exported.export import newest_state
from redgrape.reading.run_view import RunView
from redgrape.runs.experiment import Experiment
from redgrape.runs.folder import RunFolder

PENALTY = 1e-3  # of the squared weights; chosen beforehand


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--data-root", type=Path)
    options = parser.parse_args()
    print(
        "| run | own classifier: overall | tail | new classifier: overall | tail | head | norms of W, head and tail |"
    )
    print("|---|---|---|---|---|---|---|")
    for path in options.runs:
        run = RunView.read(path)
        experiment, state = Experiment.parse(run.experiment), newest_state(RunFolder.open(path), run)
        federation = prepare(experiment.data, experiment.seed, options.data_root)
        if federation.auxiliary is None or federation.test is None:
            parser.error(f"'{path}' holds no balanced set out (data.auxiliary)")
        shape = tuple(federation.test.x.shape[1:])
        net = nets.build(experiment.net.name, shape, federation.num_classes, seed=0)
        net.load_state_dict(state.server["model"])
        net.eval()
        test, balanced = features(net, federation.test), features(net, federation.auxiliary)
        fitted = fit(balanced, federation.auxiliary.labels, federation.num_classes)
        groups = federation.groups
        cells = []
        for weight, bias in ((net.classifier.weight, net.classifier.bias), fitted):
            right = (test @ weight.T + bias).argmax(1) == federation.test.labels
            cells.append([accuracy(right, federation.test.labels, of) for of in (None, groups.tail, groups.head)])
        norms = net.classifier.weight.norm(dim=1)
        words = [f"{cells[0][0]:.1f}", f"{cells[0][1]:.1f}", *(f"{value:.1f}" for value in cells[1])]
        words.append(f"{norms[list(groups.head)].mean():.2f}, {norms[list(groups.tail)].mean():.2f}")
        print(f"| {path.name} | " + " | ".join(words) + " |", flush=True)


@torch.no_grad()
def features(net: nets.Net, examples: Examples) -> Tensor:
    blocks = torch.arange(len(examples)).split(500)
    return torch.cat([net.encoder(examples.inputs(rows, torch.float32)).flatten(1) for rows in blocks])


def fit(x: Tensor, y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Multinomial logistic regression."""
    weight, bias = (torch.zeros(shape, requires_grad=True) for shape in ((num_classes, x.shape[1]), (num_classes,)))
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(x @ weight.T + bias, y) + PENALTY * weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return weight.detach(), bias.detach()


def accuracy(right: Tensor, labels: Tensor, classes: tuple[int, ...] | None) -> float:
    """Of the examples of these classes, in %, as in the tables; of all without them."""
    chosen = right if classes is None else right[torch.isin(labels, torch.tensor(classes))]
    return 100 * float(chosen.double().mean())


if __name__ == "__main__":
    main()
