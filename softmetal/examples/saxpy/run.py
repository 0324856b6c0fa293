"""Builds saxpy.mm and runs it on Linux: `python softmetal/examples/saxpy/run.py`."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))  # the repository, which holds softmetal

import torch  # noqa: E402

import softmetal  # noqa: E402  # before anything asks torch about MPS

torch.ops.load_library(softmetal.build_extension("saxpy", [HERE / "saxpy.mm"]))
x, y = torch.randn(1000, device="mps"), torch.randn(1000, device="mps")
with softmetal.checked():
    out = torch.ops.saxpy.saxpy(2.0, x, y)
torch.testing.assert_close(out.cpu(), 2 * x.cpu() + y.cpu())
(counts,) = [c for c in softmetal.counters() if c.kernel == "saxpy"]
print(f"{counts.kernel}: {counts.threads} threads, {counts.device_bytes_read} bytes read, no fault")
