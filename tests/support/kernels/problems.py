"""One product or dequantization: the inputs, the exact result, the error bound, the launches of gemv and dequantize."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.support import reference
from tests.support.experts import Experts
from tests.support.kernels.launch import (
    ELEMENT_NAMES,
    Counters,
    element_type,
    facts,
    launch,
    launch_elementwise,
    number,
    parameters,
    place,
    place_output,
)


@dataclass(frozen=True)
class Problem:
    """A problem, and the memory layout of its tensors."""

    weight_format: str
    M: int
    N: int
    K: int
    group_size: int
    dtype: torch.dtype
    scales_dtype: torch.dtype = torch.float16
    zeros_dtype: torch.dtype | None = None
    super_dtype: torch.dtype | None = None
    global_scale: tuple[int, ...] | None = None
    bias_dtype: torch.dtype | None = None
    has_perm: bool = False
    # The activations start a_offset elements after an aligned address. a_gap unused elements lie between two rows.
    a_offset: int = 0
    a_gap: int = 0
    # Allows vector loads if the tensors are aligned for them.
    vectors: bool = True
    block_scales: bool = False
    all_positive: bool = False
    # All rows are equal, and the bias is minus their product in fp32, so results are nearly 0. Errors of the sums are
    # then larger than the rounding of the result, even in fp16 and bf16.
    bias_cancels: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    a: torch.Tensor
    weight: reference.Weight
    bias: torch.Tensor | None
    perm: np.ndarray | None


@functools.lru_cache(maxsize=16)
def make_inputs(problem: Problem) -> Inputs:
    rng = np.random.default_rng([problem.seed, problem.M, problem.N, problem.K])
    p = problem
    weight = reference.make_weight(
        p.weight_format,
        p.K,
        p.N,
        p.group_size,
        scales_dtype=p.scales_dtype,
        zeros_dtype=p.zeros_dtype,
        super_dtype=p.super_dtype,
        global_scale_shape=p.global_scale if p.weight_format == "nvfp4" else None,
        seed=p.seed,
        block_scales=p.block_scales,
    )
    a = rng.uniform(0.5, 1.5, (p.M, p.K)) if p.all_positive else rng.standard_normal((p.M, p.K))
    bias = torch.from_numpy(rng.standard_normal(p.N)).to(p.bias_dtype) if p.bias_dtype else None
    perm = rng.permutation(p.K).astype(np.int32) if p.has_perm else None
    if p.bias_cancels:
        rows = torch.from_numpy(np.repeat(a[:1], p.M, axis=0)).to(p.dtype)
        return Inputs(rows, weight, -torch.from_numpy(reference.gemm(rows, weight, None, perm)[0][0]).float(), perm)
    return Inputs(torch.from_numpy(a).to(p.dtype), weight, bias, perm)


# Slots of tensors that only some weights have, by the name of the operators' argument.
SLOTS = {"zeros": "Zeros", "super_scales": "SuperScales", "super_zeros": "SuperZeros", "b_high": "High", "lut": "Lut"}
SLOTS |= {"global_scale": "GlobalScale", "perm": "Perm"}


def weight_buffers(
    weight: reference.Weight | Experts, N: int, perm: torch.Tensor | None = None, experts: int = 1
) -> tuple[dict, dict]:
    """Returns the buffers (by slot) and function constants of a packed weight, or of the weights of several experts."""
    held = weight.arguments | ({} if perm is None else {"perm": perm})
    buffers = {"Packed": place(weight.b_packed), "Scales": place(weight.scales)}
    buffers |= {slot: place(held[name]) for name, slot in SLOTS.items() if name in held}
    constants = {"scales_type": element_type(weight.scales.dtype), "block_scales": weight.scales.shape[-1] < N}
    for constant, name in (("zeros_type", "zeros"), ("super_type", "super_scales")):
        constants |= {constant: element_type(held[name].dtype)} if name in held else {}
    if "global_scale" in held:
        constants |= {"has_global_scale": True, "global_scale_per_column": held["global_scale"].numel() > experts}
    return buffers, constants | ({"has_perm": True} if "perm" in held else {})


def _weight_buffers(problem: Problem, inputs: Inputs) -> tuple[dict, dict]:
    return weight_buffers(inputs.weight, problem.N, None if inputs.perm is None else torch.from_numpy(inputs.perm))


def _product_buffers(problem: Problem, inputs: Inputs) -> tuple[dict, dict]:
    buffers, constants = _weight_buffers(problem, inputs)
    stride = problem.K + problem.a_gap
    buffers["A"] = place(inputs.a, offset=problem.a_offset, row_stride=stride)
    if inputs.bias is not None:
        buffers["Bias"] = place(inputs.bias)
        constants |= {"has_bias": True, "bias_type": element_type(inputs.bias.dtype)}
    constants["vector_columns"] = problem.vectors and problem.N % 4 == 0
    constants["vector_activations"] = (
        problem.vectors and not problem.has_perm and problem.a_offset % 4 == 0 and stride % 4 == 0
    )
    return buffers, constants


@dataclass(frozen=True)
class Shares:
    """The partial sums that a product writes and a reduction adds."""

    shape: tuple[int, ...]
    kernel: str
    struct: str
    fields: dict[str, int]
    grid: tuple[int, int, int]  # columns, rows and layers of the reduction
    are_some: bool = False  # True if the product also writes some outputs directly


def sliced(problem: Problem, slices: int) -> Shares | None:
    if slices == 1:
        return None
    shape = (slices, problem.M, problem.N)
    fields = {"M": problem.M, "N": problem.N, "splits": slices}
    return Shares(shape, "reduce", "ReduceParams", fields, (problem.N, problem.M, 1))


def run_product(
    kernel: str, problem: Problem, k_per_slice: int, constants: dict, options: dict, shares: Shares | None
) -> tuple[torch.Tensor, Counters]:
    """Runs a product, and the reduction if the product writes partial sums."""
    inputs = options.pop("inputs", None) or make_inputs(problem)
    buffers, tensor_constants = _product_buffers(problem, inputs)
    buffers["A"], row_stride = options.pop("activations", None) or (buffers["A"], problem.K + problem.a_gap)
    shape = (problem.M, problem.N)
    out = place_output(shape, problem.dtype)
    buffers["Params"] = parameters(
        "GemmParams",
        a_row_stride=row_stride,
        M=problem.M,
        N=problem.N,
        K=problem.K,
        group_size=problem.group_size,
        k_per_slice=k_per_slice,
    )
    if shares:
        buffers["Partials"] = place_output(shares.shape, torch.float32)
    if not shares or shares.are_some:
        buffers["Out"] = out
    constants = tensor_constants | constants | {"writes_partials": shares is not None}
    names = {"weight_format": problem.weight_format, "element": ELEMENT_NAMES[problem.dtype]}
    options = names | {"constants": constants} | options
    counters = launch(kernel, buffers, **options)
    if shares:
        used = {"Out": out, "Partials": buffers["Partials"], "Params": parameters(shares.struct, **shares.fields)}
        used |= {name: buffers[name] for name in ["Bias"] if name in buffers}
        reduction = {n: options[n] for n in ("element", "constants", "checked", "seed") if n in options}
        columns, rows, layers = shares.grid
        launch_elementwise(shares.kernel, columns, rows, used, layers=layers, **reduction)
    return out.read(shape, problem.dtype), counters


def check_gemv_work(problem: Problem, rows: int, subnormal_codes: bool, counters: Counters) -> None:
    """Checks how often each row block reads: each word once, and each activation once per lane, so 32 times.

    A kernel that needs the sum of the activations over k reads each activation once more. So does a kernel that
    searches for activations that are too small for subnormal codes.
    """
    row_blocks, strips = -(-problem.M // rows), -(-problem.N // number("kGemvColumns"))
    looks = subnormal_codes and problem.dtype is not torch.float16 and problem.weight_format != "lut4"
    sums = strips * ((problem.weight_format.startswith("uint")) + looks)
    words = row_blocks * reference.word_bytes(problem.weight_format, problem.K, problem.N)
    activations = row_blocks * rows * problem.K * (32 * strips + sums)
    steps = -(-problem.K // number("kGemvK")) if problem.weight_format in reference.PLANES else 0
    check_reads(counters, words, row_blocks * steps * 4 * problem.N, activations * problem.dtype.itemsize)


def check_reads(counters: Counters, words: int, high: int, activations: int) -> None:
    """Checks how many bytes of packed words, of the second plane and of activations a kernel read."""
    if counters.buffers is not None:  # only checked mode counts them
        for slot, expected in (("Packed", words), ("High", high), ("A", activations)):
            read = counters.buffers.get(number(f"kSlot{slot}"), {"bytes_read": 0})["bytes_read"]
            assert read == expected, f"{slot}: {read} bytes read, expected {expected}"


def run_gemv(
    problem: Problem,
    *,
    rows: int,
    simdgroups: int,
    splits: int = 1,
    subnormal_codes: bool = True,
    counted: bool = True,
    **options: Any,
) -> torch.Tensor:
    """Runs a product.

    `counted=False` skips the check of the reads, for a kernel that reads less than all of K. Two of the options replace
    parts of the problem: `inputs` and `activations` (buffer, row stride). The other options are passed to `launch`.
    """
    step = number("kGemvK")
    k_per_slice = -(-problem.K // (step * simdgroups * splits)) * step
    splits = -(-problem.K // (k_per_slice * simdgroups))  # every split has at least one slice
    options |= {
        "group": (32 * simdgroups, 1, 1),
        "groups": (-(-problem.M // rows), -(-problem.N // number("kGemvColumns")), splits),
        "threadgroup_bytes": facts()["gemv_bytes"][problem.weight_format][rows][simdgroups],
    }
    constants = {
        "rows_per_threadgroup": rows,
        "subnormal_codes": subnormal_codes,
        "ragged_k": problem.K % step != 0,
        "ragged_n": problem.N % number("kGemvColumns") != 0,
    }
    result, counters = run_product("gemv", problem, k_per_slice, constants, options, sliced(problem, splits))
    if counted:
        check_gemv_work(problem, rows, subnormal_codes, counters)
    return result


def check(problem: Problem, result: torch.Tensor, *, raw_codes: bool) -> float:
    inputs = make_inputs(problem)
    exact, bound = reference.gemm(inputs.a, inputs.weight, inputs.bias, inputs.perm, raw_codes=raw_codes)
    return reference.check_gemm(result, exact, bound)


def run_dequantize(problem: Problem, **options: Any) -> torch.Tensor:
    inputs = options.pop("inputs", None) or make_inputs(problem)
    buffers, constants = _weight_buffers(problem, inputs)
    out = place_output((problem.K, problem.N), problem.dtype)
    fields = {"N": problem.N, "K": problem.K, "group_size": problem.group_size}
    buffers |= {"Out": out, "Params": parameters("DequantizeParams", **fields)}
    names = {"weight_format": problem.weight_format, "element": ELEMENT_NAMES[problem.dtype], "constants": constants}
    launch_elementwise("dequantize", problem.N, problem.K // 8, buffers, **names, **options)
    return out.read((problem.K, problem.N), problem.dtype)


def run_embedding(problem: Problem, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Returns the embedding vectors of `ids`; each vector is a column of the packed weight."""
    inputs = options.pop("inputs", None) or make_inputs(problem)
    buffers, constants = _weight_buffers(problem, inputs)
    shape = (ids.numel(), problem.K)
    out = place_output(shape, problem.dtype)
    fields = {"N": problem.N, "K": problem.K, "group_size": problem.group_size, "count": ids.numel()}
    params = parameters("EmbeddingParams", **fields, id_bytes=ids.element_size())
    buffers |= {"A": place(ids.reshape(-1)), "Out": out, "Params": params}
    names = {"weight_format": problem.weight_format, "element": ELEMENT_NAMES[problem.dtype], "constants": constants}
    launch_elementwise("embedding", problem.K // 8, ids.numel(), buffers, **names, **options)
    return out.read(shape, problem.dtype)


def check_dequantize(problem: Problem, **options: Any) -> None:
    """Checks dequantize in fp32, which rounds at most twice. Rows of the result are in the original order of k."""
    inputs = make_inputs(problem)
    order = slice(None) if inputs.perm is None else np.argsort(inputs.perm)
    error = np.abs(reference.to_numpy(run_dequantize(problem, **options)) - inputs.weight.exact[order])
    assert (error <= 2.0**-23 * inputs.weight.magnitude[order]).all()
