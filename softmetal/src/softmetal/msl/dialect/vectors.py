"""Rewrites constructors of vectors as calls of sm_make: `float4(x, y)` becomes `sm_make<float4>(x, y)`."""

from __future__ import annotations

from ..tokens import SourceError, Token, join, match_angle, match_closing

_ELEMENTS = ("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float")
_VECTORS = {f"{p}{t}{n}" for p in ("", "packed_") for t in _ELEMENTS for n in (2, 3, 4)}
_MAKE = "::metal::sm_make<"


def rewrite_vectors(code: list[Token], in_function: list[bool]) -> None:
    """Rewrites constructors in place.

    Args:
        code: the significant tokens.
        in_function: for each token, whether the token is inside a function.
    """
    names = _VECTORS | _aliases(code)
    for i, token in enumerate(code):
        if token.kind != "word":
            continue
        if token.text == "static_cast":
            _cast(code, i, names)
            continue
        end = _vector_end(code, i, names)
        if end < 0 or end + 1 >= len(code) or (i and code[i - 1].text in ("operator", "typename")):
            continue
        if code[end + 1].text == "(" and not _is_declarator(code, end + 1):
            first = i
            while first and code[first - 1].text in ("::", "metal"):
                first -= 1
            code[first].text = _MAKE + code[first].text
            code[end].text += ">"
        elif in_function[i] and code[end + 1].kind == "word" and end + 2 < len(code) and code[end + 2].text == "(":
            closing = match_closing(code, end + 2)
            if closing + 1 < len(code) and code[closing + 1].text in (";", ",") and closing > end + 3:
                code[end + 1].text += f" = {_MAKE}{join(code[i : end + 1])}>"


def _aliases(code: list[Token]) -> set[str]:
    """Returns the names that the text defines for vector types: `using V = vec<T, 4>`, `typedef float4 V`."""
    found: set[str] = set()
    for i, token in enumerate(code[:-4]):
        if token.text == "using" and code[i + 2].text == "=":
            start, name = i + 3, code[i + 1].text
        elif token.text == "typedef":
            start, name = i + 1, ""
        else:
            continue
        while code[start].text in ("typename", "metal", "::", "const"):
            start += 1
        end = _vector_end(code, start, _VECTORS | found)
        if end >= 0 and end + 1 < len(code):
            if name and code[end + 1].text == ";":
                found.add(name)
            elif not name and code[end + 1].kind == "word" and code[end + 2].text == ";":
                found.add(code[end + 1].text)
    return found


def _vector_end(code: list[Token], i: int, names: set[str]) -> int:
    """Returns the index of the last token of the vector type that begins at `i`, or -1."""
    if code[i].text in names:
        return i
    if code[i].text == "vec" and i + 1 < len(code) and code[i + 1].text == "<":
        try:
            return match_angle(code, i + 1)
        except SourceError:
            return -1
    return -1


def _is_declarator(code: list[Token], opening: int) -> bool:
    """Returns whether the bracket opens a declarator such as `(&x)[N]` or `(*f)(...)`."""
    if code[opening + 1].text not in ("&", "*"):
        return False
    closing = match_closing(code, opening)
    return closing + 1 < len(code) and code[closing + 1].text in ("[", "(")


def _cast(code: list[Token], i: int, names: set[str]) -> None:
    start = i + 2
    if code[start].text == "metal" and code[start + 1].text == "::":
        start += 2
    end = _vector_end(code, start, names)
    if end >= 0 and code[end + 1].text == ">":
        code[i].text = _MAKE.removesuffix("<")
