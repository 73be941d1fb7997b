"""Where the time of a local step goes: the share of each operator, and what it reaches of the core's sgemm.

    python benchmarks/step_profile.py            McMahan's CNN on 28 x 28, batches of 64
    python benchmarks/step_profile.py --net resnet56 --shape 3 32 32

One core, as one of redgrape's workers has it. Convolutions and matrix products are where the multiplications are; the
rest moves memory. The same step with an encoder that multiplies in bfloat16 is measured in turns with it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from redgrape import nets
from redgrape.determinism import keep_freed_memory, same_bits_everywhere
from redgrape.learning.sgd import Sgd
from redgrape.nets.mixed import in_bfloat16
from redgrape.nets.net import Net

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from saved import training_flop

NAMES = {
    "aten::mkldnn_convolution": "convolution, forward",
    "aten::_mkldnn_convolution": "convolution, forward",
    "aten::mkldnn_convolution_backward": "convolution, backward",
    "aten::convolution_backward": "convolution, backward",
    "aten::addmm": "linear",
    "aten::mm": "linear",
    "aten::_fused_sgd_": "SGD",
    "aten::max_pool2d_with_indices": "pooling",
    "aten::max_pool2d_with_indices_backward": "pooling",
    "aten::native_batch_norm": "BatchNorm",
    "aten::native_batch_norm_backward": "BatchNorm",
    "aten::relu_": "ReLU",
    "aten::clamp_min_": "ReLU",
    "aten::threshold_backward": "ReLU",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--net", default="cnn")
    parser.add_argument("--shape", type=int, nargs=3, default=[1, 28, 28])
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with same_bits_everywhere():
        measure(options)


def measure(options: argparse.Namespace) -> None:
    def build() -> Net:
        return nets.build(options.net, tuple(options.shape), 10, 0)

    step, rounded = (step_of(net, options) for net in (build(), in_bfloat16(build)))
    a, b = torch.rand(2000, 2000), torch.rand(2000, 2000)
    turns = [(fastest(step, 20), fastest(rounded, 20)) for _ in range(3)]
    seconds, in_turn = (min(times) for times in zip(*turns, strict=True))
    peak = 2 * 2000**3 / fastest(lambda: a @ b, 10)
    reached = options.batch_size * training_flop(options.net, tuple(options.shape)) / seconds
    share = f"{100 * reached / peak:.0f} % of sgemm ({peak / 1e9:.0f} GFLOP/s)"
    print(f"{options.net}: {1000 * seconds:.2f} ms a step, {share}")
    ratios = sorted(single / half for single, half in turns)
    print(f"in bfloat16: {1000 * in_turn:.2f} ms, {ratios[1]:.2f} ({ratios[0]:.2f} to {ratios[2]:.2f}) times as fast\n")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(20):
            step()
    shares: dict[str, float] = {}
    for event in profiler.key_averages():
        name = NAMES.get(event.key, "the rest")
        shares[name] = shares.get(name, 0.0) + event.self_cpu_time_total
    print("| operator | share of a step |\n|---|---|")
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        print(f"| {name} | {100 * share / sum(shares.values()):.0f} % |")


def step_of(net: Net, options: argparse.Namespace) -> Callable[[], None]:
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
    x = torch.rand(options.batch_size, *options.shape).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (options.batch_size,))
    optimizer = Sgd(list(net.parameters()), 0.01, 0.9)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def fastest(action: Callable[[], object], times: int) -> float:
    action()
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        action()
        found.append(time.perf_counter() - begin)
    return min(found)


if __name__ == "__main__":
    main()
