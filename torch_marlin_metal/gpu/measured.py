"""Measures, with small kernels, the rates that the planner's model assumes: memory, matrix products, instructions."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from torch_marlin_metal.extension import native
from torch_marlin_metal.gpu.device import AppleSiliconGPU
from torch_marlin_metal.gpu.occupancy import SIMD_WIDTH
from torch_marlin_metal.gpu.tuning.chains import Chain, gpu_clock, measure
from torch_marlin_metal.printing import RichText, table

# The primitives that docs/inside/kernels.md lists. Each has a type, an expression for the next value of `x` in round
# `i`, and the clocks that the model assumes for one simdgroup on one scheduler. Each lane has eight independent values,
# so latency does not limit the rate. The part of an expression that depends only on `i` is computed once for all eight.
# Shifts and conversions run on the complex unit. The second instruction in their expressions runs on another unit at
# the same time.
PRIMITIVES = {
    "fma": ("float", "fma(x, x, one)", 1.0),
    "mask": ("uint", "x & (y + i)", 1.0),
    "shift by a constant": ("uint", "(x >> 4) ^ y", 4.0),
    "integer to float": ("float", "float(as_type<uint>(x) + y)", 4.0),
    "shuffle, fixed distance": ("float", "simd_shuffle_xor(x, 1)", 2.0),
    "shuffle, varying index": ("float", "simd_shuffle(x, ushort((lane ^ i) & 31u))", 30.0),
    "simd_sum": ("float", "simd_sum(x) * one", 16.0),
}
CHAINS = 8
THREADS = 256
# The amounts of work on a Mac. Tests use smaller amounts, because the software device is slow.
READ_BYTES = 512 * 2**20
ROUNDS = 2048
SIMDGROUPS_PER_CORE = 64
STRIP_COLUMNS = 4096

_HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
_MEMORY = """
kernel void touch(device float* state [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  if (i == 0) state[0] += 1.0f;
}
// Reads uint4 after uint4: neighbouring threads read neighbouring addresses.
kernel void read_all(device float* state [[buffer(0)]], const device uint4* words [[buffer(1)]],
                     constant uint& count [[buffer(2)]], uint i [[thread_position_in_grid]],
                     uint threads [[threads_per_grid]]) {
  uint4 sum = uint4(0u);
  for (uint at = i; at < count; at += threads) sum ^= words[at];
  if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x9E3779B9u) state[0] += 1.0f;
}
// Reads as gemv does: a threadgroup of eight simdgroups takes strips of 512 bytes, `stride` uint4 apart.
kernel void read_strips(device float* state [[buffer(0)]], const device uint4* words [[buffer(1)]],
                        constant uint& rows [[buffer(2)]], constant uint& stride [[buffer(3)]],
                        uint lane [[thread_index_in_simdgroup]], uint part [[simdgroup_index_in_threadgroup]],
                        uint strip [[threadgroup_position_in_grid]]) {
  uint4 sum = uint4(0u);
  const uint each = rows / 8;
  for (uint row = part * each; row < (part + 1) * each; ++row) sum ^= words[row * stride + strip * 32 + lane];
  if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x9E3779B9u) state[0] += 1.0f;
}
"""
_MATRIX = """
kernel void multiply_all(device float* state [[buffer(0)]], constant uint& rounds [[buffer(1)]]) {
  simdgroup_matrix<ELEMENT, 8, 8> a = make_filled_simdgroup_matrix<ELEMENT, 8, 8>(ELEMENT(0.5f));
  simdgroup_matrix<ELEMENT, 8, 8> b = make_filled_simdgroup_matrix<ELEMENT, 8, 8>(ELEMENT(0.125f));
  simdgroup_matrix<float, 8, 8> sums[8];
  for (uint j = 0; j < 8; ++j) sums[j] = make_filled_simdgroup_matrix<float, 8, 8>(float(j));
  for (uint i = 0; i < rounds; ++i) {
    for (uint j = 0; j < 8; ++j) simdgroup_multiply_accumulate(sums[j], a, b, sums[j]);
  }
  float sum = 0.0f;
  for (uint j = 0; j < 8; ++j) sum += sums[j].thread_elements()[0];
  if (sum == -1.0f) state[0] += 1.0f;
}
"""
_PRIMITIVE = """
kernel void primitive(device float* state [[buffer(0)]], constant uint& rounds [[buffer(1)]],
                      constant uint& y [[buffer(2)]], uint lane [[thread_index_in_simdgroup]]) {
  const float one = float(y);
  VALUE values[8];
  for (uint j = 0; j < 8; ++j) values[j] = VALUE(lane + j + y);
  for (uint i = 0; i < rounds; ++i) {
    for (uint j = 0; j < 8; ++j) {
      const VALUE x = values[j];
      values[j] = VALUE(NEXT);
    }
  }
  VALUE all = values[0];
  for (uint j = 1; j < 8; ++j) all += values[j];
  if (float(all) == -1.0f) state[0] += one;
}
"""


@dataclass(frozen=True)
class MeasuredFigure:
    """A measured figure and the figure in the planner's model.

    Attributes:
        name: what was measured, for example a primitive of `PRIMITIVES`.
        unit: the unit of both values: "GB/s", "TFLOP/s", "us" or "clocks".
        measured: the median over the rounds.
        model: the value in the planner's model.
    """

    name: str
    unit: str
    measured: float
    model: float


@dataclass(frozen=True)
class MeasuredGPU(RichText):
    """The measured rates of a GPU and the rates in the planner's model. Prints as a table.

    Attributes:
        gpu: the GPU whose figures the planner uses on this machine, see `AppleSiliconGPU.planned`.
        figures: each entry compares one measured rate with the model.
    """

    gpu: AppleSiliconGPU
    figures: tuple[MeasuredFigure, ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures by name, for JSON."""
        return {figure.name: asdict(figure) for figure in self.figures}

    def __rich__(self) -> Table:
        rows = [
            (row.name, row.unit, f"{row.measured:.4g}", f"{row.model:.4g}", f"{row.measured / row.model:.2f}")
            for row in self.figures
        ]
        title = f"measured beside the model of {self.gpu.name}, {self.gpu.cores} cores"
        right = ("measured", "model", "measured / model")
        return table(title, "figure", "unit", *right, rows=rows, right=right)


def measure_gpu(rounds: int = 9) -> MeasuredGPU:
    """Measures this machine's GPU.

    Memory is read in two ways: from one end to the other, and in the strips in which `gemv` reads a weight. Times are
    converted to clocks with the clock rate in the planner's table, so an error of this rate is in all clocks.

    Args:
        rounds: the number of times that each kernel is timed. The figures are medians.

    Raises:
        RuntimeError: torch has no MPS device here.
    """
    gpu = AppleSiliconGPU.planned()
    state = torch.zeros(4, device="mps")
    chains = _memory_chains(gpu, state) | _compute_chains(gpu, state)
    times = measure(chains, rounds)
    seconds = {name: statistics.median(found.seconds for found in values) for name, values in times.items()}
    dispatch = seconds.pop("dispatch")
    return MeasuredGPU(gpu, tuple(_figures(gpu, seconds, dispatch)))


def _rows() -> int:
    """Returns the rows of `STRIP_COLUMNS` words in `READ_BYTES`, rounded down to a multiple of 8."""
    return READ_BYTES // (4 * STRIP_COLUMNS) // 8 * 8


def _chain(state: torch.Tensor, kernel: Any, *arguments: object, threads: int) -> Chain:
    def step(found: object, index: int) -> object:
        kernel(state, *arguments, threads=threads, group_size=min(threads, THREADS), arg_casts="int32")
        return found

    return Chain(state, step, lambda found: torch.mps.synchronize(), gpu_clock)


def _memory_chains(gpu: AppleSiliconGPU, state: torch.Tensor) -> dict[str, Chain]:
    library = torch.mps.compile_shader(_HEAD + _MEMORY)
    words = torch.ones(_rows() * STRIP_COLUMNS, dtype=torch.int32, device="mps")
    reading = gpu.cores * SIMDGROUPS_PER_CORE * SIMD_WIDTH
    strips = STRIP_COLUMNS // 128 * THREADS
    return {
        "dispatch": _chain(state, library.touch, threads=1),
        "read": _chain(state, library.read_all, words, words.numel() // 4, threads=reading),
        "read in strips": _chain(state, library.read_strips, words, _rows(), STRIP_COLUMNS // 4, threads=strips),
    }


def _compute_chains(gpu: AppleSiliconGPU, state: torch.Tensor) -> dict[str, Chain]:
    threads = gpu.cores * SIMDGROUPS_PER_CORE * SIMD_WIDTH
    chains = {}
    for name, element in (("matrix fp16", "half"), ("matrix fp32", "float")):
        kernel = torch.mps.compile_shader(f"{_HEAD}#define ELEMENT {element}\n{_MATRIX}").multiply_all
        chains[name] = _chain(state, kernel, ROUNDS, threads=threads)
    for name, (value, text, _) in PRIMITIVES.items():
        source = f"{_HEAD}#define VALUE {value}\n#define NEXT {text}\n{_PRIMITIVE}"
        chains[name] = _chain(state, torch.mps.compile_shader(source).primitive, ROUNDS, 1, threads=threads)
    return chains


def _figures(gpu: AppleSiliconGPU, seconds: dict[str, float], dispatch: float) -> list[MeasuredFigure]:
    figures = [MeasuredFigure("dispatch", "us", dispatch * 1e6, float(native.dispatch_seconds()) * 1e6)]
    for name in ("read", "read in strips"):
        rate = _rows() * 4 * STRIP_COLUMNS / seconds.pop(name)
        figures.append(MeasuredFigure(name, "GB/s", rate / 1e9, gpu.reachable_dram_bytes_per_second / 1e9))
    simdgroups = gpu.cores * SIMDGROUPS_PER_CORE
    schedulers = gpu.figures["schedulers"].value * gpu.cores
    for name, found in seconds.items():
        # Subtract `dispatch`, the time of an empty dispatch. Divide the rest by the operations of one scheduler.
        each = max(found - dispatch, 1e-3 * found) * schedulers / (simdgroups * ROUNDS * CHAINS)
        if name.startswith("matrix"):
            clocks = gpu.figures["matrix_clocks_" + name.split()[1]].value
            figures.append(MeasuredFigure(name, "clocks", each * gpu.clock_hz, clocks))
        else:
            figures.append(MeasuredFigure(name, "clocks", each * gpu.clock_hz, PRIMITIVES[name][2]))
    peak = 2 * 8**3 / next(f.measured for f in figures if f.name == "matrix fp32") * schedulers * gpu.clock_hz
    return [*figures, MeasuredFigure("matrix peak, fp32", "TFLOP/s", peak / 1e12, gpu.matrix_flop_per_second / 1e12)]
