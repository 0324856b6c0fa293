"""Breaks `kernels/` on purpose, one place at a time, and shows that a test notices (`make mutate`).

Each mutant is a copy of `kernels/` with one change. The cases of `mutation_cases.py` for the changed file run on it in
checked mode until one fails. These are the changes:
- A barrier is removed, weakened to a simdgroup barrier, or stripped of its memory flag.
- A comparison with a size that is known only at run time is moved by one or, outside of loop headers, decided as if
  there were no limit.
- A `min` with such a size is replaced by its other argument.
- The faults of `mutation_seeds.py` are put in.
"""

import argparse
import collections
import concurrent.futures
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE.parents[1])]

import mutation_cases  # noqa: E402
from mutation_seeds import SEEDS  # noqa: E402

from softmetal.device import CompileError, KernelFault  # noqa: E402
from tests.support.kernels import launch as kernel_launch  # noqa: E402

KERNELS = kernel_launch.KERNELS
TIMEOUT_SECONDS = 120
OUTCOMES = ("caught", "survived", "explained", "does not compile", "cannot be judged")
# Reasons why a mutant may survive. EXPLAINED below maps descriptions of mutants to these reasons.
_NO_TOKENS = "a block without tokens, or of no chunks, is the scan's neutral element"
_GUARDED = "the last whole step goes through the guarded one: the same loads, the same sums"
_EQUAL = "equal values"
_SMALL = "at zero both results are below one rounding"
_NO_PAIRS = "a step without pairs stores nothing"
_UNREAD = "the second offset of even rows is never read"
_MORE_ROWS = "the loop for more row blocks adds the same products"
_NOT_STORED = "sums beyond the loop's rows are not stored"
_NO_ROW = "has_row() is false for the row beyond the last"
_IGNORED = "a pair that the pass does not sort is ignored, whatever its number"
EXPLAINED: dict[str, str] = {
    "experts/experts.h: 'id < long(experts)' -> 'id <= long(experts)'": _EQUAL,
    "experts/moe_fused.metal: 'rows.count > 3 * kBlock' -> 'rows.count >= 3 * kBlock'": _MORE_ROWS,
    "experts/moe_fused.metal: 'rows.count > 2 * kBlock' -> 'rows.count >= 2 * kBlock'": _MORE_ROWS,
    "experts/moe_sort.metal: 'pair < end' -> 'pair <= end'": _NO_PAIRS,
    "experts/moe_sort.metal: 'min(expert, uint(kMoeSortThreads))' -> '(expert)'": _IGNORED,
    "gemm/fused.h: 'min(uint(rows_per_threadgroup) / kBlock, row_blocks)' -> "
    "'(uint(rows_per_threadgroup) / kBlock)'": _NOT_STORED,
    "gemm/gemv.h: 'r < most_rows' -> 'r <= most_rows'": _NO_ROW,
    "gemm/gemv.h: 'min(uint(rows_per_threadgroup), most_rows)' -> '(uint(rows_per_threadgroup))'": _NOT_STORED,
    "gemm/fused.h: 'e < Rows::offsets_per_block()' -> 'e <= Rows::offsets_per_block()'": _UNREAD,
    "decoder/gated.h: 'x < 0.0f' -> 'x <= 0.0f'": _SMALL,
    "decoder/gated.h: 'gate > limit' -> 'gate >= limit'": _EQUAL,
    "decoder/gated.h: 'up > limit' -> 'up >= limit'": _EQUAL,
    "mlstm/gates.metal: 'first < end' -> 'first <= end'": _NO_TOKENS,
    "mlstm/gates.metal: 'first < params.chunks' -> 'first <= params.chunks'": _NO_TOKENS,
    "mlstm/states.metal: 'token + kBlock <= length' -> 'token + kBlock < length'": _GUARDED,
    "mlstm/output.metal: 'first + kMlstmBlock <= DK' -> 'first + kMlstmBlock < DK'": _GUARDED,
    "mlstm/output.metal: 'first + 2 * kBlock <= DK' -> 'first + 2 * kBlock < DK'": _GUARDED,
    "mlstm/output.metal: 'size <= floor_value' -> 'size < floor_value'": _EQUAL,
    "mlstm/step.metal: 'size <= floor_value' -> 'size < floor_value'": _EQUAL,
}


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    kind: str
    start: int  # position of the replaced text in the file
    end: int
    replacement: str
    original: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.original!r} -> {self.replacement!r}"

    @property
    def description(self) -> str:
        return f"{self.file}: {self.original!r} -> {self.replacement!r}"

    def apply(self, text: str) -> str:
        return text[: self.start] + self.replacement + text[self.end :]


BARRIER = re.compile(r"threadgroup_barrier\(mem_flags::(mem_threadgroup|mem_device)\);")
COMPARISON = re.compile(r"(?<=[\w)\]]) (<=|>=|<|>) (?=[\w(])")
# Comparisons with these limits are not mutated: the compiler knows them and unrolls the loops over them.
CONSTANT_LIMIT = re.compile(r"\s*(Tile::|(k[A-Z]\w*|\d+\w*)( / k[A-Z]\w*)?\s*$)")
MINIMUM = re.compile(r"\bmin\(")
MOVED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", lambda m: " " * len(m[0]), text)


def _operand(code: str, position: int, step: int) -> int:
    """Returns the end of the operand that begins at `position`, in the direction of `step`."""
    opening, closing = ("(", ")") if step > 0 else (")", "(")
    depth = 0
    while 0 <= position < len(code):
        c = code[position]
        if depth == 0 and (c in ";,?{}" + closing or code[position : position + 2] in ("&&", "||")):
            break
        if depth == 0 and c in "&|=:" and code[position - 1 : position + 1] != "::" and code[position + 1] != ":":
            break
        depth += (c == opening) - (c == closing)
        position += step
    return position


def _in_loop_header(code: str, position: int) -> bool:
    depth = 0
    while position > 0 and depth <= 0 and code[position] not in "{}":
        position -= 1
        depth += (code[position] == "(") - (code[position] == ")")
    return code[position - 4 : position] == "for "


def mutants(file: str, text: str) -> Iterator[Mutant]:
    code = without_comments(text)

    def mutant(kind: str, start: int, end: int, replacement: str) -> Mutant:
        lead = len(text[start:end]) - len(text[start:end].lstrip())
        start, original = start + lead, " ".join(text[start:end].split())
        return Mutant(file, text.count("\n", 0, start) + 1, kind, start, end, replacement, original)

    for m in BARRIER.finditer(code):
        yield mutant("barrier removed", *m.span(), ";")
        yield mutant("barrier weakened", *m.span(), f"simdgroup_barrier(mem_flags::{m[1]});")
        yield mutant("barrier without flag", *m.span(), "threadgroup_barrier(mem_flags::mem_none);")
    for m in COMPARISON.finditer(code):
        left = _operand(code, m.start() - 1, -1) + 1
        right = _operand(code, m.end(), 1)
        if "return" in code[left : m.start()]:
            left = code.index("return", left) + len("return ")
        if CONSTANT_LIMIT.match(code[m.end() : right]) or "template" in code[left : m.start()]:
            continue
        whole = code[left:right]
        moved = f"{code[left : m.start()].strip()} {MOVED[m[1]]} {code[m.end() : right].strip()}"
        yield mutant("comparison moved", left, left + len(whole.rstrip()), moved)
        if not _in_loop_header(code, left):
            dropped = "true" if m[1] in ("<", "<=") else "false"
            yield mutant("guard dropped", left, left + len(whole.rstrip()), dropped)
    for m in MINIMUM.finditer(code):
        comma = _operand(code, m.end(), 1)
        end = _operand(code, comma + 1, 1)
        if not CONSTANT_LIMIT.match(code[comma + 1 : end]):
            yield mutant("limit dropped", m.start(), end + 1, f"({code[m.end() : comma].strip()})")
    for kind, original, replacement in SEEDS.get(file, ()):
        if text.count(original) != 1:
            raise ValueError(f"mutation_seeds.py: {file} has {original!r} {text.count(original)} times, expected once")
        start = text.index(original)
        yield mutant(kind, start, start + len(original), replacement)


def _run(folder: str, file: str) -> str:
    """Runs the cases of a file on the kernels in `folder`, in a separate process, and returns the verdict."""
    kernel_launch.KERNELS = Path(folder) / "kernels"
    os.chdir(folder)  # the compiler searches the working directory for the kernels' headers first
    for name, case in mutation_cases.cases_of(file):
        try:
            case()
        except CompileError as error:
            return f"does not compile: {str(error).splitlines()[0]}"
        except (AssertionError, KernelFault) as error:
            return f"caught by {name}: {f'{error} '.splitlines()[0][:150]}"
        except Exception as error:
            return f"cannot be judged: {error!r}"
    return "survived"


def _child(folder: str, file: str, pipe: multiprocessing.connection.Connection) -> None:
    pipe.send(_run(folder, file))


def judge(mutant: Mutant | None, file: str) -> str:
    """Returns the verdict of a file's cases on one mutant, or on the unchanged kernels if `mutant` is None."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        kernels = shutil.copytree(KERNELS, Path(folder) / "kernels")
        if mutant:
            path = kernels / mutant.file
            path.write_text(mutant.apply(path.read_text()))
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(folder, file, sender))
        child.start()
        sender.close()
        try:
            return receiver.recv() if receiver.poll(TIMEOUT_SECONDS) else "caught: it does not end"
        except EOFError:
            return "caught: it crashes"
        finally:
            child.kill()
            child.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="mutants tested at once")
    parser.add_argument("--file", help="only this file of kernels/, for example gemm/gemv.metal")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    options = parser.parse_args()
    shared_with_host = {
        "shared/types.h",
        "shared/slots.h",
        "shared/kernel_list.h",
        "gemm/geometry.h",
        "experts/params.h",
        "decoder/params.h",
        "mlstm/params.h",
    }  # these headers contain no code that runs on the GPU
    files = {p.relative_to(KERNELS).as_posix(): p for p in sorted(KERNELS.rglob("*.*"))}
    files = {name: path for name, path in files.items() if name not in shared_with_host}
    chosen = [m for name, p in files.items() if options.file in (None, name) for m in mutants(name, p.read_text())]
    if options.list:
        print(*chosen, sep="\n")
        return 0
    if (verdict := judge(None, options.file or "")) != "survived":
        print(f"the kernels as they are: {verdict}")
        return 1
    start = time.time()
    results = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for m, verdict in zip(chosen, pool.map(judge, chosen, [m.file for m in chosen]), strict=True):
            outcome = next(k for k in OUTCOMES if verdict.startswith(k))
            if outcome == "survived" and m.description in EXPLAINED:
                outcome, verdict = "explained", f"survives: {EXPLAINED[m.description]}"
            results.append((m, outcome, verdict))
            print(f"{m}\n    {verdict}", flush=True)
    not_there = set(EXPLAINED) - {m.description for m in chosen} if options.file is None else set()
    return summary(results, sorted(not_there), time.time() - start)


def summary(results: list[tuple[Mutant, str, str]], not_there: list[str], seconds: float) -> int:
    """Prints counts by file and the mutants that no test caught. Returns 0 if EXPLAINED has a reason for each of them.

    `not_there` are the descriptions in EXPLAINED that match no mutant.
    """
    print()
    for file in dict.fromkeys(m.file for m, _, _ in results):
        counts = collections.Counter(outcome for m, outcome, _ in results if m.file == file)
        print(f"{file:24} " + ", ".join(f"{counts[k]} {k}" for k in OUTCOMES if counts[k]))
    for m, outcome, verdict in results:
        if outcome != "caught":
            print(f"{m}\n    {verdict}")
    for description in not_there:
        print(f"explained, but no such mutant: {description}")
    good = sum(outcome in ("caught", "explained") for _, outcome, _ in results)
    print(f"{len(results)} mutants in {seconds:.0f} s: {good} caught or explained, {len(results) - good} not")
    return 0 if good == len(results) and not not_there else 1


if __name__ == "__main__":
    sys.exit(main())
