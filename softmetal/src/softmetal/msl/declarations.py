"""Reads declarations from tokens: the end of a type, the declared names, the template parameters."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from .attributes import attribute_end
from .tokens import CLOSING, SourceError, Token, join, match_angle, match_closing, split_commas

SPACES = frozenset({"device", "constant", "thread", "threadgroup", "threadgroup_imageblock", "ray_data", "object_data"})
SPECIFIERS = {
    *("const", "volatile", "static", "constexpr", "inline", "mutable", "friend", "explicit", "typename", "extern"),
    *("kernel", "unsigned", "signed"),
}
_BEFORE_BRACKET = {"decltype", "alignas", "noexcept", "__attribute__", "sizeof"}


def index(texts: list[str], wanted: str) -> int:
    return texts.index(wanted) if wanted in texts else len(texts)


def top(tokens: list[Token]) -> list[str]:
    """Returns the texts of the tokens outside all brackets, including template brackets."""
    texts: list[str] = []
    depth = angle = 0
    for i, token in enumerate(tokens):
        text = token.text
        if text == "<" and depth == 0 and i and (tokens[i - 1].kind == "word" or angle):
            angle += 1
        elif text == ">" and depth == 0 and angle:
            angle -= 1
        elif text in CLOSING:
            depth += 1
        elif text in CLOSING.values():
            depth -= 1
        elif depth == 0 and angle == 0:
            texts.append(text)
    return texts


def without_attributes(tokens: list[Token]) -> list[Token]:
    kept = []
    i = 0
    while i < len(tokens):
        end = attribute_end(tokens, i) if tokens[i].text == "[" else -1
        if end < 0:
            kept.append(tokens[i])
        i = i + 1 if end < 0 else end + 1
    return kept


def take_templates(tokens: list[Token]) -> tuple[list[Token], frozenset[str]]:
    """Removes the `template <...>` parts of a declaration.

    Returns the other tokens and the names of the template parameters.
    """
    names: set[str] = set()
    while len(tokens) > 1 and tokens[0].text == "template" and tokens[1].text == "<":
        end = match_angle(tokens, 1)
        for part in split_commas(tokens[2:end]):
            declarator = [t for t in part[: index([t.text for t in part], "=")] if t.kind == "word"]
            if declarator:
                names.add(declarator[-1].text)
        tokens = tokens[end + 1 :]
    return tokens, frozenset(names)


def after_type(tokens: list[Token], i: int) -> int:
    """Returns the index after the type that begins at `i`.

    A type has words joined by `::`, template arguments and specifiers.
    """
    leading = SPECIFIERS | SPACES
    while i < len(tokens):
        token = tokens[i]
        before = tokens[i - 1].text if i else "::"
        if token.text == "::" or (
            token.kind == "word" and (before == "::" or before in leading or token.text in leading)
        ):
            i += 1
        elif token.text == "<" and tokens[i - 1].kind == "word":
            i = _after_arguments(tokens, i)
        else:
            return i
    return i


def _after_arguments(tokens: list[Token], i: int) -> int:
    """Returns the index after the template arguments that open at `i`, or the end if the `<` is a comparison."""
    try:
        return match_angle(tokens, i) + 1
    except SourceError:
        return len(tokens)


def declared_name(declarator: list[Token]) -> str:
    words = [t.text for t in declarator if t.kind == "word"]
    return words[-1] if words else ""


def function_name(tokens: list[Token]) -> int:
    """Returns the index of a function's name before its parameter list, or -1."""
    i = 0
    while i < len(tokens):
        text = tokens[i].text
        if text == "=" and (i == 0 or tokens[i - 1].text != "operator"):
            return -1
        if text == "operator":
            i += 1
            while i < len(tokens) and tokens[i].text != "(":
                i += 1
            if i + 2 < len(tokens) and tokens[i + 1].text == ")" and tokens[i + 2].text == "(":
                i += 2
            return i - 1 if i < len(tokens) else -1
        if text == "(":
            before = tokens[i - 1] if i else tokens[i]
            if before.text == ">" or (before.kind == "word" and before.text not in _BEFORE_BRACKET):
                return i - 1
            i = match_closing(tokens, i)
        elif text == "[":
            i = match_closing(tokens, i)
        elif text == "<" and i and tokens[i - 1].kind == "word":
            i = _after_arguments(tokens, i) - 1
        i += 1
    return -1


def instance_target(tokens: list[Token], kernels: Container[str]) -> list[Token]:
    """Returns `f<T>` of `template [[kernel]] decltype(f<T>) f<T>` or `template [[kernel]] void f<T>(...)`."""
    code = [t for t in tokens if t.text and t.text not in ("template", "kernel")]
    if code[0].text == "decltype":
        return code[match_closing(code, 1) + 1 :]
    rounds = (i for i, t in enumerate(code) if t.text == "(" and match_closing(code, i) == len(code) - 1)
    open_round = max(rounds, default=len(code))  # none where a typedef gives the type
    if not any(t.kind == "word" and t.text in kernels for t in code):
        return code[:open_round]
    first = next(i for i, t in enumerate(code) if t.kind == "word" and t.text in kernels)
    while code[first - 1].text == "::" or (code[first].text == "::" and code[first - 1].kind == "word"):
        if code[first - 1].text == "void":
            break
        first -= 1
    return code[first:open_round]


@dataclass(slots=True)
class ThreadgroupVariables:
    """A declaration `alignas(A) threadgroup T x[N], y;`."""

    end: int  # index of the `;`
    align: str  # the argument of alignas, or ""
    type: list[Token]
    declarators: list[list[Token]]  # each begins with the variable's name


def threadgroup_variables(code: list[Token], start: int, keyword: int) -> ThreadgroupVariables | None:
    """Reads a declaration of threadgroup variables inside a function.

    Args:
        code: tokens of the text.
        start: index of the statement's first token.
        keyword: index of the word `threadgroup`.

    Returns:
        The variables, or None if the statement declares a pointer or a reference, or declares nothing.

    Raises:
        SourceError: a variable has a value other than `{0}` or `{}`, or its alignas is not the first word.
    """
    texts = [t.text for t in code[start:keyword]]
    before = set(texts)
    # inside the arguments of a template: `tensor<threadgroup half, ...> x(...)`
    if texts.count("<") > texts.count(">"):
        return None
    if before & {*CLOSING, ")", "*", "&", "="} and "alignas" not in before:
        return None
    first = -1  # the first variable's name
    i = keyword + 1
    while first < 0 and code[i].text != ";":
        text = code[i].text
        if text in ("*", "&", "&&", "(", "{", ")") and not (text == "(" and code[i - 1].text == "alignas"):
            return None
        if text == "=":
            raise SourceError(code[i].line, "a threadgroup variable cannot be initialised")
        if text == "<":
            i = match_angle(code, i)
        elif text in CLOSING:
            i = match_closing(code, i)
        elif code[i].kind == "word" and code[i + 1].text in ("[", ",", ";"):
            first = i
        i += 1
    if first < 0:
        return None
    end = next(j for j in range(first, len(code)) if code[j].text == ";")
    kind = [t for t in code[start:first] if t.text not in ("threadgroup", "static")]
    align = ""
    if kind and kind[0].text == "alignas":
        closing = match_closing(kind, 1)
        align, kind = join(kind[2:closing]), kind[closing + 1 :]
    elif any(t.text == "alignas" for t in kind):
        raise SourceError(code[keyword].line, "alignas must come first in a threadgroup variable")
    return ThreadgroupVariables(end, align, kind, _declarators(code[first:end]))


def _declarators(tokens: list[Token]) -> list[list[Token]]:
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.text in CLOSING) - (token.text in CLOSING.values())
        if depth == 0 and token.text == ",":
            parts.append([])
        else:
            parts[-1].append(token)
    return [_without_zeros(part) for part in parts]


def _without_zeros(declarator: list[Token]) -> list[Token]:
    """Returns `x[N]` of `x[N] = {0}`.

    Apple's compiler accepts this list, for example in MLX's layer_norm.metal. MLX then sets the elements itself, so the
    values after such a declaration do not matter.
    """
    texts = [t.text for t in declarator]
    if "=" not in texts:
        return declarator
    at = texts.index("=")
    if texts[at + 1 :] not in (["{", "}"], ["{", "0", "}"]):
        raise SourceError(declarator[at].line, "a threadgroup variable cannot be initialised")
    return declarator[:at]
