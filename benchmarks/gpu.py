"""Does redgrape work on this GPU, are its bits equal from run to run, and how fast is it?

python benchmarks/gpu.py                       # every method on the digits, CPU against all GPUs
python benchmarks/gpu.py --methods redgrape --workers 4 --precision bfloat16
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import redgrape as rg
from redgrape import methods
from redgrape.data.federation import Federation
from redgrape.errors import RedgrapeError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=methods.names(), metavar="NAME")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--workers", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--net", default="cnn")
    options = parser.parse_args()
    federation = rg.data.load("digits", ir=50.0, clients=10, auxiliary=8)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"torch {torch.__version__}, GPUs: {', '.join(names) or 'none'}")
    print(f"{'method':<18}{'s/round cpu':>12}{'s/round gpu':>12}{'accuracy cpu':>13}{'gpu':>7}  equal bits")
    failed = False
    for name in options.methods:
        try:
            cpu, on_cpu, _ = trained(name, federation, options, "cpu", "float32")
            gpu, on_gpu, model = trained(name, federation, options, options.device, options.precision)
            _, _, again = trained(name, federation, options, options.device, options.precision)
        except (RedgrapeError, RuntimeError) as error:
            failed = True
            print(f"{name:<18}{str(error).splitlines()[0]}")
            continue
        same = all(torch.equal(model[part], again[part]) for part in model)
        failed |= not same
        print(f"{name:<18}{cpu:>12.2f}{gpu:>12.2f}{on_cpu:>13.3f}{on_gpu:>7.3f}  {'yes' if same else 'NO'}")
    return int(failed)


def trained(
    name: str, federation: Federation, options: argparse.Namespace, device: str, precision: str
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Seconds a round without the first, the accuracy after the last, and the model."""
    build = rg.nets.builder(options.net, federation)
    workers = 1 if device == "cpu" else options.workers
    where = {"workers": workers, "device": device, "precision": precision}
    moments = []
    with rg.Training(methods.load(name)(lr=0.02), federation, build, rounds=options.rounds, **where) as training:
        for step in training.steps():
            moments.append(time.perf_counter())
            last = step
    seconds = (moments[-1] - moments[0]) / max(1, len(moments) - 1)
    return seconds, last.record["test"]["accuracy"], last.state.server["model"]


if __name__ == "__main__":
    sys.exit(main())
