"""Splits Metal Shading Language text into a list of tokens. Joined, the tokens are the same text."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<directive> ^[ \t]*\#[^\n]* )
  | (?P<space>     [ \t\r\f\v]+ | \n )
  | (?P<word>      [A-Za-z_]\w* )
  | (?P<number>    \.?\d(?:[eEpP][+-]|[\w.])* )
  | (?P<string>    "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
  | (?P<mark>      ::|->|\+\+|--|<<=|[-+*/%&|^<=>!]=|&&|\|\||. )
    """,
    re.VERBOSE | re.MULTILINE,
)
_FLOAT = re.compile(r"(?:0[xX][0-9a-fA-F.]*[pP][+-]?\d+|(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)$")
_HALF = re.compile(r"(?P<value>[\d.](?:[eE][+-]|[\w.])*?)[hH]$")
_BFLOAT = re.compile(r"(?P<value>[\d.](?:[eE][+-]|[\w.])*?)(?:bf|BF)$")
CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(slots=True)
class Token:
    """One token. A rewrite may change `text`, but not `kind`."""

    kind: str
    text: str
    line: int
    spaced: bool = False


class SourceError(Exception):
    """Metal's compiler would refuse the text, or the text needs an unsupported feature."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


def message(text: str, error: SourceError, file_name: str) -> str:
    """Returns an error in preprocessed text as a message with the file and line of the user's source.

    Args:
        text: preprocessed text with line markers.
        error: the error, with its line in `text`.
        file_name: the name of the file for lines before the first marker.
    """
    file, number = file_name, 0
    for current, content in enumerate(text.split("\n"), 1):
        if marker := re.match(r'#(?:line)? (\d+) "((?:\\.|[^"])*)"', content):
            file, number = marker[2], int(marker[1]) - 1
        else:
            number += 1
        if current == error.line:
            break
    return f"{file}:{number}: error: {error.message}"


def tokenize(text: str) -> list[Token]:
    """Splits preprocessed text into tokens. The `line` of a token is its line number in `text`, from 1."""
    tokens = []
    line = 1
    spaced = False
    for match in _TOKEN.finditer(text):
        kind, part = match.lastgroup or "mark", match[0]
        tokens.append(Token(kind, part, line, spaced))
        spaced = kind == "space" or kind == "directive"
        if part == "\n":  # a line's end is always a token of its own
            line += 1
    return tokens


def significant(tokens: list[Token]) -> list[Token]:
    """Returns the tokens without spaces, preprocessor lines and tokens whose text a rewrite has removed."""
    return [t for t in tokens if t.kind not in ("space", "directive") and t.text]


def join(tokens: list[Token]) -> str:
    """Joins the tokens of a construct to a single line of text."""
    return "".join((" " if t.spaced else "") + t.text for t in significant(tokens)).strip()


def rewrite_literals(tokens: list[Token], half: str = "f16") -> None:
    """Gives each literal its type in MSL: float without a suffix, half for `h`, bfloat for `bf`.

    `half` is the suffix of half literals in the language to which the text is translated.
    """
    for token in tokens:
        if token.kind != "number":
            continue
        if _FLOAT.match(token.text):
            token.text += "f"
        elif token.text[:2] in ("0x", "0X"):
            continue
        elif match := _BFLOAT.match(token.text):
            value = match["value"]
            token.text = f"bfloat({value}f)" if _FLOAT.match(value) else f"bfloat({value})"
        elif match := _HALF.match(token.text):
            value = match["value"]
            token.text = (value if _FLOAT.match(value) else value + ".0") + half


def match_closing(tokens: list[Token], start: int) -> int:
    """Returns the index of the bracket that closes the bracket at `start`.

    All three kinds of brackets may be nested.
    """
    depth = 0
    for i in range(start, len(tokens)):
        if tokens[i].text in CLOSING:
            depth += 1
        elif tokens[i].text in (")", "]", "}"):
            depth -= 1
            if depth == 0:
                return i
    raise SourceError(tokens[start].line, f"'{tokens[start].text}' is never closed")


def match_angle(tokens: list[Token], start: int) -> int:
    """Returns the index of the `>` that closes the template bracket `<` at `start`.

    A `>` inside other brackets is ignored. A `<` that does not follow a name is a comparison.
    """
    depth = 0
    i = start
    while i < len(tokens):
        text = tokens[i].text
        if text == "<" and (i == start or tokens[i - 1].kind == "word"):
            depth += 1
        elif text == ">":
            depth -= 1
            if depth == 0:
                return i
        elif text in CLOSING:
            i = match_closing(tokens, i)
        elif text == ";":
            break
        i += 1
    raise SourceError(tokens[start].line, "'<' is never closed")


def split_commas(tokens: list[Token]) -> list[list[Token]]:
    """Splits at commas outside all brackets, including template brackets."""
    parts: list[list[Token]] = []
    part: list[Token] = []
    depth = angle = 0
    for token in tokens:
        if token.text in CLOSING:
            depth += 1
        elif token.text in (")", "]", "}"):
            depth -= 1
        elif depth == 0 and token.text == "<":
            angle += 1
        elif depth == 0 and token.text == ">":
            angle -= 1
        elif depth == 0 and angle == 0 and token.text == ",":
            parts.append(part)
            part = []
            continue
        part.append(token)
    return [*parts, part] if part or parts else []
