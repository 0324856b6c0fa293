"""Predicts the time of a decoded token on host and GPU of each Apple chip, with and without early commits.

    python -m lab.predictions.commits [--interval-ms 3] [--host-us 7.5]

Nothing is measured. The GPU's time of a product comes from the model; every other kernel has the same assumed time. The
host takes the same time for each operation. The GPU starts a command buffer when the buffer is committed and the
previous buffer has ended. Each boundary between two buffers costs additional time.
"""

import argparse
from collections.abc import Sequence

from lab import model
from torch_marlin_metal.profiling import AppleSiliconGPU

# Llama 3 8B: number of layers, (N, K) of a layer's products (q, k, v, o, gate, up, down), and of the output layer.
LAYERS = 32
PRODUCTS = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
HEAD = (128256, 4096)
# Kernels of PyTorch in each layer: norms, rotary embedding, cache, attention, activation, residuals. A decode step of a
# similar model took about 1300 operations and 10 ms of host time (executorch#17671).
OTHER_KERNELS = 33
KERNEL_SECONDS = 3e-6  # assumed GPU time of one of PyTorch's kernels
BOUNDARY_SECONDS = 20e-6  # GPU time between two command buffers (mlx#4521)
WAIT_SECONDS = 100e-6  # assumed time from the end of a token's last kernel until the host continues


def operations(gpu: str) -> list[tuple[float, float]]:
    """Returns (seconds on the GPU, seconds that the commit policy predicts) of each operation of a token, in order."""
    chip = AppleSiliconGPU.from_name(gpu)
    predicted = {(N, K): model.best(model.Problem(1, N, K), chip)[1] for N, K in {*PRODUCTS, HEAD}}
    layer = []
    for index, shape in enumerate(PRODUCTS):
        others = OTHER_KERNELS * (index + 1) // len(PRODUCTS) - OTHER_KERNELS * index // len(PRODUCTS)
        layer += [(KERNEL_SECONDS, 0.0)] * others + [(predicted[shape], predicted[shape])]
    return layer * LAYERS + [(predicted[HEAD], predicted[HEAD])]


def token_seconds(work: Sequence[tuple[float, float]], host: float, interval: float) -> tuple[float, int]:
    """Returns the time of a token and the number of its command buffers.

    Args:
        work: the result of `operations`.
        host: seconds that the host needs to encode one operation.
        interval: predicted seconds between two commits; 0 means one commit at the end.
    """
    now = free = buffer = pending = 0.0
    buffers = 0
    for index, (seconds, predicted) in enumerate(work):
        now += host
        buffer += seconds
        pending += predicted
        if index == len(work) - 1 or (interval > 0 and pending >= interval):
            free = max(free, now) + BOUNDARY_SECONDS + buffer
            buffer = pending = 0.0
            buffers += 1
    return free + WAIT_SECONDS, buffers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interval-ms", type=float, default=3.0, help="of predicted GPU time between commits")
    parser.add_argument("--host-us", type=float, default=7.5, help="of encoding one operation")
    arguments = parser.parse_args()
    host = arguments.host_us * 1e-6
    print(f"Llama 3 8B, one token, {arguments.host_us} us of host time an operation; a model, not a measurement")
    print(f"{'chip':10}{'host ms':>9}{'GPU ms':>9}{'one commit':>12}{'with commits':>14}{'buffers':>9}{'times':>7}")
    for name in AppleSiliconGPU.names():
        work = operations(name)
        whole, _ = token_seconds(work, host, 0)
        split, buffers = token_seconds(work, host, arguments.interval_ms * 1e-3)
        gpu = sum(seconds for seconds, _ in work)
        row = f"{name:10}{1e3 * host * len(work):9.1f}{1e3 * gpu:9.1f}{1e3 * whole:12.1f}{1e3 * split:14.1f}"
        print(f"{row}{buffers:9}{whole / split:7.2f}")


if __name__ == "__main__":
    main()
