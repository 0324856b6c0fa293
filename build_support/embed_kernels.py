"""Writes the Metal libraries as C++ string literals, headers inlined, so that no file is needed at run time."""

import re
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')
PRAGMA_ONCE = re.compile(r"^\s*#\s*pragma\s+once\s*$")
DELIMITER = "METAL"


def inline_headers(path: Path, seen: set[Path]) -> str:
    """Returns the file's text with each of our headers put in the place of its first #include.

    `#line` keeps the compiler's messages in terms of the files in `kernels/`.
    """
    name = f"{path.parent.name}/{path.name}"
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(path.read_text(encoding="ascii").splitlines(), start=1):
        found = INCLUDE.match(line)
        if found:
            header = (path.parent / found[1]).resolve()
            if header not in seen:
                seen.add(header)
                lines.append(inline_headers(header, seen))
            lines.append(f'#line {number + 1} "{name}"')
        else:
            lines.append("" if PRAGMA_ONCE.match(line) else line)
    return "\n".join(lines)


def kernel_sources(kernels: Path) -> str:
    """Returns the C++ file that defines `marlin::mps::kKernelSources` (csrc/mps/kernel_sources.h)."""
    entries = []
    if not any(kernels.glob("*.metal")):
        raise FileNotFoundError(f"{kernels}: expected the Metal sources, *.metal, found none")
    for path in sorted(kernels.glob("*.metal")):
        source = inline_headers(path.resolve(), {path.resolve()})
        if f"){DELIMITER}" in source:
            raise ValueError(f"{path}: contains the literal's delimiter")
        entries.append(f'    {{"{path.stem}", R"{DELIMITER}({source}\n){DELIMITER}"}},\n')
    return (
        '#include "mps/kernel_sources.h"\n\n'
        "namespace marlin::mps {\n\n"
        "namespace {\n"
        f"constexpr KernelSource kSources[] = {{\n{''.join(entries)}}};\n"
        "}  // namespace\n\n"
        "std::span<const KernelSource> kernel_sources() {\n  return kSources;\n}\n\n"
        "}  // namespace marlin::mps\n"
    )


def write_kernel_sources(kernels: Path, out: Path) -> None:
    """Writes `out` if its text would change, so that an unchanged kernel recompiles nothing."""
    text = kernel_sources(kernels)
    if not out.exists() or out.read_text(encoding="ascii") != text:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="ascii")
