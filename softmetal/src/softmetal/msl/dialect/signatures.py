"""Metal's rules for kernels: the types of a kernel's arguments, and the slots to which the arguments are bound.

A rule is applied only if the text alone shows the error. Types that are template parameters are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ..attributes import Attribute, attribute_end
from ..declarations import SPACES, function_name, take_templates, without_attributes
from ..tokens import SourceError, Token, join, match_closing, split_commas

_POSITIONS = {
    *("thread_position_in_grid", "thread_position_in_threadgroup", "threadgroup_position_in_grid"),
    *("threadgroups_per_grid", "threads_per_grid", "threads_per_threadgroup", "dispatch_threads_per_threadgroup"),
}
_NUMBERS = {
    *("thread_index_in_threadgroup", "thread_index_in_simdgroup", "thread_index_in_quadgroup"),
    *("simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup", "dispatch_simdgroups_per_threadgroup"),
    *("quadgroup_index_in_threadgroup", "quadgroups_per_threadgroup", "dispatch_quadgroups_per_threadgroup"),
    *("thread_execution_width", "threads_per_simdgroup"),
}
_SCALARS = {"uint", "ushort", "uint32_t", "uint16_t"}
_VECTORS = {f"{t}{n}" for t in ("uint", "ushort") for n in (2, 3)}
# Type names that are known not to be in _SCALARS or _VECTORS. For any other name, the text alone does not show the
# type.
_OTHERS = {
    *("float", "half", "bfloat", "bool", "char", "uchar", "short", "int", "long", "ulong", "size_t", "int32_t"),
    *(f"{t}{n}" for t in ("float", "half", "int", "short", "long", "ulong", "char", "uchar") for n in (2, 3, 4)),
    *("uint4", "ushort4", "int64_t", "uint64_t", "uint8_t", "int16_t", "int8_t"),
}
MAX_THREADS = 1024
MAX_BUFFERS = 31
MAX_CONSTANT = 65535  # the last index of a function constant
_TYPE_WORDS = {"struct", "class", "union"}


def check_signatures(code: list[Token]) -> Iterator[SourceError]:
    """Finds kernels and function constants that Metal refuses.

    Args:
        code: the significant tokens of preprocessed text.

    Yields:
        One error per finding.
    """
    constants: dict[str, str] = {}
    structs: set[str] = set()
    at_run_time: dict[str, bool] = {}  # function -> whether no overload is constexpr
    kernels: set[str] = set()
    others: set[str] = set()
    bodies: list[tuple[int, int]] = []
    i = start = 0
    while i < len(code):
        text = code[i].text
        if text in ("(", "["):
            i = match_closing(code, i)
        elif text == "{":
            header = code[start:i]
            plain, _ = take_templates(without_attributes(header))
            texts = [t.text for t in plain]
            name = function_name(plain)
            if "namespace" in texts[:2] or texts[:1] == ["extern"]:
                start = i + 1
            else:
                end = match_closing(code, i)
                if name >= 0:
                    is_kernel = any(t.text == "kernel" for t in header)
                    title = plain[name].text
                    (kernels if is_kernel else others).add(title)
                    at_run_time[title] = at_run_time.get(title, True) and "constexpr" not in texts
                    bodies.append((i, end))
                    if is_kernel:
                        yield from _kernel(header, constants)
                elif _TYPE_WORDS & set(texts) and "=" not in texts:
                    structs |= {b for a, b in pairwise(texts) if a in _TYPE_WORDS}
                    for token in code[i:end]:
                        if token.text == "kernel":
                            yield SourceError(token.line, "a kernel cannot be a member")
                i = end
                start = i + 1 if name >= 0 else start
        elif text in (";", "}"):
            if text == ";":
                yield from _function_constant(code[start:i], constants, structs)
                yield from _constant(code[start:i], constants, at_run_time)
                yield from _host_name(code[start:i])
            start = i + 1
        i += 1
    for first, last in bodies:
        yield from _calls(code, first, last, kernels - others)


def _calls(code: list[Token], first: int, last: int, kernels: set[str]) -> Iterator[SourceError]:
    for i in range(first, last):
        if code[i].text in kernels and code[i + 1].text == "(" and code[i - 1].text in ("{", "}", ";", ")", "else"):
            yield SourceError(
                code[i].line, f"'{code[i].text}' is a kernel, and cannot be called: move its body to a function"
            )


def _attributes(tokens: list[Token]) -> Iterator[Attribute]:
    for i in range(len(tokens)):
        end = attribute_end(tokens, i) if tokens[i].text == "[" else -1
        if end < 0:
            continue
        for part in split_commas(tokens[i + 2 : end - 1]):
            argument = join(part[2 : match_closing(part, 1)]) if len(part) > 1 and part[1].text == "(" else ""
            yield Attribute(part[0].text, argument, part[0].line)


def _kernel(header: list[Token], constants: dict[str, str]) -> Iterator[SourceError]:
    plain = without_attributes(header)
    body, generic = take_templates(plain)
    opening = next(i for i, t in enumerate(header) if t is body[function_name(body) + 1])
    parameters = header[opening + 1 : match_closing(header, opening)]
    for attribute in _attributes(header[:opening]):
        limit = attribute.argument
        if attribute.name == "max_total_threads_per_threadgroup" and limit.isdigit() and int(limit) > MAX_THREADS:
            yield SourceError(
                attribute.line, f"max_total_threads_per_threadgroup({limit}): a threadgroup has at most 1024"
            )
        elif attribute.name == "max_total_threads_per_threadgroup" and limit in constants.values():
            yield SourceError(
                attribute.line, f"max_total_threads_per_threadgroup({limit}): expected a constant expression"
            )
    seen: dict[str, str] = {}
    width = ""
    for part in split_commas(parameters):
        declarator = without_attributes(part)
        words = [t.text for t in declarator if t.kind == "word"]
        if len(words) < 2:
            continue
        name, kind = words[-1], [w for w in words[:-1] if w not in ("const", "metal", "thread")]
        for attribute in _attributes(part):
            yield from _place(attribute, name, declarator)
            builtin = attribute.name
            if builtin not in _POSITIONS | _NUMBERS:
                continue
            if builtin in seen and not any(a.name == "function_constant" for a in _attributes(part)):
                yield SourceError(attribute.line, f"'{name}': [[{builtin}]] is already '{seen[builtin]}'")
            seen[builtin] = name
            if len(kind) != 1 or kind[0] in generic:
                continue
            allowed = _SCALARS | (_VECTORS if builtin in _POSITIONS else set())
            if kind[0] in _OTHERS | _VECTORS and kind[0] not in allowed:
                choice = "uint, uint2, uint3, ushort, ushort2 or ushort3" if builtin in _POSITIONS else "uint or ushort"
                yield SourceError(attribute.line, f"'{name}': [[{builtin}]] is {choice}, not {kind[0]}")
            elif kind[0] in _VECTORS:
                if width and kind[0][-1] != width:
                    message = f"'{name}': positions of one kernel have one number of components, not {width} and {kind[0][-1]}"
                    yield SourceError(attribute.line, message)
                width = kind[0][-1]


def _place(attribute: Attribute, name: str, declarator: list[Token]) -> Iterator[SourceError]:
    spaces = {t.text for t in declarator} & SPACES
    if attribute.name == "buffer":
        if "threadgroup" in spaces and not spaces & {"device", "constant"}:
            yield SourceError(
                attribute.line, f"'{name}': threadgroup memory is bound with [[threadgroup(n)]], not [[buffer(n)]]"
            )
        if attribute.argument.isdigit() and int(attribute.argument) >= MAX_BUFFERS:
            yield SourceError(
                attribute.line, f"'{name}': [[buffer({attribute.argument})]]: the last index is {MAX_BUFFERS - 1}"
            )
    elif attribute.name == "threadgroup" and spaces & {"device", "constant"} and "threadgroup" not in spaces:
        yield SourceError(
            attribute.line, f"'{name}': device and constant memory is bound with [[buffer(n)]], not [[threadgroup(n)]]"
        )


def _host_name(statement: list[Token]) -> Iterator[SourceError]:
    for attribute in _attributes(statement):
        if attribute.name == "host_name" and not attribute.argument.startswith('"'):
            yield SourceError(attribute.line, f"host_name({attribute.argument}): expected a text")


def _constant(statement: list[Token], constants: dict[str, str], at_run_time: dict[str, bool]) -> Iterator[SourceError]:
    """Finds a global constant whose initializer calls a function that is not constexpr."""
    texts = [t.text for t in statement]
    head = texts[: texts.index("=")] if "=" in texts else []
    if "constant" not in head or {"(", "{"} & set(head) or set(constants.values()) & set(texts):
        return
    for i in range(texts.index("="), len(texts) - 1):
        if at_run_time.get(texts[i]) and texts[i + 1] == "(" and texts[i - 1] not in ("::", "."):
            yield SourceError(
                statement[i].line, f"'{texts[i]}' is not constexpr, so its result is not the value of a constant"
            )


def _function_constant(statement: list[Token], known: dict[str, str], structs: set[str]) -> Iterator[SourceError]:
    plain = without_attributes(statement)
    if (
        not plain
        or plain[0].text == "template"
        or "constant" not in {t.text for t in plain}
        or function_name(plain) >= 0
    ):
        return
    for attribute in _attributes(statement):
        if attribute.name != "function_constant":
            continue
        if attribute.argument in known:
            other = known[attribute.argument]
            yield SourceError(
                attribute.line, f"'{plain[-1].text}': function constant {attribute.argument} is already '{other}'"
            )
        if attribute.argument.isdigit() and int(attribute.argument) > MAX_CONSTANT:
            yield SourceError(
                attribute.line, f"'{plain[-1].text}': function constant {attribute.argument}: the last index is 65535"
            )
        if struct := next((t.text for t in plain if t.text in structs), ""):
            yield SourceError(
                attribute.line, f"'{plain[-1].text}': a function constant is a scalar or a vector, not {struct}"
            )
        known[attribute.argument] = plain[-1].text
