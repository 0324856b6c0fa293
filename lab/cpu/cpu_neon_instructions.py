"""Counts the instructions per weight in the inner loops of the NEON kernels, from the compiler's listing.

Measures no time. The program cross-compiles with aarch64-linux-gnu-g++ and counts the innermost loop over k. An
iteration of this loop computes 8 k of 4 columns for each vector. Kernels with a panel read codes that a separate loop
has decoded before, once for all row blocks. The table has the decoding loop in a row of its own.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODES = ("integer", "e2m1", "table", "byte", "e4m3", "planes")  # csrc/cpu/formats.h
FP32 = r"step<marlin::cpu::Neon, \(marlin::cpu::Codes\)(?P<codes>\d), (?P<panel>true|false), (?P<R>\d+), (?P<C>\d+)>"
# For each source file, the kinds of functions that it has, each with a pattern of the functions' names.
KERNELS = {
    "kernels_neon": {
        "fp32": FP32,
        "decode to a panel": r"unpack<marlin::cpu::Neon, \(marlin::cpu::Codes\)(?P<codes>\d), (?P<C>\d+)>",
    },
    "byte_split_neon": {
        "split bytes": r"split_step<.*NeonDot, \(marlin::cpu::Codes\)(?P<codes>\d), (?P<R>\d+), (?P<C>\d+)>"
    },
    "byte_matrix_neon": {
        "smmla": r"split_step<.*NeonMatrix, \(marlin::cpu::Codes\)(?P<codes>\d), (?P<R>\d+), (?P<C>\d+)>"
    },
    "bf16_dot_neon": {
        "bfdot": r"dot_step<(?P<parts>\d), (?P<C>\d+)>",
        "bfmmla": r"matrix_step<(?P<R>\d+), (?P<C>\d+)>",
    },
}


def functions(source: str, directory: Path, compiler: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Yields each function's name, and its instructions with their addresses."""
    target = directory / f"{source}.o"
    flags = ["-std=c++20", "-O3", f"-I{ROOT}", "-c", str(ROOT / f"csrc/cpu/arm/{source}.cpp"), "-o", str(target)]
    subprocess.run([compiler, *flags], check=True)
    objdump = compiler.removesuffix("g++") + "objdump"
    listing = subprocess.run(
        [objdump, "-dC", "--no-show-raw-insn", str(target)], check=True, capture_output=True, text=True
    ).stdout
    for block in listing.split("\n\n"):
        head = re.search(r"^[0-9a-f]+ <(.*)>:$", block, re.MULTILINE)
        if head:
            lines = re.findall(r"^\s+([0-9a-f]+):\s+(.*)$", block, re.MULTILINE)
            yield head[1], [(int(address, 16), text) for address, text in lines]


def innermost_loops(instructions: list[tuple[int, str]]) -> Iterator[list[str]]:
    """Yields the mnemonics of each loop that contains no other loop."""
    index = {address: i for i, (address, _) in enumerate(instructions)}
    spans = []
    for i, (address, text) in enumerate(instructions):
        branch = re.match(r"(?:b\.\w+|b|cbn?z|tbn?z)\s.*?([0-9a-f]+) <", text)
        if branch and int(branch[1], 16) < address and int(branch[1], 16) in index:
            spans.append((index[int(branch[1], 16)], i))
    for begin, end in spans:
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in spans):
            yield [text.split()[0] for _, text in instructions[begin : end + 1]]


def count(instructions: list[tuple[int, str]], multiplies: int) -> int:
    """Returns the instructions of the shortest innermost loop with at least `multiplies` multiplications.

    If `multiplies` is 0, returns those of the longest innermost loop.
    """
    loops = list(innermost_loops(instructions))
    if multiplies == 0:
        return max(map(len, loops))
    names = ("fmla", "sdot", "smmla", "bfdot", "bfmmla")
    return min(len(loop) for loop in loops if sum(loop.count(name) for name in names) >= multiplies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="aarch64-linux-gnu-g++")
    compiler = parser.parse_args().compiler
    rows: dict[tuple[str, str, int, int], float] = {}
    with tempfile.TemporaryDirectory() as directory:
        for source, kinds in KERNELS.items():
            for name, instructions in functions(source, Path(directory), compiler):
                for kind, pattern in kinds.items():
                    found = re.search(pattern, name)
                    if not found:
                        continue
                    fields = found.groupdict()
                    R, C = int(fields.get("R") or 1), int(fields["C"])
                    label = kind + (" from a panel" if fields.get("panel") == "true" else "")
                    label += f", {fields['parts']} parts" if "parts" in fields else ""
                    codes = CODES[int(fields["codes"])] if "codes" in fields else "any"
                    pairs, byte_pairs = (R + 1) // 2, (3 * R + 1) // 2
                    least = {
                        "fp32": 8 * R * C,
                        "split bytes": 6 * R * C,
                        "smmla": 2 * byte_pairs * C,
                        "bfmmla": 4 * pairs * C,
                    }
                    multiplies = 4 * C * int(fields["parts"]) if "parts" in fields else least.get(kind, 0)
                    rows[label, codes, R, C] = count(instructions, multiplies) / (32 * R * C)
    print("| kernel | codes | rows | columns | instructions a weight and row |\n|---|---|---|---|---|")
    for (label, codes, R, C), value in sorted(rows.items()):
        print(f"| {label} | {codes} | {R} | {4 * C} | {value:.2f} |")


if __name__ == "__main__":
    main()
