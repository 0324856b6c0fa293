"""Marks products inside sums, so that vector products are fused into multiply-adds like scalar products.

Clang contracts `a * b + c` to a fused multiply-add only for its built-in types, but our vectors are classes. The
translation therefore changes `a * b + c` to `sm::fuse(a) * sm::fuse(b) + c`. With vectors, the operator of the sum then
gets both factors (include/softmetal/contraction.h). For other types sm::fuse changes nothing.

If both operands of a sum are products, the first one is contracted, as in clang.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .tokens import CLOSING, SourceError, Token, match_closing

_STARTS_STATEMENT = {"return", "else", "do", "case"}
_BEFORE_OPERAND = _STARTS_STATEMENT | {"operator", "sizeof", "typename", "template"}
# words after which `{` opens statements
_BEFORE_BODY = {"const", "thread", "device", "constant", "threadgroup", "else", "do"}
_SIGNS = ("+", "-")
_TIMES = ("*", "/", "%")
_UNARY = ("!", "~", "&", *_SIGNS, "*")
_AFTER_TEMPLATE = ("(", "::", "{", ")", ",", ">", "&", "*")
_IN_TEMPLATE_ARGUMENTS = {"::", ",", "*", "&", "<", ">", "+", "-", "/", ".", "!"}


@dataclass(frozen=True)
class Product:
    """The two factors of a product. Each is a pair: its first and its last token."""

    left: tuple[Token, Token]
    right: tuple[Token, Token]

    def mark(self) -> None:
        """Rewrites the factors, unless the translation has removed or moved the expression."""
        ends = (*self.left, *self.right)
        if all(t.text for t in ends):
            for first, last in (self.left, self.right):
                first.text = "::sm::fuse(" + first.text
                last.text += ")"


@dataclass
class _Term:
    """A term: factors and the operators between them. `before` is the operator to the left of the term."""

    before: str
    factors: list[list[int]] = field(default_factory=lambda: [[]])
    operators: list[str] = field(default_factory=list)


def fused_products(tokens: list[Token], code: list[Token]) -> list[Product]:
    """Returns the products that are operands of a sum, in those parts of the text in which contraction is on.

    Args:
        tokens: preprocessed text in which clang's pragmas have replaced Metal's.
        code: the tokens that `significant` returns, a subset of `tokens`.
    """
    off = _uncontracted(tokens)
    scan = _Scan(code)
    try:
        scan.region(0, len(code))
    except SourceError:  # an unclosed bracket, which the translator reports
        return []
    return [p for p in scan.found if id(p.left[0]) not in off]


def _uncontracted(tokens: list[Token]) -> set[int]:
    """Returns the ids of the tokens after `#pragma clang fp contract(off)`, up to the end of the pragma's block."""
    off: set[int] = set()
    if not any(t.kind == "directive" and "contract(off)" in t.text for t in tokens):
        return off
    blocks = [False]
    for token in tokens:
        if token.kind == "directive" and "clang fp contract" in token.text:
            blocks[-1] = "(off)" in token.text
        elif token.text == "{":
            blocks.append(blocks[-1])
        elif token.text == "}" and len(blocks) > 1:
            blocks.pop()
        if blocks[-1]:
            off.add(id(token))
    return off


def _template_end(code: list[Token], start: int, end: int) -> int:
    """Returns the index of the `>` that closes the template arguments at `start`, or -1 if the `<` is a comparison."""
    if start == 0 or code[start - 1].kind != "word":
        return -1
    depth, i = 0, start
    while i < end:
        text = code[i].text
        if text == "<":
            depth += 1
        elif text == ">":
            depth -= 1
            if depth == 0:
                after = code[i + 1] if i + 1 < end else None
                return i if after is None or after.kind == "word" or after.text in _AFTER_TEMPLATE else -1
        elif text == "(":
            i = match_closing(code, i)
        elif code[i].kind == "mark" and text not in _IN_TEMPLATE_ARGUMENTS:
            return -1
        i += 1
    return -1


class _Scan:
    """One pass over the brackets of a text."""

    def __init__(self, code: list[Token]) -> None:
        self.code = code
        self.found: list[Product] = []
        # opening bracket -> the terms of the sum inside, if the bracket contains nothing else
        self._inside: dict[int, list[_Term]] = {}

    def region(self, start: int, end: int) -> list[_Term]:
        """Finds the products in code[start:end]. Returns the terms if there is exactly one sum, and otherwise none."""
        code, sums = self.code, 1
        terms = [_Term("")]
        i = start
        while i < end:
            token, factor = code[i], terms[-1].factors[-1]
            text, is_binary = token.text, self._ends_operand(factor)
            following = i + 1
            if text in CLOSING:
                closing = match_closing(code, i)
                self._inside[i] = self.region(i + 1, closing)
                following = closing + 1
            elif text == "<" and (closing := _template_end(code, i, end)) > 0:
                following = closing + 1
            starts_sum = (text == "{" and not self._is_value(factor, i, following - 1)) or (
                token.kind == "word" and text in _STARTS_STATEMENT
            )
            if is_binary and text in _TIMES:
                terms[-1].operators.append(text)
                terms[-1].factors.append([])
            elif is_binary and text in _SIGNS:
                terms.append(_Term(text))
            elif not starts_sum and (following > i + 1 or token.kind != "mark" or _continues(text, is_binary)):
                factor.extend((i, following - 1) if following > i + 1 else (i,))
            else:
                self._add(terms)
                terms = [_Term(text)]
                sums += 1
            i = following
        self._add(terms)
        return terms if sums == 1 else []

    def _is_value(self, factor: list[int], opening: int, closing: int) -> bool:
        """Returns whether these braces belong to an operand, as in `float2{x, y}`."""
        if not factor or factor[-1] != opening - 1 or any(t.text == ";" for t in self.code[opening:closing]):
            return False
        last = self.code[opening - 1]
        return last.text == ">" or (last.kind == "word" and last.text not in _BEFORE_BODY)

    def _ends_operand(self, factor: list[int]) -> bool:
        """Returns whether an operator after these tokens is binary."""
        while factor and self.code[factor[-1]].text in ("++", "--"):
            factor = factor[:-1]
        if not factor:
            return False
        last = self.code[factor[-1]]
        return last.text in (")", "]", "}", ">") or (last.kind != "mark" and last.text not in _BEFORE_OPERAND)

    def _bracketed(self, factor: list[int]) -> int:
        """Returns the index of the `(` of a factor in brackets, such as `(a * b)` or `-(a * b)`, and otherwise -1."""
        if len(factor) == 3 and self.code[factor[0]].text in _SIGNS:
            factor = factor[1:]
        return factor[0] if len(factor) == 2 and self.code[factor[0]].text == "(" else -1

    def _add(self, terms: list[_Term]) -> None:
        if len(terms) == 1 and terms[0].before not in ("+=", "-="):
            return
        for term in terms:
            while not term.operators and (opening := self._bracketed(term.factors[0])) >= 0:
                inside = self._inside.get(opening, [])
                if len(inside) != 1:
                    break
                term = inside[0]
            if term.operators[-1:] == ["*"] and all(term.factors):
                left, right = [i for f in term.factors[:-1] for i in f], term.factors[-1]
                ends = [self.code[i] for i in (left[0], left[-1], right[0], right[-1])]
                self.found.append(Product((ends[0], ends[1]), (ends[2], ends[3])))


def _continues(text: str, is_binary: bool) -> bool:
    """Returns whether the operator or punctuation `text` belongs to an operand."""
    return text in ("::", ".", "->", "++", "--") or (not is_binary and text in _UNARY)
