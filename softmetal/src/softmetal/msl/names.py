"""Metal's reserved names: keywords, macros, and types in the global namespace of Apple's headers.

SPIRV-Cross and naga generate Metal source. The lists contain the names that these two tools rename, because Apple's
compiler refuses such names.
"""

from __future__ import annotations

from collections.abc import Iterator

from .attributes import attribute_end
from .declarations import SPACES, function_name, index, take_templates, top, without_attributes
from .tokens import CLOSING, SourceError, Token, match_closing, split_commas

_FUNCTION_WORDS = {"kernel", "vertex", "fragment"}
_AFTER_PARAMETERS = {")", "const", "volatile", "noexcept"}

_ELEMENTS = (
    *("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "float"),
    *("llong", "ullong", "double"),
)
_NUMBERS = {
    *(f"{t}{n}" for t in _ELEMENTS for n in (2, 3, 4, 8, 16)),
    *(f"packed_{t}{n}" for t in _ELEMENTS for n in (2, 3, 4)),
    *(f"bfloat{n}" for n in (2, 3, 4, 16)),
    *(f"packed_bfloat{n}" for n in (2, 3, 4)),
    *(f"{t}{c}x{r}" for t in ("half", "float") for c in (2, 3, 4) for r in (2, 3, 4)),
}
_TYPEDEFS = {
    *("uchar", "ushort", "uint", "ulong", "llong", "ullong", "size_t", "ptrdiff_t", "quad", "complex", "imaginary"),
    *(f"{s}int{n}" for s in ("", "u") for n in (8, 16)),
    *(f"{s}int{n}_t" for s in ("", "u") for n in (8, 16, 32, 64)),
    *_NUMBERS,
}
_KEYWORD_TYPES = {"half", "bfloat"}

_LIMITS = ("DIG", "MANT_DIG", "MAX_10_EXP", "MAX_EXP", "MIN_10_EXP", "MIN_EXP", "RADIX", "MAX", "MIN", "EPSILON")
_CONSTANTS = ("E", "LOG2E", "LOG10E", "LN2", "LN10", "PI", "PI_2", "PI_4", "1_PI", "2_PI", "2_SQRTPI", "SQRT2")
_MACROS = {
    *("CHAR_BIT", "SCHAR_MAX", "SCHAR_MIN", "UCHAR_MAX", "USHRT_MAX", "UINT_MAX", "ULONG_MAX", "ULLONG_MAX"),
    *(f"{t}_{m}" for t in ("CHAR", "SHRT", "INT", "LONG", "LLONG") for m in ("MAX", "MIN")),
    *(f"{t}_{m}" for t in ("FLT", "HALF", "DBL") for m in (*_LIMITS, "DECIMAL_DIG")),
    *(f"M_{c}{s}" for c in (*_CONSTANTS, "SQRT1_2") for s in ("", "_F", "_H")),
    *("FP_ILOGB0", "FP_ILOGBNAN", "MAXFLOAT", "MAXHALF", "MAXDOUBLE", "HUGE_VAL", "HUGE_VALF", "HUGE_VALH"),
    *("INFINITY", "NAN", "assert", "is_function_constant_defined"),
    *("VARIABLE_TRACEPOINT", "STATIC_DATA_TRACEPOINT", "STATIC_DATA_TRACEPOINT_V"),
    *(f"METAL_{m}" for m in ("ALIGN", "ASM", "CONST", "CONST_ARG", "DEPRECATED", "ENABLE_IF", "EXPLICIT", "FUNC")),
    *(f"METAL_{m}" for m in ("IMPLICIT", "INTERNAL", "NON_NULL_RETURN", "NORETURN", "NOTHROW", "PURE", "UNAVAILABLE")),
    *(f"METAL_{m}" for m in ("ARG_UNIFORM", "ZERO_ARG", "VALID_LOD_ARG", "VALID_LEVEL_ARG", "VALID_RENDER_TARGET")),
}
# Words that are no types: a name after one of these words is not declared there.
_NO_TYPE = {
    *("return", "case", "else", "do", "goto", "sizeof", "alignof", "typename", "operator", "and", "or", "not", "xor"),
    *("bitand", "bitor", "using", "in", "throw", "new", "delete"),
}
_TYPE_WORDS = {"struct", "class", "union", "enum"}


def taken_names(code: list[Token]) -> Iterator[SourceError]:
    """Finds declarations of names that Metal reserves.

    Args:
        code: the significant tokens of preprocessed text.

    Yields:
        One error per finding.
    """
    i = depth = 0
    while i < len(code):
        end = attribute_end(code, i) if code[i].text == "[" else -1
        if end >= 0:
            i = end + 1
            continue
        depth += (code[i].text in ("(", "[")) - (code[i].text in (")", "]"))
        if code[i].kind == "word":
            yield from _keyword(code, i, depth > 0)
            yield from _macro(code, i)
        i += 1
    for name in _global_names(code):
        if name.text in _TYPEDEFS or name.text == "main":
            what = "no function may be called" if name.text == "main" else "Metal declares a type"
            yield SourceError(name.line, f"redefinition of '{name.text}': {what} '{name.text}'")


def _text(code: list[Token], i: int) -> str:
    return code[i].text if 0 <= i < len(code) else ""


def _keyword(code: list[Token], i: int, in_brackets: bool) -> Iterator[SourceError]:
    word, before, after = code[i].text, _text(code, i - 1), _text(code, i + 1)
    follows_word = i + 1 < len(code) and code[i + 1].kind == "word"
    refused = False
    if word in _FUNCTION_WORDS:
        # A function specifier is followed by a type or by another attribute. Otherwise the word is a name.
        goes_on = follows_word or after == "::" or attribute_end(code, i + 1) >= 0
        refused = in_brackets or not goes_on or before in (".", "->", "::", "*", "&")
    elif word in SPACES:
        refused = before in (".", "->", "::") or after in (",", ")", "]", "(", "+", "-", "/", "%", ".", "->")
        refused = refused or (after in ("=", ";", ":", "[", "{") and before not in _AFTER_PARAMETERS)
        refused = refused and _text(code, i - 2) != "coherent"
    elif word in _KEYWORD_TYPES:
        refused = before in (".", "->") or (after in ("=", ";", "[") and _is_type_before(code, i))
    if refused:
        yield SourceError(code[i].line, f"'{word}' is a keyword of Metal and cannot be a name")


def _is_type_before(code: list[Token], i: int) -> bool:
    before = code[i - 1] if i else None
    return before is not None and before.kind == "word" and before.text not in _NO_TYPE | {"const", "unsigned"}


def _macro(code: list[Token], i: int) -> Iterator[SourceError]:
    if code[i].text not in _MACROS:
        return
    after = _text(code, i + 1)
    declared = _is_type_before(code, i) and after in ("=", ";", ",", ")", "[", "{", "(")
    if declared or _text(code, i - 1) in (".", "->"):
        yield SourceError(code[i].line, f"'{code[i].text}' is a macro of Metal and cannot be a name")


def _global_names(code: list[Token]) -> Iterator[Token]:
    """Yields the names that are declared outside all namespaces. Inside a namespace, a name may hide Metal's name."""
    i = start = 0
    while i < len(code):
        text = code[i].text
        if text in ("(", "["):
            i = match_closing(code, i)
        elif text == "{":
            header = without_attributes(code[start:i])
            end = match_closing(code, i)
            texts = [t.text for t in header]
            if texts[:1] == ["extern"] and len(texts) == 2:  # extern "C" {
                start = i + 1
            elif "=" in top(header):  # an initialiser: the statement goes on
                i = end
            else:
                yield from _declared(header, code[i + 1 : end])
                is_type = bool(set(texts) & _TYPE_WORDS) and "namespace" not in texts and function_name(header) < 0
                i = end
                start = end if is_type else end + 1
        elif text == "}":
            start = i + 1
        elif text == ";":
            yield from _declared(without_attributes(code[start:i]), [])
            start = i + 1
        i += 1


def _declared(statement: list[Token], body: list[Token]) -> Iterator[Token]:
    """Yields the names in a declaration outside all namespaces. `body` is the text between its braces."""
    statement, _ = take_templates(statement)
    texts = [t.text for t in statement]
    if not statement or texts[0] in ("namespace", "template", "static_assert") or texts[:2] == ["inline", "namespace"]:
        return
    if texts[0] == "using":
        if len(statement) > 2 and texts[2] == "=":
            yield statement[1]
        return
    name = function_name(statement)
    if name >= 0 and texts[0] != "typedef":
        if statement[name].kind == "word":
            yield statement[name]
        return
    for i, token in enumerate(statement[:-1]):
        if token.text in _TYPE_WORDS and statement[i + 1].kind == "word" and texts[0] != "typedef":
            yield statement[i + 2] if texts[i + 1] in _TYPE_WORDS and i + 2 < len(statement) else statement[i + 1]
            break
    if texts[0] == "enum" and texts[1:2] not in (["class"], ["struct"]):
        yield from (part[0] for part in split_commas(body) if part)
    if body or len(statement) < 2:
        return
    for part in split_commas(statement):
        words = [t for t in _outside_brackets(part[: index([t.text for t in part], "=")]) if t.kind == "word"]
        if words and (part is not statement or len(words) > 1):
            yield words[-1]


def _outside_brackets(tokens: list[Token]) -> Iterator[Token]:
    depth = 0
    for token in tokens:
        depth += token.text in CLOSING
        if depth == 0:
            yield token
        depth -= token.text in CLOSING.values()
