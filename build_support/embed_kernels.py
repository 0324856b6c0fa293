"""Embeds the Metal sources, with inlined headers, in a C++ file, so that no source file is needed at run time.

Metal parses this text again in every process. So the text omits everything that Metal would skip: comments, code for
the host (`#ifdef __METAL_VERSION__`), unused macros, and indentation.
"""

import re
from pathlib import Path

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')
PRAGMA_ONCE = re.compile(r"^\s*#\s*pragma\s+once\s*$")
CONDITION = re.compile(r"^\s*#\s*(ifdef|ifndef|if|elif|else|endif)\b\s*(\w*)")
COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|//.*')
ENDS = re.compile(r"^\s+|\s+$|(?<= )\s+(?=\\$)")
DEFINE = re.compile(r"^#\s*define\s+(\w+)(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
METAL = "__METAL_VERSION__"
DELIMITER = "METAL"


def for_metal(lines: list[str]) -> list[str]:
    """Returns the lines with an empty line in place of each line that a Metal compiler skips.

    Evaluates only the conditions `#ifdef __METAL_VERSION__` and `#ifndef __METAL_VERSION__`. All other conditions
    remain in the text.

    Raises:
        ValueError: one of these two conditions has an `#elif`.
    """
    kept = []
    open_conditions: list[bool | None] = []  # whether Metal reads the branch; None if the condition remains in the text
    for line in lines:
        found = CONDITION.match(line)
        word, name = found.groups() if found else ("", "")
        is_ours = False
        if word.startswith("if"):
            is_ours = name == METAL and word != "if"
            open_conditions.append(word == "ifdef" if is_ours else None)
        elif word:
            is_ours = open_conditions[-1] is not None
            if is_ours and word == "elif":
                raise ValueError(f"#ifdef or #ifndef {METAL}: expected no #elif, got {line.strip()!r}")
            if word == "endif":
                open_conditions.pop()
            elif is_ours:
                open_conditions[-1] = not open_conditions[-1]
        kept.append("" if is_ours or False in open_conditions else line)
    return kept


def inline_headers(path: Path, root: Path, seen: set[Path]) -> str:
    """Returns a file's text for Metal's compiler, with our headers inlined.

    The first #include of a header becomes the header's text, and later ones are dropped.

    Includes are relative to `root`, the repository. `#line` directives let compiler messages name the original files.
    """
    seen.add(path)
    name = path.relative_to(root).as_posix()
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(for_metal(path.read_text(encoding="ascii").splitlines()), start=1):
        found = INCLUDE.match(line)
        if found:
            header = root / found[1]
            if header not in seen:
                lines.append(inline_headers(header, root, seen))
            lines.append(f'#line {number + 1} "{name}"')
        else:
            lines.append("" if PRAGMA_ONCE.match(line) else ENDS.sub("", COMMENT.sub(r"\1", line)))
    return "\n".join(lines)


def without_unused_macros(text: str) -> str:
    """Removes the macros whose names occur only in their own definition. The number of lines does not change.

    Keeps a macro if `##` could form its name.
    """
    pasted = tuple(re.findall(r"(?<!##)\b(\w+)##", text))
    while True:
        words: dict[str, int] = {}
        for word in re.findall(r"\w+", text):
            words[word] = words.get(word, 0) + 1

        def replacement(found: re.Match[str], words: dict[str, int] = words) -> str:
            if words[found[1]] > 1 or found[1].startswith(pasted):
                return found[0]
            return "\n" * found[0].count("\n")

        shorter = DEFINE.sub(replacement, text)
        if shorter == text:
            return text
        text = shorter


def kernel_text(path: Path, root: Path) -> str:
    """Returns the text of a `.metal` file as it is embedded."""
    return without_unused_macros(inline_headers(path, root, set()))


def kernel_sources(kernels: Path) -> str:
    """Returns the C++ file that defines `marlin::mps::kKernelSources` (csrc/mps/kernel_sources.h)."""
    entries = []
    libraries = sorted(kernels.rglob("*.metal"))
    if not libraries:
        raise FileNotFoundError(f"{kernels}: expected the Metal sources, *.metal, found none")
    for path in libraries:
        library = path.relative_to(kernels).with_suffix("").as_posix()
        source = kernel_text(path, kernels.parent)
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
    """Writes `out` only if its text has changed, because the build would recompile a newer file."""
    text = kernel_sources(kernels)
    if not out.exists() or out.read_text(encoding="ascii") != text:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="ascii")
