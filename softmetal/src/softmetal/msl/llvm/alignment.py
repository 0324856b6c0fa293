"""Adds alignment checks for checked mode to the LLVM text of a compiled library.

The compiler splits the copy of a vector into loads of the elements. Only the first load keeps the vector's alignment,
and the thread-sanitizer instrumentation does not pass that alignment on. If the alignment of a load or store exceeds
its size, the check therefore gets its own call.
"""

from __future__ import annotations

import re

_SIZES = {
    **{"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "i128": 16},
    **{"half": 2, "bfloat": 2, "float": 4, "double": 8, "ptr": 8},
}
_ACCESS = re.compile(
    r"(?:%[\w.]+ = load|store) (?:volatile )?(?:<(?P<count>\d+) x (?P<element>\w+)>|(?P<type>\w+))\b[^,]*, "
    r"ptr (?P<pointer>%[\w.]+), align (?P<align>\d+)"
)
_COPY = re.compile(r"call void @llvm\.mem(?:cpy|move)\.")
_COPY_OPERAND = re.compile(r"align (?P<align>\d+)[^,%]* (?P<pointer>%[\w.]+)[,)]")


def add_alignment_checks(text: str) -> str:
    """Adds a call of sm_check_alignment before each access whose alignment exceeds its size.

    Raises:
        ValueError: the instrumentation would skip an access of this size.
    """
    lines = []
    for line in text.split("\n"):
        promised = []
        if match := _ACCESS.search(line):
            size = _SIZES[match["element"] or match["type"]] * int(match["count"] or 1)
            if size not in (1, 2, 4, 8, 16):
                raise ValueError(f"an access of {size} bytes would not be instrumented: {line.strip()}")
            if int(match["align"]) > size:
                promised.append(match)
        elif _COPY.search(line):
            promised.extend(m for m in _COPY_OPERAND.finditer(line) if int(m["align"]) > 1)
        location = re.search(r", !dbg !\d+", line)
        for match in promised:
            call = f"  call void @sm_check_alignment(ptr {match['pointer']}, i32 {match['align']})"
            lines.append(call + (location.group() if location else ""))
        lines.append(line)
    return "\n".join([*lines, "declare void @sm_check_alignment(ptr, i32)", ""])
