"""Plans a product without running it. A plan contains the candidates, the chosen candidate and the reason."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Group

from torch_marlin_metal.extension import native
from torch_marlin_metal.formats import resolve_group_size
from torch_marlin_metal.formats import weight_format as format_of
from torch_marlin_metal.gpu.device import AppleSiliconGPU, as_gpu
from torch_marlin_metal.gpu.occupancy import Occupancy, occupancy_of
from torch_marlin_metal.printing import RichText, table

_FLOATS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
_CODES = {torch.uint8: "uint8", torch.int8: "int8"}
_DTYPES = _FLOATS | _CODES


@dataclass(frozen=True)
class PlannedDispatch:
    """The launch of one kernel.

    Attributes:
        kernel: the kernel's name, for example "gemm_fused", or "torch.matmul" for PyTorch's own product.
        function: the name of the kernel's instance, for example "gemm_fused_uint4b8_float16".
        grid: number of threadgroups in each dimension.
        threads: threads per threadgroup.
        threadgroup_bytes: bytes of threadgroup memory.
        half_registers: 16-bit registers per thread, counted for the M1. 0 if the kernel computes no products.
        text: the complete launch in one line, with sizes and function constants.
        occupancy: the threadgroups that are resident on a core, or None if the kernel's registers are not known.
        seconds: a rough estimate of the kernel's time, not a measurement. The planner uses it to compare tiles.
    """

    kernel: str
    function: str
    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    threadgroup_bytes: int
    half_registers: int
    text: str
    occupancy: Occupancy | None
    seconds: float


@dataclass(frozen=True)
class PlanCandidate:
    """One of the ways to compute a product.

    Attributes:
        name: the argument `variant` of `gemm` that selects this candidate, for example "double_buffered:128x64x16".
        variant: the kernel variant.
        tile: M, N and K of one step of a threadgroup.
        seconds: a rough estimate of the total time of the launches. For kernels that are not in the planner's table,
            the estimate includes only bytes and matrix products.
        dispatches: the kernel launches, in order.
    """

    name: str
    variant: str
    tile: tuple[int, int, int]
    seconds: float
    dispatches: tuple[PlannedDispatch, ...]


@dataclass(frozen=True)
class GemmPlan(RichText):
    """All candidates for a product, and the chosen one.

    Attributes:
        M: rows of the activations.
        N: columns of the weight.
        K: rows of the weight.
        weight_format: format of the weight.
        group_size: group size of the weight; K if there is one group.
        dtype: dtype of the activations.
        gpu: the GPU of the plan.
        chosen: the candidate that `gemm` would use.
        reason: the reason for the choice.
        candidates: all candidates, ordered by estimated time.
    """

    M: int
    N: int
    K: int
    weight_format: str
    group_size: int
    dtype: torch.dtype
    gpu: AppleSiliconGPU
    chosen: PlanCandidate
    reason: str
    candidates: tuple[PlanCandidate, ...]

    @property
    def title(self) -> str:
        """Returns the product in words."""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{dtype} [{self.M}, {self.K}] x {self.weight_format} g{self.group_size} [{self.K}, {self.N}] "
            f"on {self.gpu.name} ({self.gpu.cores} cores)"
        )

    def __rich__(self) -> Group:
        right = ("predicted us", "threads", "bytes", "registers", "SIMD/core")
        rows = [
            (
                "->" if candidate is self.chosen and not index else "",
                f"  then {dispatch.kernel}" if index else candidate.variant,
                "" if index else "x".join(map(str, candidate.tile)) if any(candidate.tile) else "-",
                "" if index else f"{candidate.seconds * 1e6:.1f}",
                "x".join(map(str, dispatch.grid)),
                str(dispatch.threads[0] * dispatch.threads[1]),
                str(dispatch.threadgroup_bytes),
                *((str(dispatch.half_registers), str(held.simdgroups)) if (held := dispatch.occupancy) else ("", "")),
            )
            for candidate in self.candidates
            for index, dispatch in enumerate(candidate.dispatches)
        ]
        reason = f"{self.chosen.name}: {self.reason}"
        headings = ("", "variant", "tile", right[0], "grid", *right[1:])
        lines = "\n  then ".join(dispatch.text for dispatch in self.chosen.dispatches)
        return Group(table(self.title, *headings, rows=rows, right=right, caption=reason), lines)


def plan(
    M: int,
    N: int,
    K: int,
    *,
    weight_format: str = "uint4b8",
    group_size: int | None = None,
    dtype: torch.dtype = torch.float16,
    scales_dtype: torch.dtype | None = None,
    zeros_dtype: torch.dtype = torch.uint8,
    has_perm: bool = False,
    has_global_scale: bool = False,
    has_bias: bool = False,
    variant: str = "auto",
    gpu: AppleSiliconGPU | str | None = None,
    half_subnormals: bool = True,
    tuned: bool = True,
) -> GemmPlan:
    """Returns the planner's choice for a product on a GPU, with the reason and all other candidates.

    No kernel runs. The plan assumes aligned, contiguous tensors.

    Args:
        M: rows of the activations `[M, K]`.
        N: columns of the weight.
        K: rows of the weight, a multiple of 8.
        weight_format: a weight format or an alias.
        group_size: group size of the weight, as in `quantize_weight`.
        dtype: dtype of the activations: float16, bfloat16 or float32.
        scales_dtype: dtype of the scales of a format without coded scales. None means `dtype`; uint8 and int8 mean
            two-level scales.
        zeros_dtype: dtype of zero points. Biases have `scales_dtype`, or uint8 if the scales have two levels.
        has_perm: True if the weight has an act-order permutation.
        has_global_scale: True if the weight has a global scale (nvfp4).
        has_bias: True if a bias is added.
        variant: "auto", "rounded", or the name of the only variant to consider.
        gpu: a GPU, its name, or None for this machine's GPU.
        half_subnormals: True if the GPU keeps subnormal fp16 numbers, False if it flushes them to zero.
        tuned: True if "auto" and "rounded" use choices measured on this machine's GPU (see `tuning`). These choices
            never apply to another GPU.

    Raises:
        ValueError: an argument is out of range or unknown. The message names the argument.

    Examples:
        >>> tmm.profiling.plan(1, 4096, 4096, gpu="M1 Max").chosen.variant
        'gemv'
    """
    row = format_of(weight_format)
    _check(M, N, K, dtype, scales_dtype, zeros_dtype)
    group_size = resolve_group_size("plan", row, group_size, K)
    variants = ("auto", "rounded", *native.gemm_variants())
    if variant not in variants:
        raise ValueError(f"plan: variant: expected one of {', '.join(variants)}, got {variant!r}")
    scales = torch.uint8 if row.has_coded_scales else scales_dtype or dtype
    zeros = zeros_dtype
    if row.zeros_role == "bias":
        zeros = torch.uint8 if scales in _CODES else scales
    found = as_gpu("plan", gpu)
    rows, chosen, reason = native.gemm_plans(
        chip=found.name,
        cores=found.cores,
        half_subnormals=half_subnormals,
        M=M,
        N=N,
        K=K,
        weight_format=row.name,
        group_size=group_size,
        activations=_DTYPES[dtype],
        scales=_DTYPES[scales],
        zeros=_DTYPES[zeros],
        has_perm=has_perm,
        has_global_scale=has_global_scale,
        has_bias=has_bias,
        variant=variant,
        tuned=tuned and gpu is None,
        own_system=gpu is None,
    )
    candidates = [_candidate(found, *entry) for entry in rows]
    ordered = sorted(candidates, key=lambda candidate: candidate.seconds)
    return GemmPlan(M, N, K, row.name, group_size, dtype, found, candidates[chosen], reason, tuple(ordered))


def first_of_each_variant(candidates: Iterable[PlanCandidate]) -> list[PlanCandidate]:
    """Returns the first candidate of each variant, in the order of `candidates`."""
    first: dict[str, PlanCandidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.variant, candidate)
    return list(first.values())


def element_name(function: str, dtype: torch.dtype) -> str:
    """Returns the planner's name of an activation dtype.

    Raises:
        ValueError: the dtype is not float16, bfloat16 or float32. The message names the function.
    """
    if dtype not in _FLOATS:
        raise ValueError(f"{function}: dtype: expected float16, bfloat16 or float32, got {dtype}")
    return _FLOATS[dtype]


def _check(
    M: int, N: int, K: int, dtype: torch.dtype, scales_dtype: torch.dtype | None, zeros_dtype: torch.dtype
) -> None:
    largest = 2**31 - 1
    for name, value in (("M", M), ("N", N), ("K", K)):
        if not 1 <= value <= largest:
            raise ValueError(f"plan: {name}: expected 1 to {largest}, got {value}")
    if K % 8 != 0:
        raise ValueError(f"plan: K: expected a multiple of 8, got {K}")
    element_name("plan", dtype)
    if scales_dtype is not None and scales_dtype not in _DTYPES:
        raise ValueError(
            "plan: scales_dtype: expected float16, bfloat16, float32, or uint8 or int8 for two levels, "
            f"got {scales_dtype}"
        )
    if zeros_dtype not in (*_FLOATS, torch.uint8):
        raise ValueError(f"plan: zeros_dtype: expected uint8, float16, bfloat16 or float32, got {zeros_dtype}")


def _candidate(
    gpu: AppleSiliconGPU,
    name: str,
    variant: str,
    tile: tuple[int, int, int],
    seconds: float,
    dispatches: list[dict[str, Any]],
) -> PlanCandidate:
    planned = tuple(PlannedDispatch(occupancy=_occupancy(entry, gpu), **entry) for entry in dispatches)
    return PlanCandidate(name, variant, tile, seconds, planned)


def _occupancy(dispatch: dict[str, Any], gpu: AppleSiliconGPU) -> Occupancy | None:
    if dispatch["half_registers"] == 0:
        return None
    threads = math.prod(dispatch["threads"])
    return occupancy_of(threads, dispatch["half_registers"], dispatch["threadgroup_bytes"], gpu)
