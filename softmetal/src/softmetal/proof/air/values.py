"""Inserts the values of function constants, which are C text, into a module in LLVM's text form."""

from __future__ import annotations

import re
import struct

from .metadata import Constant

_SCALARS = {
    **{"bool": "i8", "char": "i8", "uchar": "i8", "short": "i16", "ushort": "i16", "int": "i32", "uint": "i32"},
    **{"long": "i64", "ulong": "i64", "half": "half", "float": "float"},
}
_NAMES_OF_INTEGERS = {"i8", "i16", "i32", "i64"}


class TranslateError(ValueError):
    """A module cannot be translated for this device. The message names the part that cannot."""


def with_value(body: str, constant: Constant, value: str) -> str:
    """Sets the global variable of a function constant to the constant's value."""
    pattern = re.compile(rf"^({re.escape(constant.symbol)} = [^\n]*? (?:constant|global) \S+?|{re.escape(constant.symbol)}"
                         rf" = [^\n]*? (?:constant|global) <\d+ x \w+>) undef", re.MULTILINE)  # fmt: skip
    text = _constant_value(constant, value)
    changed, count = pattern.subn(lambda m: f"{m[1]} {text}", body)
    if count != 1:
        raise TranslateError(f"function constant {constant.name!r}: its global {constant.symbol} cannot be found")
    return changed


def _constant_value(constant: Constant, value: str) -> str:
    match = re.fullmatch(r"([a-z]+)([234])?", constant.type)
    kind = _SCALARS.get(match[1]) if match else None
    if match is None or kind is None:
        raise TranslateError(f"function constant {constant.name!r}: type {constant.type} is not known")
    parts = value.strip("{}").split(",")
    if len(parts) != int(match[2] or 1):
        raise TranslateError(f"function constant {constant.name!r}: expected a {constant.type}, got {value!r}")
    numbers = [_number(kind, p.strip()) for p in parts]
    return numbers[0] if not match[2] else f"<{', '.join(f'{kind} {n}' for n in numbers)}>"


def _number(kind: str, text: str) -> str:
    if text in ("true", "false"):
        text = str(int(text == "true"))
    if kind in _NAMES_OF_INTEGERS:
        return str(int(text.rstrip("uUlL"), 0))
    number = float.fromhex(text) if "0x" in text.lower() else float(text.rstrip("f"))
    if kind == "half":
        return "0xH" + struct.pack(">e", number).hex().upper()
    return "0x" + struct.pack(">d", struct.unpack("f", struct.pack("f", number))[0]).hex().upper()
