"""Enumerators as attribute arguments: `[[buffer(kSlotA)]]` with `enum { kSlotA = 3 };` in a header shared with the host."""

from __future__ import annotations

from .attributes import attribute_end
from .tokens import Token, match_closing


def resolve_enumerators(code: list[Token]) -> None:
    """Writes the value of an enumerator where its name is an attribute's argument.

    Only enumerators whose value is a decimal number, or follows from one, are known.
    """
    values = _enumerators(code)
    for i in range(len(code)):
        end = attribute_end(code, i)
        for token in code[i : end + 1] if end > 0 else []:
            token.text = values.get(token.text, token.text)


def _enumerators(code: list[Token]) -> dict[str, str]:
    values: dict[str, str] = {}
    for i, token in enumerate(code):
        if token.text != "enum":
            continue
        opening = next((j for j in range(i, min(i + 8, len(code))) if code[j].text in ("{", ";")), i)
        if code[opening].text != "{":
            continue
        following: int | None = 0
        for part in _parts(code[opening + 1 : match_closing(code, opening)]):
            if len(part) > 1:
                value = part[-1].text.rstrip("uU")
                following = int(value) if len(part) == 3 and value.isdigit() else None
            if following is not None:
                values[part[0].text] = str(following)
                following += 1
    return values


def _parts(tokens: list[Token]) -> list[list[Token]]:
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.text in "([{") - (token.text in ")]}")
        if token.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return [p for p in parts if p]
