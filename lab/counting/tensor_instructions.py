"""Counts the instructions around the matrix products of kernels for tensor units: our gemm_tensor and MLX's.

Mesa's compiler compiles both from source for the M1's GPU (lab/agx/README.md). In both, the same 16 instructions
replace each matmul2d and are subtracted from the counts (lab/agx/tensor_stub). No kernel is executed. Apple's compiler
and the M5's instructions differ. The program downloads the wheel of MLX if it is not cached.

A tile has 64 rows, 64 columns and four simdgroups. A count is the number of instructions of all lanes in a step of 64
k, per weight of the tile. "decode" counts the instructions that turn words into operands: masks, shifts, conversions,
products with scales, and transfers of decoded weights through threadgroup memory. "ends" counts the instructions at the
ends of groups, which in our kernel scale the sums.

    python -m lab.counting.tensor_instructions            # prints a table of both sides
    python -m lab.counting.tensor_instructions --write    # writes the model's counts of our kernel
    python -m lab.counting.tensor_instructions --check    # compares them; the exit code is 1 if they differ
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.counting import instructions
from lab.counting.kernel_counts import write_or_check
from lab.model.counts import KernelCounts
from lab.model.geometry import MIN_GROUP_SIZE
from softmetal.proof.libraries import MLX_WITH_TENSORS, mlx_include
from torch_marlin_metal.formats import WEIGHT_FORMATS

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "lab" / "agx" / "tensor_stub"
# For each dtype, the dtype that is compiled. The M1 has no bfloat instructions, so floats replace bfloat. An M5 has
# them, and takes as many instructions to decode to bfloat as to float.
COUNTED_AS = {"float16": "float16", "bfloat16": "float32"}
PRODUCTS = 32 * 32 * 32 // 512  # products of 512 multiply-adds in one step of a simdgroup
WEIGHTS = 64 * 64  # weights of one step
LANES = 128
# For each format of this package, MLX's kernel for the same codes.
PAIRS = {
    "uint4b8": ("quantized_nax.h", "affine_qmm_t_nax<half, 64, 4, true, false, 64, 64, 64, 2, 2>"),
    "uint4": ("quantized_nax.h", "affine_qmm_t_nax<half, 64, 4, true, false, 64, 64, 64, 2, 2>"),
    "uint4_bias": ("quantized_nax.h", "affine_qmm_t_nax<half, 64, 4, true, false, 64, 64, 64, 2, 2>"),
    "float4_e2m1": ("fp_quantized_nax.h", "fp_qmm_t_nax<half, 32, 4, true, false, 64, 64, 64, 2, 2>"),
    "mxfp4": ("fp_quantized_nax.h", "fp_qmm_t_nax<half, 32, 4, true, false, 64, 64, 64, 2, 2>"),
    "nvfp4": ("fp_quantized_nax.h", "fp_qmm_t_nax<half, 16, 4, true, false, 64, 64, 64, 2, 2>"),
}
# Text in MLX's headers that the tool cannot read -> equivalent text.
REWORDED = {
    "__metal_get_thread_index_in_simdgroup(ushort())": "(ushort)get_sub_group_local_id()",
    "typename metal::vec<U, kElemsPerFrag>": "stub_fragment<U>",
    "const thread dtype_frag_t<T>&": "dtype_frag_t<T>",
}
FRAGMENT = """
template <typename T> struct stub_fragment {
  T e[8];
  stub_fragment() thread {}
  stub_fragment(T x) thread { for (int i = 0; i < 8; ++i) e[i] = x; }
  thread T& operator[](int i) thread { return e[i]; }
  const thread T& operator[](int i) const thread { return e[i]; }
};
"""
DECODE = {
    "and",
    "or",
    "xor",
    "bfi",
    "bfeil",
    "extr",
    "asr",
    "shl",
    "convert",
    "hadd",
    "hfma",
    "hmul",
    "fmul",
    "fcmpsel",
}
DECODE |= {"icmpsel", "local_load", "local_store"}


@dataclass(frozen=True)
class Counts:
    """Instructions per weight of a step, and half-registers of a lane."""

    everything: float
    decode: float
    ends: float
    half_registers: int
    spills: int


def counts(found: dict[str, Any], steps: float, calls: int, chain: int) -> Counts:
    """Returns the counts of a step.

    Args:
        found: the tool's counts of a kernel.
        steps: iterations of the innermost loop that together cover 64 k.
        calls: calls of matmul2d in an iteration.
        chain: the k that one iteration of the surrounding loop covers; 0 if there is no such loop.
    """
    innermost = [o for o in found["loops"] if o["innermost"] and o["device_load_bytes"]]
    hot = min(innermost, key=lambda o: o["instructions"])  # MLX has a second loop, for tiles at the edge
    histogram = hot["histogram"]
    scale = steps * LANES / WEIGHTS
    # The stub of a product has 8 ffma and 8 fadd. The remaining ffma and fadd multiply by a scale or add a bias.
    products = max(histogram.get("ffma", 0) - 8 * calls, 0)
    decode = sum(histogram.get(name, 0) for name in DECODE) + products
    outer = [o for o in found["loops"] if o["start"] <= hot["start"] and o["end"] >= hot["end"] and o is not hot]
    ends = 0.0
    if outer and chain:
        around = min(outer, key=lambda o: o["end"] - o["start"])
        ends = (around["instructions"] - hot["instructions"]) * 64 / chain * LANES / WEIGHTS
    return Counts(
        (hot["instructions"] - 16 * calls) * scale,
        decode * scale,
        ends,
        found["half_registers"],
        found["spills"] + found["fills"],
    )


def takes_half_steps(weight_format: str, group_size: int) -> bool:
    """Returns whether a step has 16 k instead of 32.

    In nvfp4, scales are multiplied into the operands, so groups need no separate sums.
    """
    return group_size == MIN_GROUP_SIZE and weight_format != "nvfp4"


def calls_of(weight_format: str, group_size: int = 64) -> int:
    """Returns the number of matrix products in a step.

    Each 16 k need two products of 16 rows. Formats with biases need a third for the sums of the activations.
    """
    halves = 1 if takes_half_steps(weight_format, group_size) else 2
    return halves * (3 if WEIGHT_FORMATS[weight_format].zeros_role == "bias" else 2)


def counted_forms(dtype: str) -> dict[tuple[str, int, int], None]:
    """Returns the (format, group size, levels) to count. Groups of 16 are the only ones that change the loop.

    gemm_tensor does not support formats with a lut.
    """
    known = [form for form in instructions.forms(dtype) if not WEIGHT_FORMATS[form[0]].has_lut]
    single = dict.fromkeys(name for name, _, _ in known)
    usual = {(name, instructions.usual_group(name), 1): None for name in single}
    short = {(name, MIN_GROUP_SIZE, 1): None for name in single if not WEIGHT_FORMATS[name].fixed_group_size}
    return usual | short | {form: None for form in known if form[2] == 2}


def stat_ours(folder: Path, weight_format: str, dtype: str, group_size: int, levels: int = 1) -> dict[str, Any]:
    case = instructions.Case(
        "gemm_tensor", "gemm/tensor", weight_format, dtype, group_size=group_size, rows=64, levels=levels
    )
    short = MIN_GROUP_SIZE if takes_half_steps(weight_format, group_size) else 0
    constants = case.constants() | {"short_group_size": short}
    entry, source = f"gemm_tensor_{weight_format}_{dtype}", "kernels/gemm/tensor.metal"
    return instructions.run_tool(folder, source, entry, LANES, *instructions.defines(constants), "--O1")


def ours(folder: Path, weight_format: str) -> Counts:
    group = 32 if weight_format == "float4_e2m1" else instructions.usual_group(weight_format)
    found = stat_ours(folder, weight_format, "float16", group)
    return counts(found, 2, calls_of(weight_format), 128 if weight_format == "nvfp4" else group)


def model_row(folder: Path, weight_format: str, group: int, levels: int, dtype: str) -> KernelCounts:
    """Returns a row of the model's table. A step has 32 rows, 32 columns and 32 k, or 16 k with groups of 16."""
    found = stat_ours(folder, weight_format, COUNTED_AS[dtype], group, levels)
    loops = instructions.Loops.of(found)
    hot, outer = loops.hot, loops.outer
    return KernelCounts(
        dtype,
        "gemm_tensor",
        weight_format,
        group,
        levels,
        *(32, 32, 32),
        issue=hot["issue"] - 16 * calls_of(weight_format, group),
        complex=hot["ic_cycles"],
        matrix=PRODUCTS,
        outer_issue=outer["issue"] - hot["issue"],
        outer_k=0,
        fixed_issue=found["total"]["issue"] - outer["issue"],
        half_registers=found["half_registers"],
        waits=hot["waits"],
    )


def model_rows() -> list[KernelCounts]:
    """Counts gemm_tensor and returns its rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_ours(folder)
        wanted = [(*form, dtype) for dtype in COUNTED_AS for form in counted_forms(dtype)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(lambda form: model_row(folder, *form), wanted))


def mlx(folder: Path, header: str, entry: str) -> Counts:
    base = "mlx/backend/metal/kernels"
    headers = ("utils.h", "steel/gemm/gemm_nax.h", "quantized_utils.h", header)
    source = "mlx.metal"
    includes = "".join(f'#include "{base}/{name}"\n' for name in headers)
    (folder / source).write_text(f"#include <metal_stdlib>\n{includes}")
    return counts(instructions.run_tool(folder, source, entry, LANES, "--O1"), 1, 8, 0)


def prepare_ours(folder: Path) -> None:
    """Copies our sources and the stub, rewritten for the tool. Adds instances for float activations."""
    instructions.readable_copy(folder)
    shutil.copytree(STUB, folder, dirs_exist_ok=True)
    with (folder / "kernels/gemm/tensor.metal").open("a") as source:
        source.writelines(
            f'MARLIN_INSTANTIATE_AS("gemm_tensor_{form}_float32", gemm_tensor<WeightFormat::{form}, float>)\n'
            for form in dict.fromkeys(name for name, _, _ in counted_forms("bfloat16"))
        )


def prepare(folder: Path) -> None:
    """Copies both projects' sources and the stub, rewritten for the tool."""
    prepare_ours(folder)
    shutil.copytree(mlx_include(MLX_WITH_TENSORS), folder, dirs_exist_ok=True)
    path = folder / "mlx/backend/metal/kernels/steel/gemm/nax.h"
    text = path.read_text()
    for old, new in REWORDED.items():
        if old not in text:
            raise RuntimeError(f"nax.h: expected {old!r}")
        text = text.replace(old, new)
    path.write_text(text.replace("using namespace metal;", f"using namespace metal;{FRAGMENT}", 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare the model's rows with fresh counts")
    what.add_argument("--write", action="store_true", help="write the model's rows")
    options = parser.parse_args()
    if not instructions.is_set_up():
        print("sh lab/agx/setup.sh builds the compiler; AGX_DIR names its folder", file=sys.stderr)
        return 2
    if options.check or options.write:
        return write_or_check(model_rows(), is_tensor=True, check=options.check)
    print(
        "| format | | all | of these decode | ends of groups | half-registers | spills |\n|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        known: dict[str, Counts] = {}
        for weight_format, (header, entry) in PAIRS.items():
            if entry not in known:
                known[entry] = mlx(folder, header, entry)
            own, other = ours(folder, weight_format), known[entry]
            for who, c in ((f"{weight_format} | ours", own), (" | MLX", other)):
                print(
                    f"| {who} | {c.everything:.2f} | {c.decode:.2f} | {c.ends:.2f} | {c.half_registers} | {c.spills} |"
                )
            print(f"| | ratio | {own.everything / other.everything:.2f} | {own.decode / other.decode:.2f} | | | |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
