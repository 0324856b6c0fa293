"""Compares the mLSTM with PyTorch's operators: time by sequence length, in one interleaved run.

    python benchmarks/mlstm.py [--threads 1] [--rounds 7] [--dtype bfloat16] [--picture mlstm.png] [--memory]

The rivals are the recurrence token by token, a straightforward chunkwise form in PyTorch operators, and this form
compiled by torch.compile. Before it is timed, every method must agree with the recurrence in fp64. With one thread,
times are CPU times of the process, which other work on the machine disturbs less. Every method converts 16-bit inputs
to fp32.
"""

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import logsigmoid

import torch_marlin_metal as tmm

SHAPES = [(32, 32), (64, 64), (64, 128), (128, 128), (128, 256), (256, 512)]
LENGTHS = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
LENGTH = 512  # tokens in the comparison of shapes
LONGEST_SEQUENTIAL = 2048
MEMORY_LENGTHS = [4096, 8192, 16384, 32768, 65536]
MEMORY_PROGRAM = """
import resource, sys, torch, torch_marlin_metal as tmm
S, DK, DV = map(int, sys.argv[1:])
tmm.mlstm(*(torch.zeros(1, 2, 64, D) for D in (DK, DK, DV)), *torch.zeros(2, 1, 2, 64))
q, k, v = (torch.zeros(1, 2, S, D) for D in (DK, DK, DV))
i, f = torch.zeros(2, 1, 2, S)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
h, state = tmm.mlstm(q, k, v, i, f)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, h.nbytes + sum(x.nbytes for x in state))
"""
METHODS = ("mlstm", "compiled chunkwise", "chunkwise", "sequential")
Method = Callable[..., Tensor]


def sequential(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, eps: float = 1e-6) -> Tensor:
    B, H, S, DK = q.shape
    C = q.new_zeros(B, H, DK, v.shape[-1])
    n, m = q.new_zeros(B, H, DK), q.new_zeros(B, H)
    q, decay, outputs = q * DK**-0.5, logsigmoid(f), []
    for t in range(S):
        carried = decay[:, :, t] + m
        m = torch.maximum(carried, i[:, :, t])
        forget = torch.exp(carried - m)[..., None]
        key = torch.exp(i[:, :, t] - m)[..., None] * k[:, :, t]
        C = forget[..., None] * C + key[..., None] * v[:, :, t, None, :]
        n = forget * n + key
        query = q[:, :, t, None, :]
        norm = torch.maximum((query @ n[..., None])[..., 0].abs(), torch.exp(-m)[..., None])
        outputs.append((query @ C)[..., 0, :] / (norm + eps))
    return torch.stack(outputs, 2)


def contributions(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, L: int) -> tuple[Tensor, ...]:
    """Returns the inputs by chunk, and each chunk's contribution to the state, scaled by its own largest gate."""
    B, H, S, DK = q.shape
    q, k, v = (x.reshape(B, H, S // L, L, -1) for x in (q * DK**-0.5, k, v))
    i, b = i.reshape(B, H, S // L, L), logsigmoid(f).reshape(B, H, S // L, L).cumsum(-1)
    a = b[..., -1:] - b + i
    top = a.amax(-1)
    keys = k * torch.exp(a - top[..., None])[..., None]
    return q, k, v, i, b, top, keys.transpose(-1, -2) @ v, keys.sum(-2)


def advance(
    C: Tensor, n: Tensor, m: Tensor, whole: Tensor, top: Tensor, more_C: Tensor, more_n: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the state after one chunk."""
    after = torch.maximum(whole + m, top)
    kept, added = torch.exp(whole + m - after)[..., None], torch.exp(top - after)[..., None]
    return kept[..., None] * C + added[..., None] * more_C, kept * n + added * more_n, after


def outputs(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, b: Tensor, C: Tensor, n: Tensor, m: Tensor, eps: float
) -> Tensor:
    """Computes the output of every chunk, given the state at the start of each chunk."""
    causal = torch.ones(q.shape[3], q.shape[3], dtype=torch.bool, device=q.device).tril()
    D = (b[..., :, None] - b[..., None, :] + i[..., None, :]).masked_fill(~causal, -math.inf)
    stabiliser = torch.maximum(D.amax(-1), b + m[..., None])
    weights = (q @ k.transpose(-1, -2)) * torch.exp(D - stabiliser[..., None])
    decayed = q * torch.exp(b + m[..., None] - stabiliser)[..., None]
    den = (decayed @ n[..., None])[..., 0] + weights.sum(-1)
    norm = torch.maximum(den.abs(), torch.exp(-stabiliser))[..., None] + eps
    return ((decayed @ C + weights @ v) / norm).flatten(2, 3)


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    L: int = 64,
    eps: float = 1e-6,
    parts: tuple[Callable[..., Any], ...] = (contributions, advance, outputs),
) -> Tensor:
    q, k, v, i, b, top, more_C, more_n = parts[0](q, k, v, i, f, L)
    states = [(torch.zeros_like(more_C[:, :, 0]), torch.zeros_like(more_n[:, :, 0]), torch.zeros_like(top[:, :, 0]))]
    for c in range(top.shape[2] - 1):
        states.append(parts[1](*states[-1], b[:, :, c, -1], top[:, :, c], more_C[:, :, c], more_n[:, :, c]))
    C, n, m = (torch.stack(x, 2) for x in zip(*states, strict=True))
    return parts[2](q, k, v, i, b, C, n, m, eps)


def in_fp32(method: Method) -> Method:
    return lambda q, k, v, i, f: method(q.float(), k.float(), v.float(), i, f).to(q.dtype)


def compiled_chunkwise(S: int) -> Method:
    """Compiles one graph for up to 1024 tokens.

    For more tokens, one graph would take minutes to compile. Three smaller graphs are compiled instead, one of which
    runs once for each chunk.
    """
    torch._dynamo.reset()
    if S <= 1024:
        return torch.compile(in_fp32(chunkwise), dynamic=False)
    parts = tuple(torch.compile(part, dynamic=False) for part in (contributions, advance, outputs))
    return in_fp32(lambda *x: chunkwise(*x, parts=parts))


def mlstm(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    return tmm.mlstm(q, k, v, i, f)[0]


def inputs(S: int, DK: int, DV: int, H: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, H, S, D, generator=generator).to(dtype) for D in (DK, DK, DV))
    i, f = torch.randn(1, H, S, generator=generator), 3 + torch.randn(1, H, S, generator=generator)
    return q, k, v, i, f


def seconds(method: Method, x: tuple[Tensor, ...], clock: Callable[[], float]) -> float:
    begin = clock()
    method(*x)
    once = clock() - begin
    repeats = max(1, min(100, int(0.02 / max(once, 1e-6))))
    begin = clock()
    for _ in range(repeats):
        method(*x)
    return min(once, (clock() - begin) / repeats)


def measure(
    methods: dict[str, Method], x: tuple[Tensor, ...], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Returns median times over rounds in which the methods take turns."""
    exact = tmm.mlstm(*(tensor.double() for tensor in x))[0]
    for name, method in methods.items():
        error = (method(*x).double() - exact).abs().max() / exact.abs().max()
        assert error < max(1e-3, torch.finfo(x[0].dtype).eps), f"{name}: error {error:.1e}"
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, method in methods.items():
            times[name].append(seconds(method, x, clock))
    return {name: statistics.median(values) for name, values in times.items()}


def memory(DK: int, DV: int) -> Table:
    """Measures in new processes how much a call adds to the peak resident memory, and the size of its results."""
    table = Table("", "peak MB", "of which h and state", title=f"mlstm's memory beyond its inputs, DK {DK}, DV {DV}")
    unit = 1 if sys.platform == "darwin" else 1024
    for S in MEMORY_LENGTHS:
        command = [sys.executable, "-c", MEMORY_PROGRAM, str(S), str(DK), str(DV)]
        peak, kept = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
        table.add_row(f"S {S}", f"{peak * unit / 1e6:.1f}", f"{kept / 1e6:.1f}")
    return table


def draw(times: dict[int, dict[str, float]], slope: float, title: str, picture: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name in METHODS:
        lengths = [S for S in times if name in times[S]]
        axes.loglog(lengths, [times[S][name] * 1e3 for S in lengths], "o-", label=name)
    axes.set(xlabel="tokens S", ylabel="ms", title=title, xticks=LENGTHS, xticklabels=LENGTHS)
    axes.legend(title=f"mlstm grows as S^{slope:.2f}")
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths-of", type=int, nargs=2, default=(64, 128), metavar=("DK", "DV"))
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--memory", action="store_true", help="peak memory over S, and nothing else")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter

    def methods(S: int) -> dict[str, Method]:
        rivals = (compiled_chunkwise(S), in_fp32(chunkwise), in_fp32(sequential))
        found = dict(zip(METHODS, (mlstm, *rivals), strict=True))
        return {name: method for name, method in found.items() if name != "sequential" or S <= LONGEST_SEQUENTIAL}

    console = Console(width=110)
    if arguments.memory:
        console.print(memory(*arguments.lengths_of))
        return

    def table(title: str, rows: dict[str, dict[str, float]]) -> None:
        out = Table("", *METHODS, "to sequential", "to compiled", title=title)
        for name, row in rows.items():
            cells = [f"{row[method] * 1e3:.3f} ms" if method in row else "" for method in METHODS]
            ratios = [
                f"{row[other] / row['mlstm']:.1f}x" if other in row else ""
                for other in ("sequential", "compiled chunkwise")
            ]
            out.add_row(name, *cells, *ratios)
        console.print(out)

    with torch.no_grad():
        shapes = {}
        for DK, DV in SHAPES:
            shapes[f"DK {DK} DV {DV}"] = measure(
                methods(LENGTH), inputs(LENGTH, DK, DV, dtype=dtype), arguments.rounds, clock
            )
        table(f"B 1, H 2, S {LENGTH}, {arguments.dtype}, {arguments.threads} thread(s)", shapes)

        DK, DV = arguments.lengths_of
        times = {}
        for S in LENGTHS:
            x = inputs(S, DK, DV, dtype=dtype)
            times[S] = measure(methods(S), x, arguments.rounds, clock)
    table(f"B 1, H 2, DK {DK}, DV {DV}", {f"S {S}": row for S, row in times.items()})
    logs = [(math.log(S), math.log(row["mlstm"])) for S, row in times.items()]
    slope = statistics.linear_regression(*zip(*logs, strict=True)).slope
    console.print(f"time of mlstm over S grows as S^{slope:.3f} (1 is linear)")
    if arguments.picture:
        draw(times, slope, f"mLSTM, DK {DK}, DV {DV}, {arguments.threads} CPU thread(s)", arguments.picture)


if __name__ == "__main__":
    main()
