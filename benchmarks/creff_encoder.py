"""What a run of CReFF tells of FedAvg: the averaged classifier beside the re-trained one, on the same encoder.

    python benchmarks/creff_encoder.py RUN --data-root DATA [--precision bfloat16]

CReFF trains its encoder and its averaged classifier as FedAvg does, bit for bit, and deploys another classifier. So the
server states of its run hold FedAvg's model too. Each checkpoint that is still there gives a line for each: overall
accuracy, head, middle and tail. A run keeps its last two; copy others out of RUN/checkpoints while it trains, and name
the copies with --also.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch

from redgrape import tree
from redgrape.data.prepare import prepare
from redgrape.determinism import same_bits_everywhere
from redgrape.engines import ClientHalf
from redgrape.engines.in_process import InProcess
from redgrape.nets.mixed import in_bfloat16
from redgrape.runs.experiment import Experiment


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="copies of server.safetensors")
    options = parser.parse_args()
    torch.set_num_threads(1)
    experiment = Experiment.read(options.run / "experiment.toml")
    federation = prepare(experiment.data, experiment.seed, options.data_root)
    build = experiment.builder(federation)
    if options.precision == "bfloat16":
        build = partial(in_bfloat16, build)
    half = ClientHalf(
        experiment.method.create(), federation, build, experiment.seed, experiment.rounds, torch.device("cpu")
    )
    print("| state | classifier | overall | head | middle | tail |")
    print("|---|---|---|---|---|---|")
    for path in [*options.also, *sorted(options.run.glob("checkpoints/*/server.safetensors"))]:
        server = tree.from_bytes(path.read_bytes())
        averaged = {f"classifier.{name}": t for name, t in server["head"].items()}
        name = path.parent.name if path.name == "server.safetensors" else path.stem
        for classifier, model in (("FedAvg's", {**server["model"], **averaged}), ("CReFF's", server["model"])):
            with same_bits_everywhere():
                scores = InProcess(half).evaluate(model, "test").record(federation.groups)
            shown = [f"{100 * scores[figure]:.1f}" for figure in ("accuracy", "head", "middle", "tail")]
            print(f"| {name} | {classifier} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
