"""Constructs of C++ that Metal does not have, and the dialect of clang has."""

from __future__ import annotations

from collections.abc import Iterator

from ..attributes import attribute_end
from ..tokens import SourceError, Token, match_angle, match_closing

_BEFORE_LAMBDA = {"(", "=", ",", "return", "{", ";", "}", "?", ":", "&&", "||"}


def check_constructs(code: list[Token], version: int) -> Iterator[SourceError]:
    """Finds lambdas and function pointers.

    Args:
        code: the significant tokens of preprocessed text.
        version: the language version as `__METAL_VERSION__` has it.

    Yields:
        One error per finding.
    """
    i = 0
    statement = 0
    while i < len(code):
        text = code[i].text
        if text in (";", "{", "}"):
            statement = i + 1
        if text == "template" and i + 1 < len(code) and code[i + 1].text == "<":
            i = match_angle(code, i + 1) + 1
            continue
        end = attribute_end(code, i) if text == "[" else -1
        if end >= 0:
            i = end + 1
            continue
        if text == "[" and version < 400 and i and code[i - 1].text in _BEFORE_LAMBDA:
            closing = match_closing(code, i)
            if closing + 1 < len(code) and code[closing + 1].text in ("(", "{"):
                yield SourceError(code[i].line, "lambda expressions are not supported in Metal: write a function")
        if _is_function_pointer(code, i) and code[statement].text not in ("typedef", "using"):
            name = code[i + 2].text
            yield SourceError(code[i].line, f"'{name}': pointers to functions are not supported in Metal")
        i += 1


def _is_function_pointer(code: list[Token], i: int) -> bool:
    """Returns True for `T (*name)(` where T is a type's last word."""
    if [t.text for t in code[i : i + 2]] != ["(", "*"] or i + 4 >= len(code) or i == 0:
        return False
    if code[i + 2].kind != "word" or [code[i + 3].text, code[i + 4].text] != [")", "("]:
        return False
    return code[i - 1].text in ("void", "bool", "int", "uint", "float", "half", "auto")
