"""Makes the planner's table of decisions from the model, and compares the planner's choices with the model's best.

python -m lab.decisions --write          makes csrc/planner/decision_rows.h
python -m lab.decisions --check          compares the file with the model, and exits with 1 if it no longer follows
python -m lab.decisions --score 10000    compares the planner's choices with the model's best (about 3 minutes)
"""

from __future__ import annotations

import argparse
import math
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.model import ExpertsProblem, families, predict
from lab.model.counts import KernelCounts, NotCounted, counts_of, rows
from lab.model.geometry import (
    BLOCK,
    FUSED_COLUMNS,
    FUSED_K,
    GEMV_COLUMNS,
    GEMV_K,
    MIN_GROUP_SIZE,
    SIMD_WIDTH,
    TENSOR_COLUMNS,
    TENSOR_K,
    TENSOR_ROWS,
)
from lab.model.kernel import CACHE_LATENCY, figure
from lab.model.problems import Problem, Tiling
from torch_marlin_metal.extension import native
from torch_marlin_metal.formats import WEIGHT_FORMATS, WeightFormat
from torch_marlin_metal.profiling import AppleSiliconGPU

FILE = Path(__file__).resolve().parents[1] / "csrc/planner/decision_rows.h"
# Names of the arithmetic -> dtype of the activations, and a GPU that computes with them in this way.
ARITHMETIC = {
    "half": ("float16", "M4"),
    "emulated_bfloat": ("bfloat16", "M1"),
    "single": ("float32", "M4"),
    "bfloat_operands": ("bfloat16", "M5"),
}
# A choice of the planner should take at most this many times as long as the model's best choice.
MOST_RATIO = 1.10
MOST_UNITS = {"gemv": 8, "fused": 4, "tensor": 2}
# A format, and its levels of scales.
Form = tuple[WeightFormat, int]
# The kernel of each variant. Its variants for experts, with the rows of one unit, in the order of expert_tiles in
# csrc/planner/variants.cpp.
KERNELS = {"gemv": "gemv", "fused": "gemm_fused", "tensor": "gemm_tensor"}
EXPERTS_FORMS = {
    "gemv": (("moe_gemv", 1), ("moe_gemv_reduce", 1), ("moe_gemv_blocks", 4)),
    "fused": (("moe_fused", 4), ("moe_fused", 3), ("moe_fused", 2), ("moe_fused", 1)),
    "tensor": (),  # counted as gemm_tensor
}
REASONS = {
    "gemv": "reads the weight once and multiplies lane by lane",
    "fused": "shares what it decodes between 8 rows of a matrix product",
    "tensor": "shares what it decodes between 32 rows of a product on the tensor units",
    "integer": "integer codes become floats by masks",
    "e2m1": "E2M1 codes become floats by shifts and masks",
    "e4m3": "E4M3 codes become floats by shifts and masks",
    "table": "each code is looked up",
    "half": "",
    "bfloat_operands": "",
    "emulated_bfloat": "; this GPU computes bfloat by integer instructions",
    "single": "; float32 activations take twice the loads and registers",
}


@dataclass(frozen=True)
class Decision:
    """A row of the table; `csrc/planner/decisions.h` explains the numbers.

    Attributes:
        arithmetic: how the GPU computes with the activations.
        codes: kind of the weight's codes.
        bits: bits of a code.
        kernel: "gemv", "fused" or "tensor".
        decode: clocks to decode the weights of a step.
        unit: clocks that a unit of rows adds to a step. In tensor: clocks of 16 k of a step. A step has 32 k, or 16 k
            with groups of 16.
        group_end: clocks at the end of a group.
        unit_end: clocks that a unit of rows adds to the end of a group. In tensor: clocks of the sums of activations,
            which weights with biases need.
        wait: for 1, 2, ... units, the clocks that a simdgroup waits for the loads of a step.
    """

    arithmetic: str
    codes: str
    bits: int
    kernel: str
    decode: float
    unit: float
    group_end: float
    unit_end: float
    wait: tuple[int, ...]

    @property
    def reason(self) -> str:
        """Returns why the kernel has the costs of this row."""
        return f"{REASONS[self.kernel]}: {REASONS[self.codes]}{REASONS[self.arithmetic]}"

    @property
    def text(self) -> str:
        costs = ", ".join(f"{cost:.1f}" for cost in (self.decode, self.unit, self.group_end, self.unit_end))
        wait = ", ".join(map(str, self.wait))
        return (
            f"    Decision{{Arithmetic::{self.arithmetic}, CodeKind::{self.codes}, {self.bits}, "
            f"GemmVariant::{self.kernel}, {costs}, {{{wait}}},\n"
            f'             "{self.reason}"}},\n'
        )


def _line(values: NDArray[np.float64]) -> tuple[float, float]:
    """Fits a line with the smallest relative errors to the values at 1, 2, ... Returns its value at 0 and its slope."""
    if len(set(values)) == 1:
        return float(values[0]), 0.0
    units = np.arange(1, len(values) + 1, dtype=np.float64)
    slope, value = np.polyfit(units, values, 1, w=1 / values)
    return float(value), float(slope)


def _counted(variant: str, kernel: str, units: int, forms: list[Form], arithmetic: str) -> list[KernelCounts]:
    """Returns the counts of a kernel for each of `forms`, with `units` units of rows."""
    activations, chip = ARITHMETIC[arithmetic]
    tile = {
        "gemv": (units, GEMV_COLUMNS, GEMV_K),
        "fused": (BLOCK * units, FUSED_COLUMNS, FUSED_K),
        "tensor": (TENSOR_ROWS, TENSOR_COLUMNS, TENSOR_K),
    }[variant]
    tiling = Tiling(variant, kernel, tile)
    gpu = AppleSiliconGPU.from_name(chip)
    group = MIN_GROUP_SIZE if variant == "tensor" and units == 1 else 128
    return [
        counts_of(tiling, tile[0], Problem(1, 128, 128, row.name, group, activations=activations, scales=scales), gpu)
        for row, levels in forms
        for scales in (["uint8"] if levels == 2 else [None])
    ]


def _tensor_ends(forms: list[Form], arithmetic: str) -> tuple[float, float]:
    """Returns the clocks at the end of a group of gemm_tensor, and the clocks that the sums of activations add."""
    ends: dict[bool, list[int]] = {False: [], True: []}
    counted = _counted("tensor", KERNELS["tensor"], MOST_UNITS["tensor"], forms, arithmetic)
    for (row, _), found in zip(forms, counted, strict=True):
        ends[row.zeros_role == "bias"].append(found.outer_issue)
    plain = float(np.mean(ends[False]))
    return plain, float(np.mean(ends[True])) - plain if ends[True] else 0.0


def _decision(kernel: str, arithmetic: str, codes: str, bits: int) -> Decision:
    alike = [
        (row, levels) for row, levels in _forms(kernel, arithmetic) if (row.code_kind, row.code_bits) == (codes, bits)
    ]
    forms = [(row, levels) for row, levels in alike if levels == alike[0][1]]
    clock = float(np.mean([figure(AppleSiliconGPU.from_name(name), "clock_ghz") for name in AppleSiliconGPU.names()]))
    gpu = AppleSiliconGPU.from_name(ARITHMETIC[arithmetic][1])
    latency = clock * figure(gpu, "dram_latency_ns")
    steps, ends, waited = [], [], []
    for units in range(1, MOST_UNITS[kernel] + 1):
        counted = _counted(kernel, KERNELS[kernel], units, forms, arithmetic)
        step = float(np.mean([row.issue for row in counted]))
        end = float(np.mean([row.outer_issue for row in counted]))
        waits = float(np.mean([row.step_waits[0] * latency + row.step_waits[1] * CACHE_LATENCY for row in counted]))
        if kernel == "fused":  # its outer loop has a fixed length
            step, end = step + end * FUSED_K / counted[0].outer_k, 0.0
        steps.append(step)
        ends.append(end)
        waited.append(round(waits))
    if kernel == "tensor":
        group_end = _tensor_ends(forms, arithmetic)
    else:
        group_end = _line(np.array(ends)) if kernel == "gemv" else (0.0, 0.0)
    lines = (*_line(np.array(steps)), *group_end)
    return Decision(arithmetic, codes, bits, kernel, *lines, tuple(waited))


def _formats() -> list[WeightFormat]:
    """Returns the formats that have been counted with all activations.

    Other formats use the nearest row of the table.
    """
    counted = {row.weight_format for row in rows() if row.activations == "float32"}
    return [row for name, row in WEIGHT_FORMATS.items() if name in counted]


def _forms(variant: str, arithmetic: str) -> list[Form]:
    """Returns the (format, levels) pairs whose products were counted with this arithmetic.

    The pairs with one level come first. A kind of codes that was counted only with two levels has rows with two levels.
    """
    operands = ("half", "bfloat_operands") if variant == "tensor" else ("half", "emulated_bfloat", "single")
    if arithmetic not in operands:
        return []
    kernel, others = ("gemm_tensor", None) if variant == "tensor" else ("gemv", "float32")
    counted = {
        (row.weight_format, row.levels)
        for row in rows()
        if row.kernel == kernel and row.activations in (ARITHMETIC[arithmetic][0], others)
    }
    return [(row, levels) for levels in (1, 2) for name, row in WEIGHT_FORMATS.items() if (name, levels) in counted]


def decisions() -> Iterator[Decision]:
    for kernel in MOST_UNITS:
        for arithmetic in ARITHMETIC:
            for kind, bits in dict.fromkeys((row.code_kind, row.code_bits) for row, _ in _forms(kernel, arithmetic)):
                yield _decision(kernel, arithmetic, kind, bits)


def _registers(kernel: str, arithmetic: str, form: Form) -> str:
    """Returns in C++ the registers of a format by units of rows, and those of its variants for experts.

    If a kernel for experts has not been counted, its registers are assumed to be those of the product's kernel with the
    same body. The counted kernels for experts need up to 48 more.
    """

    def registers(name: str, units: int) -> str:
        try:
            found = _counted(kernel, name, units, [form], arithmetic)
        except NotCounted:
            found = _counted(kernel, KERNELS[kernel], units, [form], arithmetic)
        return str(found[0].half_registers)

    most = MOST_UNITS[kernel]
    kernels = [*((KERNELS[kernel], units) for units in range(1, most + 1)), *EXPERTS_FORMS[kernel]]
    found = [registers(name, units) for name, units in kernels]
    return f"{{{', '.join(found[:most])}}}, {{{', '.join(found[most:])}}}"


def _register_rows() -> Iterator[str]:
    """Yields the table of registers in C++: the first format of each kind, and the formats with other registers."""
    for kernel in MOST_UNITS:
        for arithmetic in ARITHMETIC:
            first: dict[tuple[str, int], str] = {}
            for row, levels in _forms(kernel, arithmetic):
                registers = _registers(kernel, arithmetic, (row, levels))
                kind = (row.code_kind, row.code_bits)
                if first.get(kind) == registers:
                    continue
                first.setdefault(kind, registers)
                yield (
                    f"    Registers{{Arithmetic::{arithmetic}, CodeKind::{row.code_kind}, {row.code_bits}, "
                    f"ZerosRole::{row.zeros_role}, ScaleCoding::{row.scale_coding}, {levels}, GemmVariant::{kernel}, "
                    f"{registers}}},\n"
                )


def text() -> str:
    """Returns the text of decision_rows.h, computed from the model."""
    lines = [
        "// python -m lab.decisions --write makes this file from the model in lab/model, and --check compares them.\n",
        "// csrc/planner/decisions.h includes it, and explains the numbers.\n",
        "// clang-format off\n",
        "inline constexpr std::array kDecisions{\n",
        *(row.text for row in decisions()),
        "};\n\ninline constexpr std::array kRegisters{\n",
        *_register_rows(),
        "};\n\ninline constexpr std::array kKernelRegisters{\n",
    ]
    own = dict.fromkeys(row.kernel for row in rows())
    for kernel in own:
        if kernel in KERNELS.values() or kernel.startswith("moe_"):
            continue
        most = max(row.half_registers for row in rows() if row.kernel == kernel)
        lines.append(f"    KernelRegisters{{Kernel::{kernel}, {most}}},\n")
    return "".join([*lines, "};\n// clang-format on\n"])


@dataclass(frozen=True)
class Choice:
    """A choice of the planner, and the model's times for it.

    Attributes:
        gpu: the GPU.
        problem: the product.
        chosen: the planner's tiling.
        best: the model's tiling with the least time.
        ratio: the model's time of the planner's tiling, divided by the time of the best tiling.
    """

    gpu: AppleSiliconGPU
    problem: Problem | ExpertsProblem
    chosen: Tiling
    best: Tiling
    ratio: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} {self.gpu.name} ({self.gpu.cores}) {self.problem}: {self.chosen}, not {self.best}"


# N and K of the products of real models.
SHAPES = (
    *((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (11008, 4096), (28672, 8192), (8192, 28672)),
    *((8192, 8192), (5120, 5120), (13824, 5120), (5120, 13824), (3584, 3584), (18944, 3584), (3584, 18944)),
    *((512, 3584), (2048, 2048), (8192, 2048), (2048, 8192), (512, 2048), (896, 896), (4864, 896), (896, 4864)),
    *((128, 896), (1536, 1536), (8960, 1536), (1536, 8960), (3072, 3072), (8192, 3072), (3072, 8192)),
    *((5120, 2880), (2880, 4096), (152064, 3584), (128256, 4096), (32000, 4096), (151936, 896), (201088, 2880)),
    *((27648, 5120), (5120, 27648), (1152, 1152), (6912, 1152), (1152, 6912), (2304, 9216), (768, 3072)),
)
# Number of experts, experts of a token, N and K of the two products of real mixtures.
MIXTURES = (
    *((8, 2, 14336, 4096), (8, 2, 4096, 14336), (32, 4, 5760, 2880), (32, 4, 2880, 2880), (128, 4, 5760, 2880)),
    *((128, 8, 768, 2048), (128, 8, 2048, 768), (128, 8, 1536, 4096), (128, 8, 4096, 1536), (64, 6, 1408, 2048)),
    *((64, 6, 2048, 1408), (256, 8, 2048, 7168), (256, 8, 7168, 2048), (64, 8, 1024, 2048), (64, 8, 2048, 1024)),
    *((60, 4, 1408, 2048), (16, 1, 8192, 5120), (16, 1, 5120, 8192), (512, 10, 512, 2048), (512, 10, 2048, 512)),
)


Problems = Callable[[random.Random], Iterator[tuple[AppleSiliconGPU, Problem | ExpertsProblem]]]


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    return int(math.exp(rng.uniform(math.log(least), math.log(most + 1))))


def _gpu(rng: random.Random) -> AppleSiliconGPU:
    name, _, most, fewest, _ = rng.choice(native.chips())
    return AppleSiliconGPU.from_name(name, rng.choice((most, most, fewest, rng.randint(fewest, most))))


def _weight(rng: random.Random, K: int) -> dict[str, Any]:
    row = rng.choice(_formats())
    group = row.fixed_group_size or rng.choice((16, 32, 64, 128, 256, K))
    return {
        "weight_format": row.name,
        "group_size": group,
        "activations": rng.choice(("float16", "bfloat16", "float32")),
    }


def random_products(rng: random.Random) -> Iterator[tuple[AppleSiliconGPU, Problem]]:
    """Yields random products without end. Half have the sizes of real models, and most have few rows."""
    while True:
        N, K = rng.choice(SHAPES)
        if rng.random() < 0.5:
            N, K = (_log_uniform(rng, 256, 32768) // 32 * 32 for _ in range(2))
        M = rng.choice((rng.randint(1, 16), rng.randint(1, 16), rng.randint(1, 64), _log_uniform(rng, 1, 4096)))
        yield _gpu(rng), Problem(M, N, K, **_weight(rng, K))


def random_mixtures(rng: random.Random) -> Iterator[tuple[AppleSiliconGPU, ExpertsProblem]]:
    """Yields random products with experts without end."""
    while True:
        experts, top_k, N, K = rng.choice(MIXTURES)
        tokens = rng.choice((1, rng.randint(1, 16), _log_uniform(rng, 1, 4096)))
        reduce = rng.random() < 0.5
        weight = _weight(rng, K)
        yield (
            _gpu(rng),
            ExpertsProblem.of_tokens(tokens, top_k, experts, N, K, reduce=reduce, rows_by_slot=reduce, **weight),
        )


def planned(name: str, M: int, dispatches: list[dict[str, Any]]) -> Tiling:
    """Returns the tiling of a plan that "auto" can choose."""
    variant, _, text = name.partition(":")
    if variant == "two_pass":
        return Tiling(variant, "dequantize", (0, 0, 0))
    tile = tuple(map(int, text.split("x")))
    # the gated kernel takes as long as moe_gemv
    named = [{**dispatch, "kernel": dispatch["kernel"].replace("_gated", "")} for dispatch in dispatches]
    known = {
        KERNELS.get(variant, f"gemm_{variant}"),
        f"moe_{variant}",
        *(form for form, _ in EXPERTS_FORMS.get(variant, ())),
    }
    products = [dispatch for dispatch in named if dispatch["kernel"] in known]
    first = products[0]
    slices = re.search(r"k_per_slice=(\d+)", first["text"])
    assert slices is not None
    rest = -(-(M % tile[0]) // BLOCK) * BLOCK if len(products) > 1 else 0
    simdgroups = first["threads"][0] // SIMD_WIDTH
    return Tiling(variant, first["kernel"], tile, 0, simdgroups, int(slices[1]), first["grid"][2], rest)  # type: ignore[arg-type]


def chosen(gpu: AppleSiliconGPU, problem: Problem | ExpertsProblem, variant: str = "auto") -> Tiling:
    """Returns the planner's choice for a product among the tilings of `variant`."""
    product = problem.product if isinstance(problem, ExpertsProblem) else problem
    weight = {
        "chip": gpu.name, "cores": gpu.cores, "N": product.N, "K": product.K, "weight_format": product.weight_format,
        "group_size": product.group_size, "activations": product.activations, "variant": variant,
    }  # fmt: skip
    if isinstance(problem, ExpertsProblem):
        name, dispatches, _ = native.moe_plan(
            **weight, tokens=problem.tokens, top_k=problem.top_k, experts=problem.experts,
            rows_by_slot=problem.rows_by_slot, reduce=problem.reduce,
        )  # fmt: skip
    else:
        rows_of_plans, index, _ = native.gemm_plans(
            **weight, half_subnormals=True, M=problem.M, scales=problem.scales_type, zeros=problem.zeros_type,
            has_perm=False, has_global_scale=False, has_bias=False, tuned=False, own_system=False,
        )  # fmt: skip
        name, _, _, _, dispatches = rows_of_plans[index]
    return planned(name, product.M, dispatches)


def choice(gpu: AppleSiliconGPU, problem: Problem | ExpertsProblem) -> Choice:
    """Compares the planner's choice for a product with the model's best of all tilings and splits."""
    tiling = chosen(gpu, problem)
    seconds = float(predict(problem, tiling, gpu))
    best, least = tiling, seconds
    for family in families(problem, gpu, "auto"):
        times = np.atleast_1d(predict(problem, family, gpu))
        if times.min() < least:
            best, least = family.at(int(times.argmin())), float(times.min())
    return Choice(gpu, problem, tiling, best, seconds / least)


def spread(choices: list[Choice]) -> str:
    """Returns the median, 99th percentile and maximum of the ratios, and how many ratios exceed 1.10."""
    ratios = np.array([found.ratio for found in choices])
    above = int((ratios > MOST_RATIO).sum())
    return (
        f"{len(ratios)} plans: median {np.median(ratios):.3f}, 99 % under {np.percentile(ratios, 99):.3f}, "
        f"most {ratios.max():.3f}, {above} above {MOST_RATIO}"
    )


def score(count: int) -> None:
    """Compares the planner's choices with the model's best, for products and for products with experts."""
    sources: dict[str, Iterator[tuple[AppleSiliconGPU, Problem | ExpertsProblem]]] = {
        "products": random_products(random.Random(1)),
        "experts": random_mixtures(random.Random(2)),
    }
    for what, problems in sources.items():
        choices = [choice(*next(problems)) for _ in range(count)]
        print(f"{what}: {spread(choices)}")
        for trait in ("activations", "weight_format"):
            groups: dict[str, list[Choice]] = {}
            for found in choices:
                problem = found.problem.product if isinstance(found.problem, ExpertsProblem) else found.problem
                groups.setdefault(getattr(problem, trait), []).append(found)
            for name, group in sorted(groups.items()):
                print(f"  {name}: {spread(group)}")
        for found in sorted(choices, key=lambda found: -found.ratio):
            if found.ratio > MOST_RATIO:
                print(f"  {found}")


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m lab.decisions", description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--score", type=int, default=0, metavar="PLANS")
    arguments = parser.parse_args()
    if arguments.write:
        FILE.write_text(text())
    if arguments.check and FILE.read_text() != text():
        print(f"{FILE.name} does not follow from the model: run python -m lab.decisions --write, and build")
        return 1
    if arguments.score:
        score(arguments.score)
    return 0


if __name__ == "__main__":
    sys.exit(main())
