"""Estimates what the mLSTM kernels cost on an M1: instruction counts, memory traffic, and times predicted from both.

No kernel runs on a GPU. The counts come from Mesa's compiler for the M1's GPU (lab/agx/README.md), the traffic from the
software Metal device in checked mode, and the rates from csrc/planner/chips.h. A dispatch takes the time that the model
assumes.

    python -m lab.predictions.mlstm --chunk-size 64 --tokens 2048
"""

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.counting.instructions import readable_copy, run_tool
from lab.model.kernel import DISPATCH_SECONDS
from torch_marlin_metal.profiling import AppleSiliconGPU

TYPES = ("float16", "bfloat16", "float32")
# Clocks of a scheduler for one matrix product, as in the counting tool. Other instructions take one issue slot.
MATRIX_CLOCKS = 17
BLOCK, OUTPUT_SIMDGROUPS, TILE, STEP_COLUMNS, STEP_SIMDGROUPS = 32, 8, 64, 128, 16


@dataclass(frozen=True)
class Work:
    """The work for one head: scheduler clocks, the part of them for matrix products, DRAM bytes, and dispatches."""

    clocks: float = 0.0
    matrix: float = 0.0
    dram_bytes: float = 0.0
    dispatches: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.clocks + other.clocks,
            self.matrix + other.matrix,
            self.dram_bytes + other.dram_bytes,
            self.dispatches + other.dispatches,
        )

    def seconds(self, gpu: AppleSiliconGPU, heads: int) -> float:
        """Returns the seconds for all heads: launches, plus the longer of instruction time and memory time."""
        compute = heads * self.clocks / (gpu.cores * gpu.figures["schedulers"].value * gpu.clock_hz)
        memory = heads * self.dram_bytes / gpu.reachable_dram_bytes_per_second
        return max(compute, memory) + self.dispatches * DISPATCH_SECONDS


def loop(counts: dict[str, Any], matrix_ops: int) -> dict[str, Any]:
    """Returns the innermost loop that has `matrix_ops` matrix products."""
    found = [x for x in counts["loops"] if x["innermost"] and x["matrix_ops"] == matrix_ops]
    if len(found) != 1:
        raise RuntimeError(f"expected one innermost loop with {matrix_ops} matrix products, found {len(found)}")
    return found[0]


def own(counts: dict[str, Any], outer: dict[str, Any]) -> dict[str, Any]:
    """Returns the counts of a loop without the counts of its inner loops."""
    inner = [
        x
        for x in counts["loops"]
        if outer["start"] <= x["start"] and x["end"] <= outer["end"] and x["depth"] == outer["depth"] + 1
    ]
    added = ("issue", "simd_cycles", "ic_cycles", "matrix_cycles")
    return {figure: outer[figure] - sum(x[figure] for x in inner) for figure in added}


def instructions(part: dict[str, Any]) -> float:
    """Returns the clocks of all instructions except matrix products."""
    return float(max(part["issue"] + part["simd_cycles"], part["ic_cycles"] - part["matrix_cycles"]))


def states_work(counts: dict[str, Any], S: int, DK: int, DV: int, chunk: int, element_bytes: int) -> Work:
    """Returns the work of mlstm_states for one head.

    The code for the tail of a chunk is counted as if it always ran, but without its matrix products.
    """
    step = loop(counts, 16)
    outer = own(counts, next(x for x in counts["loops"] if not x["innermost"]))
    simdgroups = -(-DK // BLOCK) * -(-DV // BLOCK)
    chunks, steps = -(-S // chunk), -(-S // 8)
    matrix = simdgroups * steps * step["matrix_cycles"]
    clocks = simdgroups * (steps * step["est_cycles"] + chunks * instructions(outer))
    return Work(clocks, matrix, S * (DK + DV) * element_bytes + 4 * DK * DV * (chunks + 1), 1)


def output_work(counts: dict[str, Any], S: int, DK: int, DV: int, chunk: int, element_bytes: int) -> Work:
    """Returns the work of mlstm_output for one head.

    Code outside loops, including the code for tails, is counted once, without its matrix products.
    """
    scores, state, values = (loop(counts, n) for n in (8, 32, 64))
    unit = own(counts, next(x for x in counts["loops"] if not x["innermost"] and x["matrix_ops"]))
    sums = next(x for x in counts["loops"] if not x["innermost"] and not x["matrix_ops"])  # the sums q . n
    sums_step = next(x for x in counts["loops"] if sums["start"] < x["start"] < sums["end"])
    decay = next(x for x in counts["loops"] if x["innermost"] and not x["matrix_ops"] and x["shuffles"])
    outermost = [x for x in counts["loops"] if x["depth"] == 0]
    straight = instructions(counts["total"]) - sum(instructions(x) for x in outermost)
    own_matrix = 40 * MATRIX_CLOCKS  # ten fragments on and below the diagonal, times four fragments of columns
    decay_tokens = 98  # tokens whose decays a block adds up over the six pairs of fragments of its own keys

    strips = -(-DV // BLOCK)
    groups = -(-strips // OUTPUT_SIMDGROUPS)
    blocks_per_chunk = -(-chunk // BLOCK)
    total = Work()  # for one chunk
    for block in range(blocks_per_chunk):
        units = 8 * (block + 1) - 2
        per_unit = -(-DK // BLOCK) * scores["est_cycles"] + instructions(unit)
        clocks = groups * (units * per_unit + decay_tokens * instructions(decay))
        clocks += groups * BLOCK * (-(-DK // BLOCK) * instructions(sums_step) + instructions(own(counts, sums)))
        clocks += strips * (straight + own_matrix + -(-DK // 16) * state["est_cycles"] + block * values["est_cycles"])
        matrix = groups * units * -(-DK // BLOCK) * scores["matrix_cycles"]
        matrix += strips * (own_matrix + -(-DK // 16) * state["matrix_cycles"] + block * values["matrix_cycles"])
        total += Work(clocks, matrix)
    chunks = S / chunk
    moved = S * (2 * DK + 2 * DV) * element_bytes + 4 * DK * DV * chunks
    return Work(total.clocks * chunks, total.matrix * chunks, moved, 1)


def gates_work(counts: dict[str, Any], S: int) -> Work:
    clocks = sum(instructions(x) for x in counts["loops"] if x["innermost"]) * -(-S // BLOCK)
    return Work(clocks, 0.0, 4.0 * S * 8, 1)


def step_work(counts: dict[str, Any], DK: int, DV: int) -> Work:
    """Returns the work of mlstm_step for one head and token. The kernel reads and writes C once."""
    rows = max((x for x in counts["loops"] if x["innermost"]), key=lambda x: x["device_store_bytes"])
    groups = -(-DV // STEP_COLUMNS)
    straight = instructions(counts["total"]) - instructions(rows)
    clocks = groups * (DK * rows["est_cycles"] + STEP_SIMDGROUPS * straight)
    return Work(clocks, 0.0, 2 * 4 * DK * DV, 1)


def traffic(chunk: int) -> Table:
    """Returns the bytes that a small head reads and writes on the software device, divided by the distinct bytes."""
    import torch

    from tests.support.kernels import mlstm_problems
    from tests.support.kernels.launch import number

    p = mlstm_problems.Sequence(S=2 * chunk, DK=64, DV=128, chunk_size=chunk, H=1, dtype=torch.float16)
    run = mlstm_problems.run(p, simdgroups=4)
    slots = {number(f"kSlot{n}"): n for n in ("Q", "K", "V", "H", "StatesC", "FinalC", "Gates", "OutM")}
    table = Table(title=f"software device: S={p.S} DK={p.DK} DV={p.DV} chunk {chunk}, one head", title_justify="left")
    for name in ("kernel", "matrix products", "barriers", "threadgroup bytes", "bytes read (of distinct)", "written"):
        table.add_column(name)
    for kernel, counters in run.counters.items():
        assert counters.buffers is not None
        named = {slots[s]: c for s, c in counters.buffers.items() if s in slots}
        read = ", ".join(
            f"{n} {c['bytes_read']} ({c['bytes_read'] / c['distinct_read']:.1f}x)"
            for n, c in named.items()
            if c["distinct_read"]
        )
        written = ", ".join(f"{n} {c['bytes_written']}" for n, c in named.items() if c["bytes_written"])
        shared = (counters.threadgroup_bytes_read or 0) + (counters.threadgroup_bytes_written or 0)
        table.add_row(kernel, str(counters.mmas), str(counters.threadgroup_barriers), str(shared), read, written)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-size", type=int, default=256, dest="DK")
    parser.add_argument("--value-size", type=int, default=512, dest="DV")
    parser.add_argument("--chunk-size", type=int, default=64)
    parser.add_argument("--element", choices=TYPES, default="float16")
    arguments = parser.parse_args()
    S, DK, DV, chunk = arguments.tokens, arguments.DK, arguments.DV, arguments.chunk_size
    size = 4 if arguments.element == "float32" else 2
    shared = -(-chunk // BLOCK) * BLOCK * BLOCK * 4
    launches = {
        "mlstm_gates": (512, 0),
        "mlstm_states": (128, 0),
        "mlstm_output": (256, shared),
        "mlstm_step": (512, STEP_SIMDGROUPS * (STEP_COLUMNS + 1) * 4),
    }
    counts = {}
    with tempfile.TemporaryDirectory() as name:
        readable_copy(Path(name))
        for kernel, (threads, memory) in launches.items():
            entry = kernel if kernel == "mlstm_gates" else f"{kernel}_{arguments.element}"
            options = ["-D", "vector_activations=1", "-D", "vector_columns=1"] + (
                ["--tg", f"0={memory}"] if memory else []
            )
            source = f"kernels/mlstm/{kernel.removeprefix('mlstm_')}.metal"
            counts[kernel] = run_tool(Path(name), source, entry, threads, *options)
    works = {
        "mlstm_gates": gates_work(counts["mlstm_gates"], S),
        "mlstm_states": states_work(counts["mlstm_states"], S, DK, DV, chunk, size),
        "mlstm_output": output_work(counts["mlstm_output"], S, DK, DV, chunk, size),
        "mlstm_step": step_work(counts["mlstm_step"], DK, DV),
    }

    console = Console(width=200)
    table = Table(title=f"{arguments.element}, DK={DK} DV={DV} chunk {chunk}", title_justify="left")
    for name in ("kernel", "half-registers", "spills:fills", "code bytes", "longest loop", "matrix of estimate"):
        table.add_column(name)
    for name, c in counts.items():
        share = f"{works[name].matrix / works[name].clocks:.0%}" if works[name].matrix else "-"
        longest = max((x["code_bytes"] for x in c["loops"]), default=0)
        table.add_row(
            name, str(c["half_registers"]), f"{c['spills']}:{c['fills']}", str(c["code_bytes"]), str(longest), share
        )
    console.print(table)
    console.print(traffic(min(chunk, 64)))

    table = Table(title=f"predicted: {arguments.heads} heads, {S} tokens", title_justify="left")
    for name in (
        "GPU",
        "gates us",
        "states us",
        "output us",
        "all ms",
        "token by token ms",
        "ratio",
        "without launches",
    ):
        table.add_column(name, justify="right")
    sequential = works["mlstm_step"]
    for chip in map(AppleSiliconGPU.from_name, AppleSiliconGPU.names()):
        times = [works[n].seconds(chip, arguments.heads) for n in ("mlstm_gates", "mlstm_states", "mlstm_output")]
        step = sequential.seconds(chip, arguments.heads)
        whole, tokens = sum(times), S * step
        bare = S * (step - DISPATCH_SECONDS) / (whole - 3 * DISPATCH_SECONDS)
        cells = [f"{1e6 * t:.0f}" for t in times]
        table.add_row(
            chip.name, *cells, f"{1e3 * whole:.2f}", f"{1e3 * tokens:.1f}", f"{tokens / whole:.1f}", f"{bare:.1f}"
        )
    console.print(table)


if __name__ == "__main__":
    main()
