"""Rewrites declarations that need another structure in the dialect: member functions, variables, function arguments."""

from __future__ import annotations

from dataclasses import dataclass

from ..attributes import attribute_end
from ..declarations import SPACES, function_name, threadgroup_variables, without_attributes
from ..tokens import SourceError, Token, join, match_angle, match_closing, split_commas

_TYPE_WORDS = ("struct", "class", "union", "enum")
_AFTER_PARAMETERS = {"const", "volatile", "METAL_CONST"}
_NO_FUNCTION = {"static_assert", "alignas", "decltype", "__attribute__"}
_NO_MEMBER = {"static", "friend", "typedef", "using"}


@dataclass(slots=True)
class _Scope:
    kind: str  # namespace, type, function
    name: str = ""
    start: int = 0  # index of the current statement's first token


class Structure:
    """Rewrites declarations in place. `in_function` says for each token whether it is inside a function.

    - A member function gets `__private`, because Metal's `this` is `thread` and the dialect's `this` has no address
      space.
    - A threadgroup variable becomes a reference, because the dialect allows such variables only in kernels, and a
      kernel of the dialect cannot be a template.
    - A function constant becomes extern, because its value is unknown when Metal compiles, so it must not be a constant
      expression.
    - A template parameter that is a function gets its type through an alias, so that the dialect adds no address space.

    Args:
        code: the significant tokens of preprocessed text.
    """

    def __init__(self, code: list[Token]) -> None:
        self._code = code
        self._types: set[str] = set()
        self._statics: set[str] = set()
        self._variables = 0
        self.in_function = [False] * len(code)
        self._scan()

    def _scan(self) -> None:
        code = self._code
        scopes = [_Scope("namespace")]
        i = 0
        while i < len(code):
            scope = scopes[-1]
            text = code[i].text
            self.in_function[i] = scope.kind == "function"
            if text == "template" and i + 1 < len(code) and code[i + 1].text == "<":
                i = self._template(i + 1)
                continue
            if text in ("(", "[") and scope.kind != "function":
                i = match_closing(code, i) + 1
                continue
            if text == "{":
                inner = self._open(scopes, i)
                if inner is None:  # an initialiser: the statement goes on
                    i = match_closing(code, i) + 1
                    continue
                scopes.append(inner)
                inner.start = i + 1
            elif text == "}" and len(scopes) > 1:
                scopes.pop()
                scopes[-1].start = i + 1
            elif text == ";":
                self._statement(scope, i)
                scope.start = i + 1
            elif text == ":" and scope.kind == "type" and code[i - 1].text in ("public", "private", "protected"):
                scope.start = i + 1
            elif text == "threadgroup" and scope.kind == "function":
                i = self._threadgroup_variable(scope, i)
                continue
            i += 1

    def _open(self, scopes: list[_Scope], brace: int) -> _Scope | None:
        scope = scopes[-1]
        header = self._without_template(self._code[scope.start : brace])
        texts = [t.text for t in header]
        if scope.kind == "function":
            is_type = bool(texts) and texts[0] in _TYPE_WORDS and "(" not in texts and "=" not in texts
            return _Scope("type", _type_name(header)) if is_type else _Scope("function")
        if "namespace" in texts[:2] or (texts[:1] == ["extern"] and len(texts) == 2):
            return _Scope("namespace")
        name = function_name(header)
        if name < 0:
            if "=" in texts or not set(_TYPE_WORDS) & set(texts):
                return None
            title = _type_name(header)
            self._types.add(title)
            return _Scope("type", title)
        tail = [t.text for t in header[match_closing(header, name + 1) + 1 :]]
        if ":" in tail and tail[-1] not in (")", "}"):  # member{value} in a constructor's list
            return None
        self._function(scope, header, name)
        return _Scope("function")

    def _statement(self, scope: _Scope, end: int) -> None:
        tokens = self._code[scope.start : end]
        if scope.kind == "type":
            header = self._without_template(tokens)
            name = function_name(header)
            if name >= 0:
                self._function(scope, header, name)
        elif scope.kind == "namespace":
            for i, token in enumerate(tokens):
                if token.text == "function_constant" and attribute_end(tokens, i - 2) >= 0:
                    word = next((t for t in tokens if t.text == "constant"), None)
                    if (
                        word is not None
                        and function_name(without_attributes(tokens)) < 0
                        and tokens[0].text != "template"
                    ):
                        word.text = "extern const __constant"
                        for other in tokens:
                            other.text = "" if other.text in ("static", "constexpr") else other.text
                    return
            self._drop_definition_of_member(tokens)

    @staticmethod
    def _drop_definition_of_member(tokens: list[Token]) -> None:
        """Removes `constant constexpr T S::x[2];`.

        C++14 needs such a definition, but the dialect demands an initializer.
        """
        texts = [t.text for t in tokens]
        if {"constexpr", "constant", "::"} <= set(texts) and not {"=", "(", "{"} & set(texts):
            for token in tokens:
                token.text = ""

    @staticmethod
    def _without_template(header: list[Token]) -> list[Token]:
        while len(header) > 1 and header[0].text == "template" and header[1].text == "<":
            header = header[match_angle(header, 1) + 1 :]
        return header

    def _function(self, scope: _Scope, header: list[Token], name: int) -> None:
        words = {t.text for t in header[:name]}
        title = header[name].text
        if title in _NO_FUNCTION:
            return
        owner = scope.name
        if scope.kind == "namespace":
            owner = _owner(header, name)
            if not owner or owner not in self._types or f"{owner}::{title}" in self._statics:
                return
        if words & _NO_MEMBER:
            self._statics.add(f"{owner}::{title}")
            return
        if title == owner or title in SPACES or "~" in words:
            self._constructor(header, match_closing(header, name + 1) + 1)
            return
        i = match_closing(header, name + 1)
        while i + 1 < len(header) and header[i + 1].text in _AFTER_PARAMETERS:
            i += 1
        if i + 1 >= len(header) or header[i + 1].text not in SPACES:
            header[i].text += " __private"

    @staticmethod
    def _constructor(header: list[Token], i: int) -> None:
        """Removes `thread` after a constructor. With it, the dialect does not find the constructors of members."""
        while i < len(header) and header[i].text in _AFTER_PARAMETERS:
            i += 1
        if i < len(header) and header[i].text in ("thread", "constant"):
            header[i].text = "__constant" if header[i].text == "constant" else ""

    def _threadgroup_variable(self, scope: _Scope, i: int) -> int:
        code = self._code
        try:
            found = threadgroup_variables(code, scope.start, i)
        except SourceError:
            found = None
        if found is None:
            return i + 1
        text = ""
        for part in found.declarators:
            alias = f"sm_variable_{self._variables}"
            self._variables += 1
            text += f"typedef {join(found.type)} {alias} {join(part[1:])}; "
            text += f"__local {alias}& {part[0].text} = *(__local {alias}*)0; "
        for token in code[scope.start : found.end + 1]:
            token.text = ""
        code[scope.start].text = text
        scope.start = found.end + 1
        return found.end + 1

    def _template(self, angle: int) -> int:
        """Rewrites the function parameters of a template. Returns the index after the template's parameters."""
        end = match_angle(self._code, angle)
        for part in split_commas(self._code[angle + 1 : end]):
            texts = [t.text for t in part]
            for i in range(len(part) - 4):
                if texts[i : i + 2] == ["(", "*"] and part[i + 2].kind == "word" and texts[i + 3 : i + 5] == [")", "("]:
                    closing = match_closing(part, i + 4)
                    name = part[i + 2].text
                    for token in part[i : i + 4]:
                        token.text = ""
                    part[0].text = f"metal::sm_function<{part[0].text}"
                    # The space in "( " keeps this token from being counted as a bracket.
                    part[i + 4].text = "( "
                    part[closing].text = f")>& {name}"
                    break
        return end + 1


def _type_name(header: list[Token]) -> str:
    at = next(i for i, t in enumerate(header) if t.text in _TYPE_WORDS) + 1
    while at < len(header):
        if header[at].text == "alignas":
            at = match_closing(header, at + 1) + 1
        elif (end := attribute_end(header, at)) >= 0:
            at = end + 1
        else:
            break
    return header[at].text if at < len(header) and header[at].kind == "word" else ""


def _owner(header: list[Token], name: int) -> str:
    """Returns the class if a member function is defined outside of its class, and otherwise ""."""
    i = name - 1
    while i >= 0 and header[i].text == "operator":
        i -= 1
    if i < 1 or header[i].text != "::":
        return ""
    i -= 1
    if header[i].text == ">":
        depth = 0
        while i >= 0:
            depth += (header[i].text == ">") - (header[i].text == "<")
            i -= 1
            if depth == 0:
                break
    return header[i].text if i >= 0 else ""
