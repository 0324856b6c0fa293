"""Gives integer divisions and shifts in LLVM text the results that Metal specifies, before any optimization.

In LLVM, a division by zero is undefined, and so is a shift by the width or more. On x86 a division by zero stops the
process. In Metal, a quotient by zero is an unspecified value, and a shift uses only the low bits of the count.
"""

from __future__ import annotations

import re

_OPERATION = re.compile(
    r"^  (?P<result>%[\w.]+) = (?P<name>sdiv|udiv|srem|urem|shl|lshr|ashr) (?:exact |nuw |nsw )*"
    r"(?P<type>(?:<(?P<count>\d+) x )?i(?P<bits>\d+)>?) (?P<left>[^,\n]+|<[^>]*>), (?P<right>[^,\n]+|<[^>]*>)"
    r"(?P<debug>, !dbg !\d+)?(?:, ![\w.]+ !\d+)*$",
    re.MULTILINE,
)


def add_metal_arithmetic(text: str) -> str:
    """Returns LLVM text whose integer divisions and shifts are defined for all operands."""
    return _OPERATION.sub(_defined, text)


def _all(match: re.Match[str], value: int) -> str:
    """Returns the constant of the operation's type in which each element is `value`."""
    if match["count"] is None:
        return str(value)
    return "<" + ", ".join([f"i{match['bits']} {value}"] * int(match["count"])) + ">"


def _defined(match: re.Match[str]) -> str:
    result, name, kind, left, right = (match[g] for g in ("result", "name", "type", "left", "right"))
    bits, debug = int(match["bits"]), match["debug"] or ""
    is_shift, is_signed = name in ("shl", "lshr", "ashr"), name in ("sdiv", "srem")
    if right.startswith("<") or (right.lstrip("-").isdigit() and _is_harmless(name, int(right), bits)):
        return match[0]
    prefix = f"%sm.{result[1:]}"
    lines: list[str] = []

    def add(place: str, operation: str) -> str:
        lines.append(f"  {place} = {operation}{debug}")
        return place

    if is_shift:
        count = add(f"{prefix}.count", f"and {kind} {right}, {_all(match, bits - 1)}")
        add(result, f"{name} {kind} {left}, {count}")
        return "\n".join(lines)
    condition = f"<{match['count']} x i1>" if match["count"] else "i1"
    zero = add(f"{prefix}.zero", f"icmp eq {kind} {right}, {_all(match, 0)}")
    traps = zero
    if is_signed:  # the smallest number divided by -1 overflows
        least = add(f"{prefix}.least", f"icmp eq {kind} {left}, {_all(match, -(1 << (bits - 1)))}")
        minus = add(f"{prefix}.minus", f"icmp eq {kind} {right}, {_all(match, -1)}")
        both = add(f"{prefix}.both", f"and {condition} {least}, {minus}")
        traps = add(f"{prefix}.traps", f"or {condition} {zero}, {both}")
    divisor = add(f"{prefix}.divisor", f"select {condition} {traps}, {kind} {_all(match, 1)}, {kind} {right}")
    quotient = add(f"{prefix}.quotient", f"{name} {kind} {left}, {divisor}")
    add(result, f"select {condition} {zero}, {kind} {_all(match, -1)}, {kind} {quotient}")
    return "\n".join(lines)


def _is_harmless(name: str, right: int, bits: int) -> bool:
    if name in ("shl", "lshr", "ashr"):
        return 0 <= right < bits
    return right != 0 and (right != -1 or name in ("udiv", "urem"))
