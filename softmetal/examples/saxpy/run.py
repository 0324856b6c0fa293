"""Builds saxpy.mm and runs it on Linux: `python examples/saxpy/run.py`."""

from pathlib import Path

import torch

import softmetal

softmetal.install()  # before anything asks torch about MPS
torch.ops.load_library(softmetal.build_extension("saxpy", [Path(__file__).with_name("saxpy.mm")]))
x, y = torch.randn(1000, device="mps"), torch.randn(1000, device="mps")
with softmetal.checked():
    out = torch.ops.saxpy.saxpy(2.0, x, y)
torch.testing.assert_close(out.cpu(), 2 * x.cpu() + y.cpu())
(counts,) = [c for c in softmetal.counters() if c.kernel == "saxpy"]
print(f"{counts.kernel}: {counts.threads} threads, {counts.device_bytes_read} bytes read, no fault")
