"""Writes the Metal libraries as C++ string literals with headers inlined, so that no file is needed at run time."""

import re
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')
PRAGMA_ONCE = re.compile(r"^\s*#\s*pragma\s+once\s*$")
DELIMITER = "METAL"


def inline_headers(path: Path, root: Path, seen: set[Path]) -> str:
    """Returns the file's text with the first #include of each of our headers replaced by the header.

    Includes are relative to `root`, the repository. `#line` makes compiler messages refer to the repository's files.
    """
    seen.add(path)
    name = path.relative_to(root).as_posix()
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(path.read_text(encoding="ascii").splitlines(), start=1):
        found = INCLUDE.match(line)
        if found:
            header = root / found[1]
            if header not in seen:
                lines.append(inline_headers(header, root, seen))
            lines.append(f'#line {number + 1} "{name}"')
        else:
            lines.append("" if PRAGMA_ONCE.match(line) else line)
    return "\n".join(lines)


def kernel_sources(kernels: Path) -> str:
    """Returns the C++ file that defines `marlin::mps::kKernelSources` (csrc/mps/kernel_sources.h)."""
    entries = []
    libraries = sorted(kernels.rglob("*.metal"))
    if not libraries:
        raise FileNotFoundError(f"{kernels}: expected the Metal sources, *.metal, found none")
    for path in libraries:
        library = path.relative_to(kernels).with_suffix("").as_posix()
        source = inline_headers(path, kernels.parent, set())
        if f"){DELIMITER}" in source:
            raise ValueError(f"{path}: contains the literal's delimiter")
        entries.append(f'    {{"{library}", R"{DELIMITER}({source}\n){DELIMITER}"}},\n')
    return (
        '#include "csrc/mps/kernel_sources.h"\n\n'
        "namespace marlin::mps {\n\n"
        "namespace {\n"
        f"constexpr KernelSource kSources[] = {{\n{''.join(entries)}}};\n"
        "}  // namespace\n\n"
        "std::span<const KernelSource> kernel_sources() {\n  return kSources;\n}\n\n"
        "}  // namespace marlin::mps\n"
    )


def write_kernel_sources(kernels: Path, out: Path) -> None:
    """Writes `out` only if its text has changed, because the build recompiles a file that is newer."""
    text = kernel_sources(kernels)
    if not out.exists() or out.read_text(encoding="ascii") != text:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="ascii")
