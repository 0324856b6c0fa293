"""Counts which seeded faults the device notices. `python tests/seeds/table.py` prints the counts as a table.

A seed is a text with one fault. It also contains a correct variant, which the device must accept without a report.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import kernel_seeds
import text_seeds
from kernel_seeds import Seed

from softmetal import device
from softmetal.msl import compiler
from softmetal.msl.dialect import check
from softmetal.msl.lint import lint
from softmetal.msl.tokens import SourceError, significant, tokenize
from softmetal.msl.tools import CompileError

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
OUTCOMES = ("reported", "only values", "dead", "unnoticed")
RUNS = 3  # number of runs of a kernel, each with a different order of threads


@dataclass(frozen=True)
class Result:
    """The outcome of a seed. `control` is the device's message for the correct text, which should be empty."""

    group: str
    name: str
    outcome: str
    message: str
    control: str


def variant(text: str, good: bool) -> str:
    """Returns the faulty or the correct text of a seed."""
    return re.sub(r"/\*(.*?)\|(.*?)\*/", r"\2" if good else r"\1", text, flags=re.DOTALL)


def refusal(source: str) -> str:
    """Returns the error messages for a source, or "" if the device accepts it.

    Compiles only if no cheaper check fails.
    """
    try:
        text = compiler.preprocess(source, "seed.metal", [], [])
        code = significant(tokenize(text))
        messages = [error.message for error in (*lint(code), *check.refused(code))]
        if messages := messages or check.findings(text, compiler.DEFAULT_VERSION):
            return "\n".join(messages)
        compiler.compile_source(source, kernel="")
    except (CompileError, SourceError) as error:
        return str(error)
    return ""


def _together(texts: Iterable[str]) -> str:
    """Joins texts to one source. Each text gets its own namespace, and each function constant its own index."""
    numbers = count()
    joined = "\n".join(f"namespace seed_{i} {{ {text}\n}}" for i, text in enumerate(texts))
    return re.sub(r"function_constant\(\d+\)", lambda _: f"function_constant({next(numbers)})", joined)


def _controls(texts: list[str]) -> list[str]:
    """Returns the device's error message for each correct text, or "".

    First compiles all texts as one source, because compiling each text separately takes three times as long. If the
    device refuses the joined source, compiles each text separately to find the refused text. If every single text is
    accepted, the first text gets the message about the joined source.
    """
    alone = [text for text in texts if "#include" in text or "host_name" in text]
    if joined := refusal(HEAD + _together(text for text in texts if text not in alone)):
        messages = [refusal(HEAD + text) for text in texts]
        return messages if any(messages) else [f"together: {joined}", *messages[1:]]
    return [refusal(HEAD + text) if text in alone else "" for text in texts]


def texts() -> list[Result]:
    """Returns the outcomes of the texts that Metal's compiler refuses."""
    seeds = [(group, name, text) for group, part in text_seeds.CLASSES.items() for name, text in part.items()]
    with ThreadPoolExecutor(2) as pool:
        messages = list(pool.map(refusal, [HEAD + variant(text, False) for _, _, text in seeds]))
    controls = _controls([variant(text, True) for _, _, text in seeds])
    return [
        Result(group, name, "reported" if message else "unnoticed", message, control)
        for (group, name, _), message, control in zip(seeds, messages, controls, strict=True)
    ]


def _library(good: bool) -> device.Library:
    texts = []
    for i, seed in enumerate(kernel_seeds.SEEDS):
        text = variant(seed.source, good).replace("kernel void f(", f"kernel void f{i}(")
        texts.append(text.replace("_NAME", f"_{i}"))
    return device.compile(HEAD + "\n".join(texts), checked=True, file_name="seeds.metal")


def _run(library: device.Library, seed: Seed, order: int) -> tuple[list[str], list[bytes]]:
    """Runs a seed's kernel. Returns the reports of checked mode and the contents of the buffers."""
    arrays = [b.copy() for b in seed.buffers]
    if seed.same_memory:
        arrays[1] = arrays[0]
    kernel = library.kernel(f"f{kernel_seeds.SEEDS.index(seed)}")
    kernel.launch(**seed.launch, buffers=arrays, seed=order, raise_faults=False)
    return [fault.message for fault in kernel.last_faults], [array.tobytes() for array in arrays]


def kernels() -> list[Result]:
    wrong, right = _library(False), _library(True)
    results = []
    for seed in kernel_seeds.SEEDS:
        control, wanted = _run(right, seed, 0)
        runs = [_run(wrong, seed, order) for order in range(RUNS)]
        message = next((reports[0] for reports, _ in runs if reports), "")
        differs = any(got != wanted for _, got in runs)
        outcome = "reported" if message else "only values" if differs else "unnoticed"
        results.append(Result(seed.group, seed.name, outcome, message, "\n".join(control)))
    return results


_ERROR = ("'! ", '"! ')  # the first characters of an error that was printed with repr


def host_library() -> Path:
    """Builds the seeds of host code as an extension, which needs the device. Returns the path of the library."""
    import softmetal

    softmetal.install()
    source = Path(__file__).parents[1] / "host" / "all.mm"
    return softmetal.build_extension("softmetal_test_host", [source])


def _run_host(library: Path, names: list[str]) -> None:
    """Prints two lines for each seed: the results of the faulty and of the correct code."""
    import softmetal

    softmetal.install()
    run = ctypes.CDLL(str(library)).run_seed
    run.restype, run.argtypes = ctypes.c_char_p, [ctypes.c_char_p, ctypes.c_int]
    for name in names:
        for good in (0, 1):
            softmetal.faults()
            with softmetal.checked():
                print(repr(run(name.encode(), good).decode()), flush=True)


def host() -> list[Result]:
    """Returns the outcomes of the faulty host code.

    One process runs all seeds. If a seed ends the process, a new process runs the remaining seeds.
    """
    library = host_library()
    names_of = ctypes.CDLL(str(library)).seed_names
    names_of.restype = ctypes.c_char_p
    names = names_of().decode().splitlines()
    results: list[Result] = []
    while len(results) < len(names):
        rest = names[len(results) :]
        command = [sys.executable, __file__, "host", str(library), *rest]
        environment = os.environ | {"SOFTMETAL_QUEUE_OPERATORS": "1"}
        lines = subprocess.run(command, capture_output=True, text=True, env=environment).stdout.splitlines()
        for name, wrong, right in zip(rest, lines[0::2], lines[1::2], strict=False):
            outcome = "reported" if wrong.startswith(_ERROR) else "only values" if wrong != right else "unnoticed"
            results.append(_host_result(name, outcome, wrong, right))
        if len(lines) < 2 * len(rest):
            results.append(_host_result(rest[len(lines) // 2], "dead", "", "''"))
    return results


def _host_result(name: str, outcome: str, wrong: str, right: str) -> Result:
    group, fault = name.split(": ", 1)
    return Result(f"host, {group}", fault, outcome, wrong, right if right.startswith(_ERROR) else "")


def table(results: Iterable[Result]) -> str:
    """Returns the counts of each group, the faults without a report, and the correct texts with a report."""
    groups: dict[str, Counter[str]] = {}
    notes = []
    for result in results:
        groups.setdefault(result.group, Counter())[result.outcome] += 1
        if result.outcome != "reported":
            notes.append(f"{result.outcome}: {result.group}, {result.name}")
        if result.control:
            notes.append(f"correct text, wrongly reported: {result.group}, {result.name}: {result.control}")
    total = sum(groups.values(), Counter())
    lines = [f"{'':24}{'seeds':>8}" + "".join(f"{outcome:>13}" for outcome in OUTCOMES)]
    for name, counts in [*groups.items(), ("all", total)]:
        lines.append(f"{name:24}{counts.total():8}" + "".join(f"{counts[outcome]:13}" for outcome in OUTCOMES))
    return "\n".join([*lines, *notes])


if __name__ == "__main__":
    if sys.argv[1:2] == ["host"]:
        _run_host(Path(sys.argv[2]), sys.argv[3:])
    else:
        print(table([*texts(), *kernels(), *host()]))
