"""Counts what the first product of a process compiles, by kind of model: text, kernels, and front-end time.

In the row "one library per file", the host compiles whole files, and the probe kernel is in gemv's file. In the other
rows the host compiles single functions, as this package does. The front end is clang 19 with -O2 and the Metal headers
of the software Metal device. As in the first stage of Metal's compiler, function constants have no values yet. Times
are CPU seconds of this machine; Apple's compiler has not been measured. No kernel is executed.
"""

import argparse
import re
import resource
from dataclasses import dataclass
from pathlib import Path

from build_support.embed_kernels import kernel_text
from softmetal.msl import compiler
from softmetal.msl.tokens import tokenize
from softmetal.msl.translate import Translator

ROOT = Path(__file__).resolve().parents[2]

METAL_TYPES = {"float16": "half", "bfloat16": "bfloat", "float32": "float"}
FAMILIES = {
    "Llama, GPTQ": ("uint4b8", "float16"),
    "Qwen, AWQ": ("uint4", "float16"),
    "gpt-oss, MXFP4": ("mxfp4", "bfloat16"),
    "Llama, NVFP4": ("nvfp4", "bfloat16"),
    "Llama, bitsandbytes NF4": ("lut4", "bfloat16"),
}
CONSTANT = re.compile(r"constant (bool|int) (\w+) \[\[\s*function_constant\(\d+\)\s*\]\]")


@dataclass
class Cost:
    """The total cost of some compiles."""

    libraries: int = 0
    kernels: int = 0
    text: int = 0  # bytes given to Metal
    code: int = 0  # bytes of LLVM text that the front end generates
    seconds: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compile_cost(library: str, only: str = "") -> Cost:
    """Returns the cost of a file of kernels/, or of one instance of its template."""
    defines = [f"MARLIN_ONLY={only}", 'MARLIN_ONLY_NAME="only"'] if only else []
    source = kernel_text(ROOT / f"kernels/{library}.metal", ROOT)
    text = compiler.preprocess(source, library, [], defines)
    open_constants = CONSTANT.sub(r'extern "C" const \1 \2', text)
    translated = Translator(tokenize(open_constants), {}, None).text
    command = [*compiler.from_cpp(False), "-S", "-emit-llvm", "-o", "-"]
    before = children_seconds()
    code = compiler.run(command, compiler._inlined(translated))
    seconds = children_seconds() - before
    kernels = len(re.findall(r"host_name\(|^\[\[kernel\]\] void", text, re.MULTILINE))
    return Cost(1, kernels, len(source), len(code), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", default="gemm/gemv=gemv,gemm/fused=gemm_fused", help="FILE=KERNEL, by commas")
    options = parser.parse_args()
    compiler.precompiled(False)
    probe = compile_cost("gemm/probe")
    print("| first product | compiled | libraries | kernels | KB of text | KB of LLVM text | front end, s |")
    print("|---|---|---|---|---|---|---|")
    for file, kernel in (pair.split("=") for pair in options.files.split(",")):
        # Whole files also need gemv's file, because the probe is in it.
        whole = compile_cost(file) + (compile_cost("gemm/gemv") if file != "gemm/gemv" else Cost())
        rows = {f"{kernel}, any model": ("one library per file", whole)}
        for family, (weight_format, element) in FAMILIES.items():
            one = compile_cost(file, f"{kernel}<WeightFormat::{weight_format}, {METAL_TYPES[element]}>")
            rows[f"{kernel}, {family}"] = ("one per function", one + probe)
        for name, (how, cost) in rows.items():
            figures = f"{cost.libraries} | {cost.kernels} | {cost.text / 1e3:.0f} | {cost.code / 1e3:.0f}"
            print(f"| {name} | {how} | {figures} | {cost.seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
