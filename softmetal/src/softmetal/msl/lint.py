"""Finds code that Apple's Metal compiler refuses, but that C++ accepts after address spaces are removed.

The rules read the tokens of preprocessed text before the translation. A rule is applied only if the text shows the
error. Types that depend on a template argument are skipped, because the argument may contain the address space.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .declarations import (
    SPACES,
    SPECIFIERS,
    after_type,
    declared_name,
    function_name,
    index,
    take_templates,
    top,
    without_attributes,
)
from .names import taken_names
from .tokens import SourceError, Token, match_closing, split_commas

_UNSUPPORTED = dict.fromkeys(
    ("virtual", "new", "delete", "goto", "dynamic_cast", "typeid", "thread_local", "register"),
    "'{}' is not supported in Metal",
)
_UNSUPPORTED |= dict.fromkeys(("try", "catch", "throw"), "'{}': exceptions are not supported in Metal")
_UNSUPPORTED |= dict.fromkeys(("asm", "__asm", "__asm__"), "inline assembly is not supported in Metal")
_UNSUPPORTED["double"] = "'double' is not a type of Metal"
_TYPE_WORDS = frozenset({"struct", "class", "union", "enum"})
_STATEMENT_WORDS = {
    *("return", "if", "else", "for", "while", "do", "switch", "case", "default", "break", "continue", "sizeof", "this"),
    *("using", "typedef", "static_assert", "operator", "template", "public", "private", "protected", "namespace"),
}
_SCALARS = {"bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float"}
_BUILTIN = {
    *("void", "unsigned", "signed", "size_t", "ptrdiff_t", *_SCALARS),
    *(f"{s}{n}" for s in _SCALARS for n in (2, 3, 4)),
    *(f"{s}int{w}_t" for s in ("", "u") for w in (8, 16, 32, 64)),
    *("atomic_int", "atomic_uint", "atomic_bool", "atomic_float", "atomic_ulong"),
}
_MARKS = frozenset({"*", "&", "&&"})


@dataclass(slots=True)
class _Function:
    name: str
    line: int
    is_template: bool
    calls: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Scope:
    kind: str  # namespace, type, function, block
    open_names: frozenset[str]  # template parameters and types that may contain an address space
    function: _Function | None = None
    is_kernel: bool = False


class _Linter:
    def __init__(self, code: list[Token]) -> None:
        self.code = code
        self.found: list[SourceError] = []
        self.functions: list[_Function] = []
        self.open_names: set[str] = set()
        self.types = _BUILTIN | {code[i + 1].text for i in range(len(code) - 1) if code[i].text in _TYPE_WORDS}

    def run(self) -> list[SourceError]:
        self._words()
        self._scope(0, _Scope("namespace", frozenset()))
        self._recursion()
        return self.found

    def _refuse(self, token: Token, message: str) -> None:
        self.found.append(SourceError(token.line, message))

    # ---- single tokens ---------------------------------------------------------------------------------------------

    def _words(self) -> None:
        code = self.code
        for i, token in enumerate(code):
            if token.kind != "string" and not token.text.isascii():
                self._refuse(token, f"character {token.text!a} outside ASCII")
            if token.kind != "word":
                continue
            before = code[i - 1].text if i else ""
            if token.text in _UNSUPPORTED and before not in (".", "->", "::"):
                if before != "operator" and (token.text, before) != ("delete", "="):
                    self._refuse(token, _UNSUPPORTED[token.text].format(token.text))
            elif token.text.endswith("_cast") and i + 1 < len(code) and code[i + 1].text == "<":
                self._cast(i + 2, ">")
        for i, token in enumerate(code):
            if token.text == "(" and (i == 0 or code[i - 1].kind != "word" or code[i - 1].text in ("return", "case")):
                self._cast(i + 1, ")")

    def _cast(self, start: int, closing: str) -> None:
        """Checks `(T*)` and `x_cast<T*>` if the type is known to contain no address space."""
        i = start
        while i < len(self.code) and (self.code[i].text in ("const", "volatile") or self.code[i].text in _BUILTIN):
            i += 1
        end = i
        while end < len(self.code) and self.code[end].text in ("*", "&", "const"):
            end += 1
        if i > start and end > i and end < len(self.code) and self.code[end].text == closing:
            named = {t.text for t in self.code[start:i]}
            marks = {t.text for t in self.code[i:end]}
            if named & _BUILTIN and marks & _MARKS:
                self._refuse(self.code[i], "pointer or reference type in a cast without an address space")

    # ---- structure -------------------------------------------------------------------------------------------------

    def _scope(self, i: int, scope: _Scope) -> int:
        """Reads statements up to the `}` that closes `scope`. Returns the index after the `}`."""
        code = self.code
        start = i
        while i < len(code):
            text = code[i].text
            if text in ("(", "["):
                i = match_closing(code, i) + 1
                continue
            if text == ";":
                self._statement(code[start:i], scope)
                start = i + 1
            elif text == "}":
                if i > start:
                    self._statement(code[start:i], scope)
                return i + 1
            elif text == "{":
                inner = self._open(code[start:i], scope)
                if inner is None:
                    i = match_closing(code, i) + 1
                    continue
                i = start = self._scope(i + 1, inner)
                continue
            elif text == ":" and self._is_label(code[start:i], scope):
                start = i + 1
            i += 1
        return i

    @staticmethod
    def _is_label(header: list[Token], scope: _Scope) -> bool:
        first = header[0].text if header else ""
        if scope.kind == "type":
            return first in ("public", "private", "protected")
        return first in ("case", "default") and scope.kind in ("function", "block")

    def _open(self, header: list[Token], scope: _Scope) -> _Scope | None:
        """Returns the scope that the `{` after `header` opens, or None if it opens an initializer."""
        is_kernel = _is_kernel(header)
        header = without_attributes(header)
        texts = [t.text for t in header]
        last = texts[-1] if texts else ""
        if scope.kind in ("function", "block"):
            self._local(header, scope)
            if texts[:1] and texts[0] in _TYPE_WORDS:
                return _Scope("type", scope.open_names)
            if not texts or (last in (")", "else", "do", ":") and "=" not in top(header)):
                return _Scope("block", scope.open_names, scope.function, scope.is_kernel)
            return None
        body, names = take_templates(header)
        open_names = scope.open_names | names
        texts = [t.text for t in body]
        if "namespace" in texts[:2] or (texts[:1] == ["extern"] and len(texts) == 2):
            return _Scope("namespace", open_names)
        name = function_name(body)
        if name < 0:
            is_type = bool(set(texts) & _TYPE_WORDS) and "=" not in texts
            return _Scope("type", open_names) if is_type else None
        closing = match_closing(body, name + 1)
        tail = [t.text for t in body[closing + 1 :]]
        if ":" in tail and last not in (")", "}"):  # member{value} in a constructor's list
            return None
        function = _Function(body[name].text, body[name].line, bool(names))
        is_kernel = is_kernel or "kernel" in texts[:name]
        self.functions.append(function)
        self._signature(body, name, closing, open_names, is_kernel)
        return _Scope("function", open_names, function, is_kernel)

    def _statement(self, statement: list[Token], scope: _Scope) -> None:
        statement = without_attributes(statement)
        if not statement:
            return
        if scope.kind in ("function", "block"):
            self._local(statement, scope)
            return
        body, names = take_templates(statement)
        open_names = scope.open_names | names
        if not body or body[0].text in ("template", "static_assert", "friend", "extern"):
            return
        if body[0].text in ("typedef", "using"):
            self._alias(body, open_names)
            return
        name = function_name(body)
        if name >= 0:
            closing = match_closing(body, name + 1)
            tail = [t.text for t in body[closing + 1 :]]
            if tail[-2:] not in (["=", "default"], ["=", "delete"]):
                self._signature(body, name, closing, open_names, False)
            return
        self._variable(body, open_names, "member" if scope.kind == "type" else "variable")
        if scope.kind == "namespace":
            self._threadgroup_variable(body, scope)

    def _alias(self, body: list[Token], open_names: frozenset[str]) -> None:
        texts = {t.text for t in body}
        if texts & SPACES or texts & {"typename", "decltype", "auto"} or texts & open_names:
            self.open_names.add(body[1].text if body[0].text == "using" else body[-1].text)

    # ---- declarations ----------------------------------------------------------------------------------------------

    def _signature(
        self, body: list[Token], name: int, closing: int, open_names: frozenset[str], is_kernel: bool
    ) -> None:
        title = body[name].text if body[name].kind == "word" else f"operator{body[name].text}"
        result = body[:name]
        if "operator" not in [t.text for t in result] and self._lacks_space(result, open_names):
            self._refuse(body[name], f"'{title}' returns a pointer or reference without an address space")
        for part in split_commas(body[name + 2 : closing]):
            texts = [t.text for t in part]
            if texts == ["..."] or texts == [".", ".", "."]:
                self._refuse(
                    part[0], f"'{title}': functions with a variable number of arguments are not supported in Metal"
                )
                continue
            declarator = part[: index(top(part), "=")]
            if is_kernel and any(t in _MARKS for t in top(declarator)):
                if not {t.text for t in part} & (SPACES - {"thread"}):
                    self._refuse(
                        part[0], f"kernel parameter '{declared_name(declarator)}' has no address space for buffers"
                    )
            elif self._lacks_space(declarator, open_names):
                message = f"parameter '{declared_name(declarator)}' of '{title}' is a pointer or reference"
                self._refuse(part[0], f"{message} without an address space")

    def _lacks_space(self, tokens: list[Token], open_names: frozenset[str]) -> bool:
        """Returns whether the declaration has `*` or `&` on a known type and no address space."""
        texts = top(tokens)
        if not any(t in _MARKS for t in texts):
            return False
        words = {t.text for t in tokens if t.kind == "word"}
        if words & SPACES or words & {"auto", "decltype", "typename"}:
            return False
        outside = {t for t in texts if t not in _MARKS}
        return not outside & (open_names | self.open_names)

    def _local(self, statement: list[Token], scope: _Scope) -> None:
        """Checks the calls and local variables in a statement inside a function."""
        if scope.function is not None:
            for i, token in enumerate(statement[:-1]):
                if token.kind == "word" and statement[i + 1].text == "(":
                    before = statement[i - 1].text if i else ""
                    own = before not in (".", "->", "::") or (before == "->" and statement[i - 2].text == "this")
                    if own:
                        scope.function.calls.add(token.text)
        texts = [t.text for t in statement]
        if texts[:1] == ["for"] and len(texts) > 2:
            inner = statement[2 : match_closing(statement, 1)]
            self._local_declaration(inner[: index([t.text for t in inner], ";")], scope)
            statement = statement[match_closing(statement, 1) + 1 :]
        elif texts[:1] in (["if"], ["while"], ["switch"]):
            opening = index(texts, "(")
            if opening < len(texts):
                statement = statement[match_closing(statement, opening) + 1 :]
        elif texts[:1] in (["else"], ["do"]):
            statement = statement[1:]
        self._local_declaration(statement, scope)

    def _local_declaration(self, statement: list[Token], scope: _Scope) -> None:
        texts = [t.text for t in statement]
        if texts[:1] and texts[0] in ("typedef", "using"):
            self._alias(statement, scope.open_names)
            return
        head = texts[: index(texts, "=")]
        if "static" in head[:3] and not {"constexpr", "constant"} & set(head):
            self._refuse(statement[0], "a static variable inside a function must be constant")
        self._variable(statement, scope.open_names, "variable")
        if not scope.is_kernel:
            self._threadgroup_variable(statement, scope)

    def _variable(self, statement: list[Token], open_names: frozenset[str], what: str) -> None:
        """Checks `T* x` and `T& x`, unless the text can be an expression."""
        i = 0
        while i < len(statement) and statement[i].text in SPECIFIERS | SPACES:
            i += 1
        if i >= len(statement) or statement[i].text in _STATEMENT_WORDS or (i == 0 and statement[0].kind != "word"):
            return
        i = after_type(statement, i)
        first_mark = i
        while i < len(statement) and statement[i].text in (*_MARKS, "const", "volatile", *SPACES):
            i += 1
        if i >= len(statement) or i == first_mark or statement[i].kind != "word":
            return
        if not any(t.text in _MARKS for t in statement[first_mark:i]):
            return
        follows = statement[i + 1].text if i + 1 < len(statement) else ";"
        if follows not in ("=", ";", ",", "[", ":", "{"):
            return
        if follows in (";", ",") and not {t.text for t in statement[:first_mark]} & self.types:
            return  # the statement may be a product with an unused value
        if self._lacks_space(statement[:i], open_names):
            self._refuse(
                statement[i], f"{what} '{statement[i].text}' is a pointer or reference without an address space"
            )

    def _threadgroup_variable(self, statement: list[Token], scope: _Scope) -> None:
        texts = top(statement)
        if "threadgroup" not in texts or texts[0] in ("typedef", "using", "return"):
            return
        declarator = texts[texts.index("threadgroup") : index(texts, "=")]
        if any(t in (*_MARKS, "(", ".", "->") for t in declarator) or len(declarator) < 3:
            return
        where = "outside of a function" if scope.kind == "namespace" else "in a function that is not a kernel"
        self._refuse(statement[0], f"threadgroup variable {where}")

    # ---- recursion -------------------------------------------------------------------------------------------------

    def _recursion(self) -> None:
        counts: dict[str, int] = {}
        for function in self.functions:
            counts[function.name] = counts.get(function.name, 0) + 1
        known = {f.name: f for f in self.functions if counts[f.name] == 1 and not f.is_template}
        for name, function in known.items():
            path = _cycle(name, known)
            if path:
                through = "" if len(path) == 1 else " through " + ", ".join(f"'{p}'" for p in path[1:])
                self.found.append(SourceError(function.line, f"'{name}' calls itself{through}: Metal has no recursion"))


def _cycle(name: str, known: dict[str, _Function]) -> list[str]:
    """Returns the shortest chain of calls from `name` back to `name`, or []."""
    paths = [[name]]
    seen: set[str] = set()
    for path in paths:
        for callee in sorted(known[path[-1]].calls):
            if callee == name:
                return path
            if callee in known and callee not in seen:
                seen.add(callee)
                paths.append([*path, callee])
    return []


def _is_kernel(header: list[Token]) -> bool:
    texts = [t.text for t in header]
    return any(texts[i : i + 2] == ["[", "kernel"] for i in range(len(texts)))


def lint(code: list[Token]) -> Iterator[SourceError]:
    """Finds code that Metal refuses.

    Args:
        code: the significant tokens of preprocessed text: `tokens.significant(tokens.tokenize(text))`.

    Yields:
        One error for each finding, in the order of the lines.
    """
    yield from sorted([*_Linter(code).run(), *taken_names(code)], key=lambda e: e.line)
