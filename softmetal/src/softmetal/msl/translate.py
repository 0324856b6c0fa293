"""Translates Metal Shading Language to C++: removes or rewrites text that C++ cannot parse, and adds kernel entries.

The translation reads the tokens of preprocessed text. C++ deduces the *types* of parameters (thunk.h). Each line keeps
its number, so that messages and reports name the lines of the user's source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .attributes import Attribute, Parameter, attribute_end, read_parameters, take_attributes
from .contraction import fused_products
from .declarations import function_name, instance_target, threadgroup_variables
from .entries import Entry, FunctionConstant, KernelSignature, tables
from .tokens import (
    SourceError,
    Token,
    join,
    match_angle,
    match_closing,
    rewrite_literals,
    significant,
)

_ADDRESS_SPACES = {"device", "constant", "thread", "threadgroup"}


@dataclass(slots=True)
class _Scope:
    kind: str  # namespace, type, function, block
    name: str = ""
    start: int = 0  # index of the current statement's first token
    after: str = ""  # text that follows the closing brace
    seen: dict[str, tuple[str, ...]] = field(default_factory=dict)
    drop_from: int = -1  # at the closing brace, the definition is removed from this token on


class Translator:
    """Translates a text. After construction, `text` and `constants` hold the result.

    Args:
        tokens: preprocessed text with line markers. The constructor changes the tokens.
        values: function constants as C text, by name or by index (as text).
        wanted: host name of the kernel to compile. None compiles all kernels.

    Raises:
        SourceError: a construct cannot be translated. The error names the first such construct.
    """

    def __init__(self, tokens: list[Token], values: Mapping[str, str], wanted: str | None = None) -> None:
        self.tokens = tokens
        self.values = values
        self.wanted = wanted
        self.constants: list[FunctionConstant] = []
        self._kernels: dict[str, KernelSignature] = {}
        self._unlike: set[str] = set()  # names that kernels with different arguments share
        self._entries: list[Entry] = []
        self._sites = 0
        self._seen: dict[str, tuple[str, ...]] = {}  # as _Scope.seen, for all namespaces
        rewrite_literals(self.tokens)
        self._code = significant(self.tokens)
        products = fused_products(self.tokens, self._code)
        self._scan()
        self._drop_keywords()
        for product in products:
            product.mark()
        self.text = "".join(t.text for t in self.tokens) + tables(self._entries, self.constants)

    # ---- scanning --------------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        code = self._code
        scopes = [_Scope("namespace")]
        i = 0
        while i < len(code):
            scope = scopes[-1]
            text = code[i].text
            if text in ("(", "["):
                i = match_closing(code, i) + 1 if scope.kind in ("namespace", "type") else i + 1
                continue
            if text == "{":
                inner = self._open(scopes, i)
                if inner is None:  # an initializer, which is part of the statement
                    i = match_closing(code, i) + 1
                    continue
                scopes.append(inner)
                inner.start = i + 1
            elif text == "}":
                if len(scopes) == 1:
                    raise SourceError(code[i].line, "'}' without '{'")
                closed = scopes.pop()
                code[i].text += closed.after
                if closed.drop_from >= 0:
                    self._erase(closed.drop_from, i)
                scopes[-1].start = i + 1
            elif text == ";":
                self._statement(scopes, i)
                scope.start = i + 1
            elif text == ":" and scope.kind == "type" and code[i - 1].text in ("public", "private", "protected"):
                scope.start = i + 1
            elif text == "threadgroup" and self._in_function(scopes):
                i = self._threadgroup_variable(scope.start, i)
                scope.start = i
                continue
            i += 1
        if len(scopes) > 1:
            raise SourceError(code[-1].line, "'{' is never closed")

    @staticmethod
    def _in_function(scopes: list[_Scope]) -> bool:
        return any(s.kind == "function" for s in scopes)

    def _erase(self, first: int, last: int) -> None:
        for token in self._code[first : last + 1]:
            token.text = ""

    def _open(self, scopes: list[_Scope], brace: int) -> _Scope | None:
        """Returns the scope that the `{` at `brace` opens, or None for an initializer outside of functions."""
        scope = scopes[-1]
        header = self._code[scope.start : brace]
        texts = [t.text for t in header]
        if self._in_function(scopes):
            kind = "type" if texts[:1] and texts[0] in ("struct", "union", "class", "enum") else "block"
            return _Scope(kind)
        if "namespace" in texts[:2]:
            return _Scope("namespace", "::".join(t for t in texts if t not in ("inline", "namespace", "::")))
        if texts[:1] == ["extern"]:
            return _Scope("namespace")
        name = function_name(header)
        if name < 0:
            words = _outside_template(texts)
            if "=" in words or not {"struct", "class", "union", "enum"} & set(words):
                return None
            inner = _Scope("type")
            if texts[0] == "template" and self._is_repeated(scopes, header, "type"):
                inner.drop_from = scope.start
            return inner
        return self._function(scopes, header, name)

    def _function(self, scopes: list[_Scope], header: list[Token], name: int) -> _Scope:
        scope = scopes[-1]
        inner = _Scope("function")
        closing = match_closing(header, name + 1)
        is_kernel = any(t.text == "kernel" for t in header[:name] + header[closing:])
        if is_kernel and scope.kind == "namespace":
            parameters = read_parameters(header[name + 2 : closing])
            attributes = take_attributes(header)
            self._kernel(scopes, header, name, parameters, attributes, inner)
            return inner
        if any(t.text in ("vertex", "fragment") for t in header[:name]):
            raise SourceError(header[0].line, f"'{header[name].text}': only compute kernels run on the software device")
        take_attributes(header)
        if self._is_repeated(scopes, _signature(header, closing), "function"):
            inner.drop_from = scope.start
        if scope.kind == "type":
            for token in header[closing + 1 :]:
                token.text = "" if token.text in _ADDRESS_SPACES else token.text
        return inner

    def _is_repeated(self, scopes: list[_Scope], header: list[Token], kind: str) -> bool:
        """Returns whether an earlier declaration differs only in address spaces, and would be a duplicate in C++."""
        words = [t.text for t in header if t.text]
        spaces = tuple(t for t in words if t in _ADDRESS_SPACES)
        path = "::".join(s.name for s in scopes[:-1]) if scopes[-1].kind == "namespace" else ""
        # `constant float*` and `device const float*` both become `const float*`. An address space after the parameters
        # belongs to the object of a member function, and is removed.
        objects = {i for i, t in enumerate(words) if t == "constant" and words[i - 1 : i] == [")"]}
        plain = ["const" if t == "constant" and i not in objects else t for i, t in enumerate(words)]
        plain = [t for t in plain if t not in _ADDRESS_SPACES]
        key = " ".join([kind, path, *(t for i, t in enumerate(plain) if t != "const" or plain[i - 1 : i] != ["const"])])
        seen = self._seen if scopes[-1].kind == "namespace" else scopes[-1].seen
        others = seen.setdefault(key, spaces)
        return bool(spaces) and others != spaces

    def _statement(self, scopes: list[_Scope], end: int) -> None:
        """Translates the statement that ends with the `;` at `end`."""
        scope = scopes[-1]
        tokens = self._code[scope.start : end]
        if not tokens:
            return
        if scope.kind == "type":
            name = function_name(tokens)
            take_attributes(tokens)
            if name < 0:
                return
            closing = match_closing(tokens, name + 1)
            if self._is_repeated(scopes, _signature(tokens, closing), "declaration"):
                self._erase(scope.start, end)
            for token in tokens[closing + 1 :]:
                token.text = "" if token.text in _ADDRESS_SPACES else token.text
            return
        if scope.kind != "namespace":
            take_attributes(tokens)
            return
        attributes = take_attributes(tokens)
        names = {a.name for a in attributes}
        if tokens[0].text == "template" and len(tokens) > 1 and tokens[1].text != "<":
            if "host_name" in names:
                self._instance(scopes, tokens, attributes)
        elif "kernel" in names or any(t.text == "kernel" for t in tokens):
            _make_static(tokens)  # This only declares the kernel. The definition follows later.
        elif "function_constant" in names and function_name(tokens) < 0:
            self._function_constant(tokens, attributes)

    # ---- kernels ---------------------------------------------------------------------------------------------------

    def _kernel(
        self,
        scopes: list[_Scope],
        header: list[Token],
        name: int,
        parameters: list[Parameter],
        attributes: list[Attribute],
        inner: _Scope,
    ) -> None:
        template = ""
        if header[0].text == "template":
            template = join(header[: match_angle(header, 1) + 1])
            # A template parameter may be a function with pointer parameters, so address spaces are also removed from
            # the template's header.
            template = re.sub(r"\b(device|threadgroup|thread) ?", "", template).replace("constant ", "const ")
        limit = next((a.argument for a in attributes if a.name == "max_total_threads_per_threadgroup"), "0")
        word = header[name].text
        kernel = KernelSignature(parameters)
        if word in self._kernels and _places(self._kernels[word].parameters) != _places(parameters):
            self._unlike.add(word)
        self._kernels[word] = kernel
        if template:
            # The kernel's limit of threads is the result of a function and not a variable, because several templates of
            # kernels may have the same name, and only functions can be overloaded.
            inner.after = f" {template} constexpr unsigned sm_max_threads_{word}() {{ return {limit}; }}"
        else:
            _make_static(header)
            host = next((_string(a.argument) for a in attributes if a.name == "host_name"), word)
            inner.after = self._entry(scopes, host, word, kernel, limit)

    def _instance(self, scopes: list[_Scope], tokens: list[Token], attributes: list[Attribute]) -> None:
        """Translates `template [[host_name("x")]] [[kernel]] decltype(f<T>) f<T>;`, and the form `... void
        f<T>(...);`.
        """
        host = next(_string(a.argument) for a in attributes if a.name == "host_name")
        target = instance_target(tokens, self._kernels)
        expression = join(target)
        angle = next((i for i, t in enumerate(target) if t.text == "<"), len(target))
        word = target[angle - 1].text
        if word not in self._kernels:
            raise SourceError(tokens[0].line, f"host_name(\"{host}\"): '{word}' is not a kernel defined above")
        if angle == len(target):
            raise SourceError(tokens[0].line, f"host_name(\"{host}\"): the template arguments of '{word}' are missing")
        if word in self._unlike:
            raise SourceError(
                tokens[0].line, f"host_name(\"{host}\"): kernels called '{word}' have different arguments"
            )
        kernel = self._kernels[word]
        path = join(target[: angle - 1])
        limit = f"{path}sm_max_threads_{word}{join(target[angle:])}()"
        for token in tokens:
            token.text = ""
        tokens[0].text = self._entry(scopes, host, expression, kernel, limit)

    def _entry(self, scopes: list[_Scope], host: str, function: str, kernel: KernelSignature, limit: str) -> str:
        path = "".join(f"{s.name}::" for s in scopes if s.kind == "namespace" and s.name)
        entry = Entry(len(self._entries), host, function, kernel, limit, path, self.wanted in (None, host))
        self._entries.append(entry)
        return entry.text()

    # ---- variables -------------------------------------------------------------------------------------------------

    def _function_constant(self, tokens: list[Token], attributes: list[Attribute]) -> None:
        index = next(a.argument for a in attributes if a.name == "function_constant")
        code = [t for t in tokens if t.text]
        name = code[-1]
        kind = join([t for t in code[:-1] if t.text not in ("constant", "const", "static", "constexpr")])
        # macros can expand to a sum, for example an enumeration's first value plus an offset
        if re.fullmatch(r"\(?\d+(\s*\+\s*\d+)*\)?", index):
            index = str(sum(int(part) for part in index.strip("()").split("+")))
        if not index.isdigit() or "=" in [t.text for t in code]:
            message = f"function constant '{name.text}': expected [[function_constant(n)]] and no value"
            raise SourceError(name.line, message)
        value = self.values.get(name.text, self.values.get(index))
        constant = FunctionConstant(name.text, kind, int(index), value, len(self.constants))
        self.constants.append(constant)
        for token in code:
            token.text = ""
        code[0].text = constant.definition()

    def _threadgroup_variable(self, start: int, keyword: int) -> int:
        """Rewrites `threadgroup T x[N], y;` as a statement. Returns the index at which to continue."""
        code = self._code
        found = threadgroup_variables(code, start, keyword)
        if found is None:
            return keyword + 1  # a pointer, reference, cast or parameter, whose keyword is removed later
        kind = join(found.type)
        text = ""
        for part in found.declarators:
            alias = f"sm_variable_{self._sites}"
            text += f"typedef {kind} {alias} {join(part[1:])}; {alias}& {part[0].text} = "
            text += f"sm::threadgroup_variable<{alias}, {self._sites}, {found.align or 0}>(); "
            self._sites += 1
        self._erase(start, found.end)
        code[start].text = text
        return found.end + 1

    # ---- output ----------------------------------------------------------------------------------------------------

    def _drop_keywords(self) -> None:
        code = significant(self.tokens)
        defined = {c.name: c.is_defined for c in self.constants}
        for i, token in enumerate(code):
            if token.kind == "mark" and token.text == "[":
                end = attribute_end(code, i)
                if end > i:
                    take_attributes(code[i : end + 1])
            if token.kind != "word":
                continue
            if token.text == "constant":
                token.text = "const"
            elif token.text in ("device", "thread", "threadgroup"):
                token.text = ""
            elif token.text in ("kernel", "static kernel") and _starts(code, i):
                token.text = token.text.removesuffix("kernel")
            elif token.text == "is_function_constant_defined" and i + 2 < len(code):
                name = code[i + 2].text
                if name not in defined:
                    raise SourceError(token.line, f"'{name}' is not a function constant")
                for t in code[i : i + 4]:
                    t.text = ""
                token.text = "true" if defined[name] else "false"


def _signature(header: list[Token], closing: int) -> list[Token]:
    """Returns the tokens that identify a function: all up to the end of the parameters, and the qualifiers after it."""
    end = next((i for i in range(closing, len(header)) if header[i].text in (":", "=")), len(header))
    return header[:end]


def _outside_template(texts: list[str]) -> list[str]:
    """Returns the words of a declaration after its `template <...>`."""
    depth = 0
    for i, text in enumerate(texts):
        if i == 0 and text != "template":
            return texts
        depth += (text == "<") - (text == ">")
        if i > 1 and depth == 0:
            return texts[i + 1 :]
    return texts


def _places(parameters: list[Parameter]) -> list[tuple[str, ...]]:
    """Returns the sources of the arguments, without the parameters' names."""
    return [(p.source, p.index, str(p.is_constant), p.gate) for p in parameters]


def _make_static(declaration: list[Token]) -> None:
    """Gives a kernel internal linkage, so that its only copy is inlined into its entry.

    With a second copy, the kernel's threadgroup variables would be listed twice.
    """
    if declaration[0].text != "template" and all(t.text != "static" for t in declaration):
        declaration[0].text = f"static {declaration[0].text}"


def _string(argument: str) -> str:
    """Returns the joined value of adjacent string literals."""
    return "".join(re.findall(r'"((?:\\.|[^"])*)"', argument))


def _starts(code: list[Token], i: int) -> bool:
    """Returns whether the word at `i` can be a declaration specifier, because part of a type follows."""
    return i + 1 < len(code) and (code[i + 1].kind == "word" or code[i + 1].text in ("[", "::"))
