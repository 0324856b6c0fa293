"""The checks of `torch-marlin-metal doctor` and of `doctor --deep`. Checks that are most likely to fail come first.

`python -m torch_marlin_metal.cli.doctor_steps NAME` runs one check and prints the measured values as one line of JSON.
A check fails if it raises an exception or if its process crashes. `doctor` reports both.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_marlin_metal.cli import doctor_variants
from torch_marlin_metal.gpu.tuning.errors import check

if TYPE_CHECKING:
    from torch_marlin_metal import PackedWeight

MARKER = "doctor: "
Values = dict[str, Any]


def _weight(K: int = 512, N: int = 256, seed: int = 0) -> PackedWeight:
    from torch_marlin_metal import quantize_weight

    return quantize_weight(
        torch.randn(N, K, generator=torch.Generator().manual_seed(seed), device="cpu"), "uint4b8", group_size=64
    )


def _problem(K: int = 512, N: int = 256) -> tuple[Tensor, Callable[..., Tensor], Tensor]:
    """Returns activations [40, K] on mps, a function that multiplies them by a weight [K, N], and the exact product."""
    from torch_marlin_metal import gemm

    weight = _weight(K, N)
    a = torch.randn(40, K, generator=torch.Generator().manual_seed(1), device="cpu").half()
    dense = weight.dequantize().double()
    moved = weight.to("mps")

    def product(rows: Tensor, variant: str = "auto") -> Tensor:
        return gemm(rows, moved, variant=variant)

    return a.to("mps"), product, a.double() @ dense


def _short(errors: dict[str, float]) -> Values:
    return {name: float(f"{error:.1e}") for name, error in errors.items()}


def products_on_cpu() -> Values:
    """Compares a product of each weight format, and torch.matmul with the decoded weight, with fp64."""
    from torch_marlin_metal import WEIGHT_FORMATS, MarlinLinear, quantize_weight

    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(256, 512, generator=generator, device="cpu")
    a = torch.randn(40, 512, generator=generator, device="cpu")
    errors = {"torch.matmul": 0.0}
    for name in WEIGHT_FORMATS:
        layer = MarlinLinear.from_packed(quantize_weight(dense, name, scale_dtype=torch.float32))
        weight = layer.dequantize().T
        expected = a.double() @ weight.double()
        peer = check(a @ weight, expected, f"torch.matmul of {name}")
        errors["torch.matmul"] = max(errors["torch.matmul"], peer)
        errors[name] = max(
            check(layer(rows), rows.double() @ weight.double(), f"{name}, {len(rows)} rows") for rows in (a[:1], a)
        )
    return _short({f"error of {name}": error for name, error in errors.items()})


def first_product() -> Values:
    """Times the first product of a process, which compiles kernels, and the second product, which does not."""
    a, product, expected = _problem()
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        found = product(a[:1])
        torch.mps.synchronize()
        seconds.append(time.perf_counter() - begin)
        check(found, expected[:1], "the first product")
    return {"first_ms": round(1e3 * seconds[0], 1), "second_ms": round(1e3 * seconds[1], 2)}


def half_subnormals() -> Values:
    """Tests if the GPU keeps subnormal halves when it widens them. The kernels' fastest decode requires this."""
    kept = torch.ops.torch_marlin_metal._half_subnormals(torch.empty(0, device="mps"))
    return {"half_subnormals": "kept" if kept else "flushed"}


def products_on_mps() -> Values:
    """Compares every kernel of `gemm` and `moe_gemm` with fp64, in one weight format with fp16 activations."""
    return {**half_subnormals(), **_short(doctor_variants.compare(doctor_variants.ONE_KIND))}


def every_variant() -> Values:
    """Compares every kernel of `gemm` and `moe_gemm`, and torch.matmul, with fp64 in every format and dtype."""
    return {**half_subnormals(), **_short(doctor_variants.compare(doctor_variants.EVERY_KIND))}


def profiled_products() -> Values:
    """Runs products of several dispatches while PyTorch's profiler records.

    The profiler ends the command encoder after each kernel, so the kernels of a product have separate encoders.
    """
    a, product, expected = _problem(K=4096, N=64)
    for wait in (False, True):
        torch.mps.profiler.start("interval", wait)
        try:
            for variant, rows in (("gemv", 1), ("fused", 40), ("striped", 40)):
                check(product(a[:rows], variant), expected[:rows], f"{variant} in a profile")
        finally:
            torch.mps.profiler.stop()
    return {"profiles": 2}


def commits() -> Values:
    """Compares, bit by bit, products that commit after each kernel with products that never commit."""
    from torch_marlin_metal import tuning

    a, product, _ = _problem()
    results = []
    for interval in (0.0, 1e-9):
        tuning.set_commit_interval(interval)
        state = a
        for _ in range(20):
            state = a + product(state)[:, :1] * 1e-3
        results.append(state.cpu())
    if not torch.equal(results[0], results[1]):
        raise RuntimeError("products with commits in between: expected the same bits as without, got others")
    return {"products": 40}


def mlstm() -> Values:
    """Checks that the mLSTM uses the precise `exp` and `log`: mps agrees with the CPU, and NaN stays NaN."""
    operators = torch.ops.torch_marlin_metal
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 32, generator=generator, device="cpu") for _ in range(3))
    i, f = (8 * torch.randn(1, 2, 64, generator=generator, device="cpu") for _ in range(2))
    inputs = (q, k, v, i, f)
    expected = operators.mlstm(*inputs)[0]
    found = operators.mlstm(*(tensor.to("mps") for tensor in inputs))[0].cpu()
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    if not error < 1e-4:
        raise RuntimeError(f"mlstm: expected the CPU's result within 0.0001 of its largest number, got {error}")
    i[0, 0, 5] = torch.nan
    if not operators.mlstm(*(tensor.to("mps") for tensor in inputs))[0][0, 0, 5:].isnan().all():
        raise RuntimeError("mlstm: expected NaN after a NaN gate, got numbers")
    return {"largest_difference": error}


def gpu_time() -> Values:
    """Times a product with the GPU's clock and with the host's clock. Host times include the host's own work."""
    from torch_marlin_metal.gpu.tuning.chains import gpu_clock, wall_clock
    from torch_marlin_metal.gpu.tuning.peers import OURS, rivals
    from torch_marlin_metal.gpu.tuning.products import Product

    product = Product(1024, 1024)
    chains, _ = rivals(product.make_weight("mps"), torch.randn(1, 1024, dtype=torch.float16, device="mps"), 10**6)
    chain = chains[OURS]
    chain.measure(2)
    times = {clock.__name__: [clock(chain, 64) for _ in range(5)] for clock in (gpu_clock, wall_clock)}
    values = {name: round(1e6 * statistics.median(one.seconds for one in found), 1) for name, found in times.items()}
    if not values["gpu_clock"] > 0:
        raise RuntimeError(f"gpu_time: expected a time above 0, got {values['gpu_clock']}")
    host = round(1e6 * statistics.median(one.host_seconds for one in times["gpu_clock"]), 1)
    return {"gpu_us": values["gpu_clock"], "wall_us": values["wall_clock"], "host_us": host}


QUICK: dict[str, Callable[[], Values]] = {
    "products on cpu": products_on_cpu,
    "products on mps": products_on_mps,
}
STEPS: dict[str, Callable[[], Values]] = {
    "first product": first_product,
    "first product again": first_product,
    "every variant": every_variant,
    "products while profiling": profiled_products,
    "commits": commits,
    "mlstm": mlstm,
    "gpu time": gpu_time,
}


def values_in(printed: str) -> Values:
    lines = [line.removeprefix(MARKER) for line in printed.splitlines() if line.startswith(MARKER)]
    if not lines:
        raise ValueError("doctor: the check printed no values")
    values: Values = json.loads(lines[-1])
    return values


if __name__ == "__main__":
    print(MARKER + json.dumps({**QUICK, **STEPS}[sys.argv[1]]()), flush=True)
