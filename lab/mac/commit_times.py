"""Times 200 products of 2048 x 2048, as in decoding. The host commits at several intervals of predicted GPU time.

python -m lab.mac.commit_times > commits.json
"""

import json
import statistics
import time

import torch

from torch_marlin_metal import gemm, quantize_weight, tuning
from torch_marlin_metal.cli.bench import describe_machine

INTERVALS = (0.0, 1.0, 3.0, 10.0)  # milliseconds; 0 never commits


def times(device: str, rounds: int = 5, products: int = 200) -> dict[str, float]:
    """Returns the median milliseconds for each interval."""
    weight = quantize_weight(torch.randn(2048, 2048, device="cpu"), "uint4b8", group_size=64).to(device)
    values = {}
    for milliseconds in INTERVALS:
        tuning.set_commit_interval(milliseconds * 1e-3)
        seconds = []
        for _ in range(rounds):
            torch.mps.synchronize()
            begin = time.perf_counter()
            state = torch.ones(1, 2048, dtype=torch.float16, device=device)
            for _ in range(products):
                state = gemm(state, weight)
            torch.mps.synchronize()
            seconds.append(time.perf_counter() - begin)
        values[f"every_{milliseconds:g}_ms"] = round(1e3 * statistics.median(seconds), 2)
    return values


if __name__ == "__main__":
    print(json.dumps({"machine": describe_machine("mps"), "milliseconds": times("mps")}, indent=1))
