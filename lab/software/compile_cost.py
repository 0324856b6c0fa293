"""Counts the instantiated kernels of each Metal file, and its bytes of source before and after preprocessing.

The host compiles one function of a file at a time (first_product.py), but tools and tests compile whole files. The
program needs only the preprocessor of a C++ compiler (CXX, or c++), and no Metal.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from build_support.embed_kernels import kernel_text

ROOT = Path(__file__).resolve().parents[2]
METAL_HEADERS = ["metal_stdlib", "metal_tensor", "MetalPerformancePrimitives/MetalPerformancePrimitives.h"]
INSTANCE = re.compile(r'\[\[host_name\("')
# Matches the definition of a kernel, with its template header if it has one.
KERNEL = re.compile(r"(template\s*<[^>]*>\s*)?\[\[kernel\b[^\]]*\]\]\s*void\s+\w+\s*\(")


@dataclass(frozen=True)
class LibraryCost:
    """One `.metal` file."""

    library: str
    templates: int
    instantiations: int  # includes kernels that are not templates
    source_bytes: int
    preprocessed_bytes: int


def preprocessed(source: str) -> str:
    """Returns the preprocessed source that a Metal compiler would parse, without the standard library's headers."""
    with tempfile.TemporaryDirectory() as folder:
        for header in METAL_HEADERS:
            Path(folder, header).parent.mkdir(exist_ok=True)
            Path(folder, header).touch()
        command = [*os.environ.get("CXX", "c++").split(), "-E", "-P", "-nostdinc", "-x", "c++", "-std=c++17"]
        command += ["-D__METAL_VERSION__=310", f"-I{folder}", "-"]
        return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def cost(path: Path) -> LibraryCost:
    source = kernel_text(path, ROOT)
    text = preprocessed(source)
    kernels = KERNEL.findall(text)
    plain = sum(not template for template in kernels)
    instances = len(INSTANCE.findall(text))
    return LibraryCost(
        path.relative_to(ROOT / "kernels").with_suffix("").as_posix(),
        len(kernels) - plain,
        instances + plain,
        len(source),
        len(text),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    costs = [cost(path) for path in sorted((ROOT / "kernels").rglob("*.metal"))]
    if options.json:
        print(json.dumps([asdict(c) for c in costs], indent=1))
    else:
        names = list(asdict(costs[0]))
        print(f"| {' | '.join(n.replace('_', ' ') for n in names)} |\n|{'---|' * len(names)}")
        for c in costs:
            print(f"| {' | '.join(str(v) for v in asdict(c).values())} |")


if __name__ == "__main__":
    main()
