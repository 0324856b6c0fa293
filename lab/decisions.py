"""Makes the planner's table of decisions from the model, and says how good its choices are by the model.

    python -m lab.decisions --write          makes csrc/planner/decisions.inc
    python -m lab.decisions --check          compares the file with the model, and exits with 1 if it no longer follows
    python -m lab.decisions --score 10000    compares the planner's choices with the model's best: products, experts
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.model.counts import KernelCounts, counts_of, rows
from lab.model.geometry import BLOCK, FUSED_COLUMNS, FUSED_K, GEMV_COLUMNS, GEMV_K
from lab.model.kernel import CACHE_LATENCY, figure
from lab.model.problems import Problem, Tiling
from torch_marlin_metal.formats import WEIGHT_FORMATS
from torch_marlin_metal.profiling import AppleSiliconGPU

FILE = Path(__file__).resolve().parents[1] / "csrc/planner/decisions.inc"
# Activations, and a GPU that computes with them in this way.
ARITHMETIC = {"half": ("float16", "M4"), "emulated_bfloat": ("bfloat16", "M1"), "single": ("float32", "M4")}
MOST_UNITS = {"gemv": 8, "fused": 4}
# The kernel of each variant, and its forms for experts.
KERNELS = {
    "gemv": ("gemv", "moe_gemv", "moe_gemv_reduce", "moe_gemv_blocks"),
    "fused": ("gemm_fused", "moe_fused"),
}
ONE_ROW = ("moe_gemv", "moe_gemv_reduce")
REASONS = {
    "gemv": "reads the weight once and multiplies lane by lane",
    "fused": "shares what it decodes between 8 rows of a matrix product",
    "integer": "integer codes become floats by masks",
    "e2m1": "E2M1 codes become floats by shifts and masks",
    "table": "each code is looked up",
    "half": "",
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
        kernel: "gemv" or "fused".
        decode: clocks to decode the weights of a step.
        unit: clocks of a unit of rows in a step.
        group_end: clocks at the end of a group.
        unit_end: clocks of a unit of rows there.
        wait: by units, the clocks that a simdgroup waits for the loads of a step.
        half_registers: by units, the 16-bit registers of a thread.
        experts_registers: by units up to 4, those of the kernel's forms for experts.
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
    half_registers: tuple[int, ...]
    experts_registers: tuple[int, ...]

    @property
    def reason(self) -> str:
        """Returns why the kernel costs what the row says."""
        return f"{REASONS[self.kernel]}: {REASONS[self.codes]}{REASONS[self.arithmetic]}"

    @property
    def text(self) -> str:
        """Returns the row in C++."""
        costs = ", ".join(f"{cost:.1f}" for cost in (self.decode, self.unit, self.group_end, self.unit_end))
        wait, registers, experts = (
            ", ".join(map(str, values)) for values in (self.wait, self.half_registers, self.experts_registers)
        )
        return (
            f"    Decision{{Arithmetic::{self.arithmetic}, CodeKind::{self.codes}, {self.bits}, "
            f"GemmVariant::{self.kernel}, {costs},\n"
            f"             {{{wait}}},\n             {{{registers}}}, {{{experts}}},\n"
            f'             "{self.reason}"}},\n'
        )


def _line(values: NDArray[np.float64]) -> tuple[float, float]:
    """Returns value and slope of the line through values at 1, 2, ... that has the smallest relative errors."""
    units = np.arange(1, len(values) + 1, dtype=np.float64)
    slope, value = np.polyfit(units, values, 1, w=1 / values)
    return float(value), float(slope)


def _counted(variant: str, kernel: str, units: int, formats: list[str], arithmetic: str) -> list[KernelCounts]:
    """Returns the counts of a kernel for some formats with this many units of rows."""
    activations, chip = ARITHMETIC[arithmetic]
    tile = (units, GEMV_COLUMNS, GEMV_K) if variant == "gemv" else (BLOCK * units, FUSED_COLUMNS, FUSED_K)
    tiling = Tiling(variant, kernel, tile)
    gpu = AppleSiliconGPU.from_name(chip)
    return [
        counts_of(tiling, tile[0], Problem(1, 128, 128, name, activations=activations), gpu) for name in formats
    ]


def _decision(kernel: str, arithmetic: str, codes: str, bits: int) -> Decision:
    formats = [row.name for row in WEIGHT_FORMATS.values() if (row.code_kind, row.code_bits) == (codes, bits)]
    clock = float(np.mean([figure(AppleSiliconGPU.from_name(name), "clock_ghz") for name in AppleSiliconGPU.names()]))
    gpu = AppleSiliconGPU.from_name(ARITHMETIC[arithmetic][1])
    latency = clock * figure(gpu, "dram_latency_ns")
    steps, ends, waited, registers = [], [], [], []
    for units in range(1, MOST_UNITS[kernel] + 1):
        counted = _counted(kernel, KERNELS[kernel][0], units, formats, arithmetic)
        step = float(np.mean([row.issue for row in counted]))
        end = float(np.mean([row.outer_issue for row in counted]))
        waits = float(np.mean([row.step_waits[0] * latency + row.step_waits[1] * CACHE_LATENCY for row in counted]))
        if kernel == "fused":  # its outer loop has a fixed length
            step, end = step + end * FUSED_K / counted[0].outer_k, 0.0
        steps.append(step)
        ends.append(end)
        waited.append(round(waits))
        registers.append(max(row.half_registers for row in counted))
    group_end = _line(np.array(ends)) if kernel == "gemv" else (0.0, 0.0)
    experts = tuple(
        max(
            row.half_registers
            for form in KERNELS[kernel][1:]
            if units == 1 or form not in ONE_ROW
            for row in _counted(kernel, form, units, formats, arithmetic)
        )
        for units in range(1, 5)
    )
    lines = (*_line(np.array(steps)), *group_end)
    return Decision(arithmetic, codes, bits, kernel, *lines, tuple(waited), tuple(registers), experts)


def decisions() -> Iterator[Decision]:
    """Yields the rows of the table."""
    codes = dict.fromkeys((row.code_kind, row.code_bits) for row in WEIGHT_FORMATS.values())
    for kernel in MOST_UNITS:
        for arithmetic in ARITHMETIC:
            for kind, bits in codes:
                yield _decision(kernel, arithmetic, kind, bits)


def text() -> str:
    """Returns the file that follows from the model."""
    lines = [
        "// python -m lab.decisions --write makes this file from the model in lab/model, and --check compares them.\n",
        "inline constexpr std::array kDecisions{\n",
        *(row.text for row in decisions()),
        "};\n\ninline constexpr std::array kKernelRegisters{\n",
    ]
    own = dict.fromkeys(row.kernel for row in rows())
    for kernel in own:
        if kernel in ("gemv", "gemm_fused") or (kernel.startswith("moe_")):
            continue
        most = max(row.half_registers for row in rows() if row.kernel == kernel)
        lines.append(f"    KernelRegisters{{Kernel::{kernel}, {most}}},\n")
        if kernel == "gemm_tensor":
            lines.append(f"    KernelRegisters{{Kernel::moe_tensor, {most}}},\n")
    return "".join([*lines, "};\n"])


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
