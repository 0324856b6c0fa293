"""Changes LLVM text so that checked mode finds stores of uninitialized variables.

clang fills such variables with a pattern. For a floating type, the pattern is a NaN of all ones. Arithmetic keeps these
bits, so a store of these bits is a fault. For a 32-bit integer, clang's pattern also occurs in ordinary data, so a
rarer pattern replaces it.
"""

from __future__ import annotations

import re

_INTEGER = re.compile(r"^(  store i(?:8|32)) (?:-86|-1431655766), (?=.*!annotation)", re.MULTILINE)
_RARE = -1160651099  # also in executor/checker/instrument.cpp
_STORE = re.compile(
    r"^  store (?P<type>float|half|bfloat|i32|<(?P<count>2|4|8) x (?P<element>float|half|bfloat|i32)>) "
    r"(?P<value>%[\w.]+|[-\w.]+), ptr (?P<pointer>%[\w.]+), align \d+(?P<rest>.*)$",
    re.MULTILINE,
)
_BITS = {"float": 32, "i32": 32, "half": 16, "bfloat": 16}
_DECLARATION = "declare void @sm_check_value(ptr, i64, i32, i32)"


def mark_integers(text: str) -> str:
    """Gives unset integer variables a rarer pattern than that of clang's front end."""
    return _INTEGER.sub(lambda m: f"{m[1]} {_RARE if m[1].endswith('i32') else -85}, ", text)


def add_value_checks(text: str) -> str:
    """Adds a call of sm_check_value before each store of a value that may come from an uninitialized variable."""
    count = 0

    def with_check(match: re.Match[str]) -> str:
        nonlocal count
        if "!annotation" in match["rest"] or (match["value"][0] != "%" and not match["value"].startswith("0x")):
            return match[0]
        count += 1
        element = match["element"] or match["type"]
        bits, total = _BITS[element], _BITS[element] * int(match["count"] or 1)
        location = re.search(r", !dbg !\d+", match["rest"])
        debug = location.group() if location else ""
        lines, value = [], match["value"]
        if match["type"] != "i32":
            lines.append(f"  %sm.v{count} = bitcast {match['type']} {value} to i{total}{debug}")
            value = f"%sm.v{count}"
        for part in range(0, total, 64):
            word = value
            if part:
                lines.append(f"  %sm.s{count}.{part} = lshr i{total} {value}, {part}{debug}")
                word = f"%sm.s{count}.{part}"
            if total != 64:
                cast = "trunc" if total > 64 else "zext"
                lines.append(f"  %sm.w{count}.{part} = {cast} i{total} {word} to i64{debug}")
                word = f"%sm.w{count}.{part}"
            kind = 0 if element == "i32" else bits
            arguments = f"ptr {match['pointer']}, i64 {word}, i32 {kind}, i32 {min(total, 64)}"
            lines.append(f"  call void @sm_check_value({arguments}){debug}")
        return "\n".join([*lines, match[0]])

    return f"{_STORE.sub(with_check, text)}\n{_DECLARATION}\n"
