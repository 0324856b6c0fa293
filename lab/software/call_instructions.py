"""Counts the instructions that the host executes in one call, by library, on the software Metal device (Linux, x86-64).

The process executes some calls in single steps: the processor's trap flag raises SIGTRAP after each instruction. The
plans of these calls are already cached. The program counts instead of measuring time, because counts repeat exactly and
do not depend on other programs. The table has a column for each group of libraries: "ours" is the extension, "PyTorch"
allocates and dispatches, and "stand-ins" are the device's Metal, Objective-C run time and MPS stream, which Apple's and
PyTorch's code replaces on a Mac. Nothing is committed while calls are counted, so no kernel runs.
"""

import argparse
import ctypes
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

LAYER_OPERATORS = ("rms_norm", "add_rms_norm", "rotary", "gated_activation", "write_cache")
OPERATORS = ("gemm", "moe_gemm", "dequantize", "gptq_repack", *LAYER_OPERATORS, "mlstm_step")
GROUPS = {
    "ours": ("_C.cpython",),
    "PyTorch": ("libtorch", "libc10"),
    "stand-ins": ("libsoftmetal", "libobjc", "libBlocksRuntime"),
    "Python": ("python", "_ctypes", "libffi"),
}
STEPPER = """
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <ucontext.h>

static const uint64_t* bounds;  // first and last address of each mapping, ascending
static uint64_t* counts;
static long mappings;
static volatile int counting;

static void trapped(int number, siginfo_t* information, void* context) {
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  if (!counting) {
    registers[REG_EFL] &= ~0x100L;  // the trap flag
    return;
  }
  const uint64_t at = (uint64_t)registers[REG_RIP];
  long low = 0, high = mappings;
  while (low < high) {
    const long middle = (low + high) / 2;
    if (bounds[2 * middle + 1] <= at) low = middle + 1; else high = middle;
  }
  ++counts[low];
}

void start(const uint64_t* the_bounds, uint64_t* the_counts, long the_mappings) {
  struct sigaction action = {.sa_sigaction = trapped, .sa_flags = SA_SIGINFO};
  bounds = the_bounds;
  counts = the_counts;
  mappings = the_mappings;
  counting = 1;
  sigaction(SIGTRAP, &action, 0);
  __asm__ volatile("pushfq; orq $0x100, (%%rsp); popfq" ::: "memory", "cc");
}

void stop(void) { counting = 0; }
"""


def stepper() -> ctypes.CDLL:
    folder = tempfile.mkdtemp()
    source, library = Path(folder, "stepper.c"), Path(folder, "stepper.so")
    source.write_text(STEPPER)
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-mno-red-zone", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def layer_call_of(operator: str) -> Callable[[], object]:
    """Returns a closure that runs one of LAYER_OPERATORS on the tensors of one token."""
    import torch

    ops = torch.ops.torch_marlin_metal
    x, other, weight = (torch.randn(*shape).half().to("mps") for shape in ((1, 1, 256), (1, 1, 256), (256,)))
    heads, table = torch.randn(1, 4, 1, 64).half().to("mps"), torch.randn(1, 1, 64).half().to("mps")
    keys, values = (torch.zeros(1, 4, 32, 64).half().to("mps") for _ in range(2))
    start = torch.tensor(7).to("mps")
    calls: dict[str, Callable[[], object]] = {
        "rms_norm": lambda: ops.rms_norm(x, weight, eps=1e-5),
        "add_rms_norm": lambda: ops.add_rms_norm(x, other, weight, eps=1e-5),
        "rotary": lambda: ops.rotary(heads, heads, table, table),
        "gated_activation": lambda: ops.gated_activation(x, other),
        "write_cache": lambda: ops.write_cache(keys, values, heads, heads, start),
    }
    return calls[operator]


def call_of(operator: str) -> Callable[[], object]:
    if operator in LAYER_OPERATORS:
        return layer_call_of(operator)
    import torch

    import torch_marlin_metal as tmm

    torch.manual_seed(0)
    ops = torch.ops.torch_marlin_metal
    if operator == "mlstm_step":
        q, k, v = (torch.randn(1, 2, 16).half().to("mps") for _ in range(3))
        i, f = (torch.randn(1, 2).half().to("mps") for _ in range(2))
        states = [torch.zeros(1, 2, *size, device="mps") for size in ((16, 16), (16,), ())]
        return lambda: ops.mlstm_step(q, k, v, i, f, *states)
    weight = tmm.quantize_weight(torch.randn(64, 256), "uint4b8", group_size=64).to("mps")
    arguments = {"weight_format": "uint4b8", "group_size": 64}
    if operator == "dequantize":
        return lambda: ops.dequantize(weight.b_packed, weight.scales, **arguments)
    if operator == "gptq_repack":
        return lambda: ops.gptq_repack(weight.b_packed)
    a = torch.randn(1, 256).half().to("mps")
    if operator == "moe_gemm":
        stack = {name: torch.stack([getattr(weight, name)] * 4) for name in ("b_packed", "scales")}
        ids = torch.tensor([[1, 3]], device="mps")
        return lambda: ops.moe_gemm(a, *stack.values(), ids, **arguments)
    return lambda: ops.gemm(a, weight.b_packed, weight.scales, **arguments)


def mappings() -> list[tuple[int, int, str]]:
    """Returns the executable mappings of this process: first address, address after the last byte, file."""
    rows = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if "x" in fields[1]:
            first, last = (int(x, 16) for x in fields[0].split("-"))
            rows.append((first, last, fields[5] if len(fields) > 5 else ""))
    return rows


def group_of(name: str) -> str:
    base = Path(name).name
    return next((group for group, parts in GROUPS.items() if any(part in base for part in parts)), "others")


def stepped(library: ctypes.CDLL, call: Callable[[], object], count: int) -> Counter[str]:
    known = mappings()
    bounds = (ctypes.c_uint64 * (2 * len(known)))(*(edge for first, last, _ in known for edge in (first, last)))
    counts = (ctypes.c_uint64 * (len(known) + 1))()
    library.start(bounds, counts, len(known))
    for _ in range(count):
        call()
    library.stop()
    found: Counter[str] = Counter()
    for (_, _, name), number in zip(known, counts, strict=False):
        found[group_of(name)] += number
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", default=OPERATORS)
    parser.add_argument("--calls", type=int, default=4)
    options = parser.parse_args()
    import softmetal

    softmetal.install()  # before anything asks torch about mps

    import torch  # isort: skip
    import torch_marlin_metal as tmm  # isort: skip

    tmm.tuning.set_commit_interval(0)
    library = stepper()
    print("| call | " + " | ".join([*GROUPS, "others", "sum"]) + " |")
    print("|---" * (len(GROUPS) + 3) + "|")
    for operator in options.operators:
        call = call_of(operator)
        with torch.inference_mode():
            for _ in range(5):
                call()
            torch.mps.synchronize()
            call()
            # The difference does not contain the instructions at the start and at the end of the loop.
            once, twice = (stepped(library, call, n * options.calls) for n in (1, 2))
        torch.mps.synchronize()
        figures = [(twice[group] - once[group]) // options.calls for group in [*GROUPS, "others"]]
        print(f"| {operator} | " + " | ".join(f"{figure:,}" for figure in [*figures, sum(figures)]) + " |", flush=True)


if __name__ == "__main__":
    main()
