"""Makes the planner's table of decisions from the model.

python -m lab.decisions --write    makes csrc/planner/decision_rows.h
python -m lab.decisions --check    compares the file with the model, and exits with 1 if they differ
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.model.counts import KernelCounts, NotCounted, counts_of, rows
from lab.model.geometry import (
    BLOCK,
    FUSED_COLUMNS,
    FUSED_K,
    GEMV_COLUMNS,
    GEMV_K,
    MIN_GROUP_SIZE,
    TENSOR_COLUMNS,
    TENSOR_K,
    TENSOR_ROWS,
)
from lab.model.kernel import CACHE_LATENCY, figure
from lab.model.problems import Problem, Tiling
from torch_marlin_metal.formats import WEIGHT_FORMATS, WeightFormat
from torch_marlin_metal.profiling import AppleSiliconGPU

FILE = Path(__file__).resolve().parents[1] / "csrc/planner/decision_rows.h"
# For each kind of arithmetic, the dtype of the activations and a GPU that computes with this dtype in this way.
ARITHMETIC = {
    "half": ("float16", "M4"),
    "emulated_bfloat": ("bfloat16", "M1"),
    "single": ("float32", "M4"),
    "bfloat_operands": ("bfloat16", "M5"),
}
MOST_UNITS = {"gemv": 8, "fused": 4, "tensor": 2}
# A format, and its levels of scales.
Form = tuple[WeightFormat, int]
# KERNELS has the kernel of each variant. EXPERTS_FORMS has its kernels for experts, each with the units of rows of a
# block, in the order of expert_tiles in csrc/planner/variants.cpp.
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


def counted_formats() -> list[WeightFormat]:
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
    """Returns two C++ lists: a kernel's registers for each number of units, and those of its kernels for experts.

    A kernel for experts that has not been counted is assumed to have the registers of the product's kernel with the
    same body. Counted kernels for experts have up to 48 registers more.
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


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m lab.decisions", description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        FILE.write_text(text())
    if arguments.check and FILE.read_text() != text():
        print(f"{FILE.name} does not follow from the model: run python -m lab.decisions --write, and build")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
