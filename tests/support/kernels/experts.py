"""Launches the kernels of kernels/experts/ in the order of the planner's dispatches."""

from dataclasses import dataclass, field

import numpy as np
import torch

from tests.support import reference
from tests.support.experts import Experts
from tests.support.kernels.decoder import ACTIVATIONS
from tests.support.kernels.launch import (
    ELEMENT_NAMES,
    Guarded,
    element_type,
    facts,
    launch,
    launch_elementwise,
    number,
    parameters,
    place,
    place_output,
)
from tests.support.kernels.problems import weight_buffers
from tests.support.kernels.tensor import check_tensor_reads

# These kernels read the experts' ids. All others read moe_sort's table.
PAIR_KERNELS = ("moe_gemv", "moe_gemv_gated", "moe_gemv_reduce")
LIMIT, ALPHA = 1.5, 1.7  # of clamped_silu; limited_silu uses only the limit
GEMV_KERNELS = (*PAIR_KERNELS, "moe_gemv_blocks")


@dataclass(frozen=True)
class Mixture:
    experts: Experts
    weight_format: str
    group_size: int
    a: torch.Tensor  # [T, K] or [T, top_k, K]
    ids: torch.Tensor  # [T, top_k]
    bias: torch.Tensor | None = None
    row_weights: torch.Tensor | None = None
    reduce: bool = False
    activation: str = "silu"  # for moe_gemv_gated
    interleaved: bool = False
    sizes: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        E, words, N = self.experts.b_packed.shape
        K = words * (4 if self.experts.arguments["weight_format"] in reference.EIGHT_BITS else 8)
        object.__setattr__(self, "sizes", {"E": E, "K": K, "N": N, "pairs": self.ids.numel()})

    def combines(self, kernel: str) -> bool:
        """Returns whether `moe_reduce` multiplies or adds the results of a kernel."""
        return kernel != "moe_gemv_reduce" and (self.reduce or self.row_weights is not None)

    @property
    def weights_type(self) -> int:
        return 2**32 - 1 if self.row_weights is None else element_type(self.row_weights.dtype)


def most_blocks(pairs: int, experts: int, block_rows: int) -> int:
    return -(-pairs // block_rows) + min(pairs, experts + 1)


def run_sort(ids: torch.Tensor, experts: int, block_rows: int) -> Guarded:
    """Returns moe_sort's table: three words for each block, then the pairs."""
    pairs, blocks = ids.numel(), most_blocks(ids.numel(), experts, block_rows)
    table = place_output((blocks * number("kMoeBlockWords") + pairs,), torch.int32)
    fields = {"experts": experts, "top_k": ids.shape[1], "id_bytes": ids.element_size()}
    launch(
        "moe_sort",
        {
            "ExpertIds": place(ids.reshape(-1)),
            "Blocks": table,
            "Params": parameters(
                "MoeParams",
                product=parameters("GemmParams", M=pairs),
                block_rows=block_rows,
                blocks=blocks,
                **fields,
            ),
        },
        group=(number("kMoeSortThreads"), 1, 1),
        groups=(1, 1, 1),
    )
    return table


@dataclass(frozen=True)
class Shape:
    kernel: str
    rows: int  # of a block
    columns: int
    step: int  # k
    simdgroups: int
    k_parts: int  # the simdgroups among which K is divided
    ragged_columns: int  # N is ragged if it is not a multiple of this number

    @staticmethod
    def of(kernel: str, rows: int, simdgroups: int, tile: str, top_k: int) -> "Shape":
        if kernel == "moe_tensor":
            rows, columns, step = map(int, tile.split("x"))
            return Shape(kernel, rows, columns, step, facts()["tensor_tiles"][tile] // 32, 1, number("kTensorColumns"))
        name = "Gemv" if kernel in GEMV_KERNELS else "Fused"
        columns, step = number(f"k{name}Columns"), number(f"k{name}K")
        slots = top_k if kernel == "moe_gemv_reduce" else 1
        return Shape(kernel, rows, columns, step, slots * simdgroups, simdgroups, columns)

    def threadgroup_bytes(self, weight_format: str) -> int:
        if self.kernel == "moe_tensor":
            return 0
        if self.kernel in GEMV_KERNELS:
            return facts()["gemv_bytes"][weight_format][self.rows][self.simdgroups]
        return facts()["fused_bytes"][weight_format][self.simdgroups][self.rows // 8]


def run_experts(
    kernel: str,
    p: Mixture,
    *,
    rows: int = 1,
    simdgroups: int = 1,
    tile: str = "",
    perturb_seed: int = 0,
    subnormal_codes: bool = True,
) -> torch.Tensor:
    """Computes a mixture with a kernel for experts.

    `rows` is the maximum number of rows in a block, for `moe_gemv_blocks` and `moe_fused`. `simdgroups` divide K; they
    belong to a threadgroup, or to a slot for `moe_gemv_reduce`. `moe_tensor` has a `tile` instead of both.
    """
    is_sorted, is_gemv, combines = kernel not in PAIR_KERNELS, kernel in GEMV_KERNELS, p.combines(kernel)
    E, K, N, pairs = p.sizes.values()
    shape = Shape.of(kernel, rows, simdgroups, tile, p.ids.shape[1])
    rows, columns, step = shape.rows, shape.columns, shape.step
    buffers, constants = _tensors(p)
    blocks = most_blocks(pairs, E, rows)
    if is_sorted:
        buffers["Blocks"] = run_sort(p.ids, E, rows)
    else:
        buffers["ExpertIds"] = place(p.ids.reshape(-1))
    out_columns = N // 2 if kernel == "moe_gemv_gated" else N
    out = place_output((pairs if not p.reduce else len(p.ids), out_columns), p.a.dtype)
    partials = place_output((pairs, N), torch.float32)
    buffers["Partials" if combines else "Out"] = partials if combines else out
    if kernel == "moe_gemv_reduce" and p.row_weights is not None:
        buffers["RowWeights"] = place(p.row_weights.reshape(-1))
    k_per_slice = -(-K // (step * shape.k_parts)) * step
    product = {"a_row_stride": p.a.stride(0), "M": pairs, "N": N, "K": K, "group_size": p.group_size}
    scale = p.experts.arguments.get("global_scale")
    buffers["Params"] = parameters(
        "MoeParams",
        product=parameters("GemmParams", k_per_slice=k_per_slice, **product),
        a_slot_stride=p.a.stride(1) if p.a.dim() == 3 else 0,
        experts=E,
        top_k=p.ids.shape[1],
        global_scale_expert_stride=N if scale is not None and scale.numel() > E else 1,
        block_rows=rows,
        blocks=blocks,
        row_weights_type=p.weights_type,
        gate=parameters(
            "MoeGate", activation=ACTIVATIONS.index(p.activation), interleaved=p.interleaved, limit=LIMIT, alpha=ALPHA
        ),
        id_bytes=p.ids.element_size(),
    )
    biased = {name: constants.pop(name) for name in ("has_bias", "bias_type") if name in constants}
    strips = -(-N // columns)
    row_groups = blocks if is_sorted else len(p.ids) if kernel == "moe_gemv_reduce" else pairs
    counters = launch(
        kernel,
        buffers if not combines else {slot: buffer for slot, buffer in buffers.items() if slot != "Bias"},
        group=(32 * shape.simdgroups, 1, 1),
        groups=(row_groups, strips, 1) if is_gemv else (strips, row_groups, 1),
        weight_format=p.weight_format,
        element=ELEMENT_NAMES[p.a.dtype],
        constants=constants
        | ({} if combines else biased)
        | {
            "rows_per_threadgroup": rows,
            "subnormal_codes": subnormal_codes,
            "writes_partials": combines,
            "short_group_size": p.group_size if not is_gemv and p.group_size < min(step, K) else 0,
            "ragged_k": K % step != 0,
            "ragged_n": N % shape.ragged_columns != 0,
        },
        threadgroup_bytes=shape.threadgroup_bytes(p.weight_format),
        perturb_seed=perturb_seed,
    )
    if kernel == "moe_tensor":
        table = expected_table(p.ids, E, rows)[0]
        row_blocks = sum(-(-count // number("kTensorRows")) for expert, _, count in table if expert < E)
        check_tensor_reads(p.weight_format, K, N, p.group_size, p.a.dtype, row_blocks, counters)
    if combines:
        _reduce(p, buffers, biased, partials, out)
    return out.read((*p.ids.shape[: 1 if p.reduce else 2], out_columns), p.a.dtype)


def _tensors(p: Mixture) -> tuple[dict, dict]:
    """Returns the buffers (by slot) and function constants of all tensors except ids and results."""
    buffers, constants = weight_buffers(p.experts, p.sizes["N"], experts=p.sizes["E"])
    buffers["A"] = place(p.a.reshape(-1))
    if p.bias is not None:
        buffers["Bias"] = place(p.bias)
        constants |= {"has_bias": True, "bias_type": element_type(p.bias.dtype)}
    constants["vector_columns"] = p.sizes["N"] % 4 == 0
    constants["vector_activations"] = "Perm" not in buffers and p.sizes["K"] % 4 == 0
    return buffers, constants


def _reduce(p: Mixture, buffers: dict, biased: dict, partials: Guarded, out: Guarded) -> None:
    terms = p.ids.shape[1] if p.reduce else 1
    used = {"Partials": partials, "Out": out, "ExpertIds": place(p.ids.reshape(-1))}
    if p.bias is not None:
        used["Bias"] = buffers["Bias"]
    if p.row_weights is not None:
        used["RowWeights"] = place(p.row_weights.reshape(-1))
    fields = {"rows": p.sizes["pairs"] // terms, "N": p.sizes["N"], "terms": terms, "experts": p.sizes["E"]}
    fields |= {"row_weights_type": p.weights_type, "id_bytes": p.ids.element_size()}
    used["Params"] = parameters("MoeReduceParams", **fields)
    launch_elementwise(
        "moe_reduce", p.sizes["N"], fields["rows"], used, element=ELEMENT_NAMES[p.a.dtype], constants=biased
    )


def expected_table(ids: torch.Tensor, experts: int, block_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nonempty blocks (expert, first place, rows), and the pairs ordered by expert."""
    keys = ids.reshape(-1).numpy()
    keys = np.where((keys >= 0) & (keys < experts), keys, experts)
    blocks, first = [], 0
    for expert in range(experts + 1):
        rows = int((keys == expert).sum())
        blocks += [(expert, first + i, min(block_rows, rows - i)) for i in range(0, rows, block_rows)]
        first += rows
    return np.array(blocks, np.int64), np.argsort(keys, kind="stable")
