"""The most that this machine's cores do: large float matrices multiplied, one process and one thread on each core.

`python sgemm.py CORE SECONDS` says that it is ready, waits for a line, multiplies on that core for so long, and prints
its GFLOP a second. So all cores are measured over the same time.
"""

from __future__ import annotations

import os
import sys
import time

import torch

SIZE = 2048


def main() -> None:
    core, seconds = int(sys.argv[1]), float(sys.argv[2])
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    a, b = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    out = torch.mm(a, b)
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.perf_counter()
    count = 0
    while time.perf_counter() - begun < seconds:
        torch.mm(a, b, out=out)
        count += 1
    print(count * 2 * SIZE**3 / (time.perf_counter() - begun) / 1e9)


if __name__ == "__main__":
    main()
