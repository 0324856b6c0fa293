"""Translates a kernel that Metal's compiler compiled to code for this device. Both are modules in LLVM's text form.

The translation removes address spaces. Simdgroup matrices become the two elements that a thread holds. Threadgroup
variables become memory from the executor. Function constants get their values. The translation adds an entry that loads
the arguments, and the library's tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ...msl.attributes import BUILTINS
from .functions import Declaration, cpp_builtin, cpp_function, llvm_wrapper
from .metadata import THREADGROUP_SPACE, Argument, MetadataError, read_metadata
from .tables import SITE, library_table, string_constant
from .values import TranslateError, with_value

_LAYOUT = "e-m:e-p270:32:32-p271:32:32-p272:64:64-i64:64-i128:128-f80:128-n8:16:32:64-S128"
_SYMBOL = r'@(?:"[^"]*"|[\w.$-]+)'
_DECLARATION = re.compile(
    r"^declare (?P<result>[^@]+?) @air\.(?P<name>[\w.]+)\((?P<parameters>.*?)\)[^)]*$", re.MULTILINE
)
_THREADGROUP = re.compile(
    rf"^(?P<name>{_SYMBOL}) = [^\n]*?addrspace\(3\) global (?P<type>[^\n]+?) (?:undef|zeroinitializer|poison)"
    r"(?:, align (?P<align>\d+))?[^\n]*$",
    re.MULTILINE,
)
_EXPRESSION = re.compile(r"(?:getelementptr|bitcast|addrspacecast|ptrtoint|inttoptr)(?: \w+)* \(")


class Translation:
    """The translation of one kernel.

    Args:
        text: the module, from llvm-dis.
        name: the kernel's name in its library.
        values: function constants as C text, by name, or by index as text.
        checked: whether to translate for checked mode.

    Attributes:
        llvm: the translated module.
        cpp: the C++ that the translated module calls.

    Raises:
        TranslateError: a function constant has no value, or a value of another type.
        MetadataError: the metadata have an unknown form.
        UnknownFunction: the kernel calls a function that this device does not have.
    """

    def __init__(self, text: str, name: str, values: Mapping[str, str], checked: bool) -> None:
        self._info = read_metadata(text)
        self._checked = checked
        body = text[: text.index("\n!", text.index("\nattributes #"))] if "\nattributes #" in text else text
        defined = {c.name for c in self._info.constants if c.name in values or str(c.index) in values}
        missing = [f"{c.name!r} ({c.index})" for c in self._info.constants if c.name not in defined]
        if missing:
            raise TranslateError(f"kernel {name!r}: function constants without a value: {', '.join(missing)}")
        for constant in self._info.constants:
            value = values.get(constant.name, values.get(str(constant.index), ""))
            body = with_value(body, constant, value)
        body, sites = self._with_threadgroup_variables(_narrowed(_with_tensor_names(body)))
        body = _plain(body)
        self._functions = [
            Declaration(m["name"], _bare(m["result"]), tuple(map(_bare, _commas(m["parameters"]))))
            for m in _DECLARATION.finditer(body)
        ]
        body = _DECLARATION.sub("", body)
        body, initialisers = _initialisers(body)
        self.llvm = "\n".join(
            [
                f'target datalayout = "{_LAYOUT}"\ntarget triple = "x86_64-pc-linux-gnu"',
                body,
                *(llvm_wrapper(f, f"#{_OURS_INLINE}") for f in self._functions),
                self._entry(body),
                self._tables(name, sites, defined),
                self._gates(initialisers),
                self._attributes(),
                "",
            ]
        )
        builtins = sorted({a.builtin for a in self._info.arguments if a.builtin})
        functions = [*map(cpp_function, self._functions), *map(cpp_builtin, builtins)]
        self.cpp = "\n".join(["namespace air {", *functions, "}", "#pragma clang attribute pop", ""])

    def _attributes(self) -> str:
        sanitize = " sanitize_thread" if self._checked else ""
        return (
            f"attributes #{_OURS} = {{ nounwind convergent{sanitize} }}\n"
            f"attributes #{_OURS_INLINE} = {{ nounwind convergent alwaysinline{sanitize} }}"
        )

    def _with_threadgroup_variables(self, body: str) -> tuple[str, list[tuple[str, int]]]:
        """Replaces threadgroup variables with memory from the executor.

        Returns the type and alignment of each variable.
        """
        found = list(_THREADGROUP.finditer(body))
        body = _THREADGROUP.sub("", body)
        sites = [(m["type"], int(m["align"] or 16)) for m in found]
        head, brace = _find_kernel(body, self._info.symbol)
        end = body.index("\n}", brace)
        code = body[brace:end]
        first = []
        for i, (type_, align) in enumerate(sites):
            size = f"ptrtoint (ptr getelementptr ({type_}, ptr null, i32 1) to i32)"
            first.append(f"  %sm.t{i} = call ptr @sm_threadgroup_variable(i32 {i}, i32 {size}, i32 {align})")
        code, hoisted = _hoisted(code, [m["name"] for m in found])
        for i, match in enumerate(found):
            code = re.sub(re.escape(match["name"]) + r"(?![\w.$-])", f"%sm.t{i}", code)
            hoisted = [re.sub(re.escape(match["name"]) + r"(?![\w.$-])", f"%sm.t{i}", h) for h in hoisted]
        rest = body[end:]
        for match in found:
            if re.search(re.escape(match["name"]) + r"(?![\w.$-])", body[:head] + rest):
                raise TranslateError(f"threadgroup variable {match['name']} is used outside of its kernel")
        return body[:brace] + "\n".join(["", *first, *hoisted]) + code + rest, sites

    def _entry(self, body: str) -> str:
        types = _parameter_types(body, self._info.symbol)
        lines = [
            "define internal void @sm_entry(ptr %b) " + f"#{_OURS} {{",
            "  %buffers = load ptr, ptr %b\n  %tp = getelementptr i8, ptr %b, i64 8\n  %threadgroup = load ptr, ptr %tp",
            "  %place = alloca [3 x i32], align 16",
        ]
        if len(types) != len(self._info.arguments):
            raise MetadataError(f"{len(types)} parameters, but metadata of {len(self._info.arguments)}")
        operands = []
        for i, (argument, type_) in enumerate(zip(self._info.arguments, types, strict=True)):
            if not argument.builtin:
                table = "%threadgroup" if argument.address_space == THREADGROUP_SPACE else "%buffers"
                lines.append(f"  %p{i} = getelementptr ptr, ptr {table}, i64 {argument.index}")
                lines.append(f"  %x{i} = load ptr, ptr %p{i}")
            else:
                lines += _read_builtin(i, argument, type_)
            operands.append(f"{type_} %x{i}")
        lines.append(f"  call void {self._info.symbol}({', '.join(operands)})\n  ret void\n}}")
        used = sorted({a.builtin for a in self._info.arguments if a.builtin})
        lines += [f"declare void @sm_builtin_{b}(ptr)" for b in used]
        lines.append("declare ptr @sm_threadgroup_variable(i32, i32, i32)")
        return "\n".join(lines)

    def _tables(self, name: str, sites: list[tuple[str, int]], defined: set[str]) -> str:
        lines = [SITE, "%sm_argument = type { ptr, i32, i32, i32, i32, i32, i32 }", string_constant("@sm_kn", name)]
        rows = []
        memory = self._memory_arguments()
        for i, a in enumerate(memory):
            lines.append(string_constant(f"@sm_an{i}", a.name))
            kind = int(a.address_space == THREADGROUP_SPACE)
            numbers = (kind, a.index, int(a.is_const), int(a.is_reference), a.element_bytes, a.element_align)
            rows.append(f"%sm_argument {{ ptr @sm_an{i}, {', '.join(f'i32 {n}' for n in numbers)} }}")
        lines.append(f"@sm_arguments = internal global [{len(rows)} x %sm_argument] [{', '.join(rows)}]")
        entries = []
        for i, (type_, align) in enumerate(sites):
            size = f"ptrtoint (ptr getelementptr ({type_}, ptr null, i32 1) to i32)"
            entries.append(f"%sm_site {{ ptr @sm_entry, i32 {i}, i32 {size}, i32 {align}, i32 0 }}")
        lines.append(f"@sm_sites = internal constant [{len(entries)} x %sm_site] [{', '.join(entries)}]")
        limit = self._info.max_total_threads
        row = f"{{ ptr @sm_kn, ptr @sm_entry, ptr @sm_arguments, i32 {len(rows)}, i32 {limit}, i32 0 }}"
        table = library_table([row], self._info.constants, defined, self._checked)
        return "\n".join([*lines, table.replace("@SITES@", str(len(entries)))])

    def _memory_arguments(self) -> list[Argument]:
        return [a for a in self._info.arguments if not a.builtin]

    def _gates(self, initialisers: list[str]) -> str:
        """Returns the module's initializers, and one that marks arguments absent whose function constant is false."""
        lines = [f"define internal void @sm_gates() #{_OURS} {{"]
        for i, a in enumerate(self._memory_arguments()):
            if a.gate:
                kind = int(a.address_space == THREADGROUP_SPACE)
                lines += [
                    f"  %g{i} = load i8, ptr {a.gate}",
                    f"  %z{i} = icmp eq i8 %g{i}, 0",
                    f"  %k{i} = select i1 %z{i}, i32 2, i32 {kind}",
                    f"  %q{i} = getelementptr %sm_argument, ptr @sm_arguments, i64 {i}, i32 1",
                    f"  store i32 %k{i}, ptr %q{i}",
                ]
        lines.append("  ret void\n}")
        calls = [*initialisers, "@sm_gates"]
        rows = ", ".join(f"{{ i32, ptr, ptr }} {{ i32 65535, ptr {c}, ptr null }}" for c in calls)
        lines.append(f"@llvm.global_ctors = appending global [{len(calls)} x {{ i32, ptr, ptr }}] [{rows}]")
        return "\n".join(lines)


_OURS, _OURS_INLINE = 9000, 9001  # numbers of attribute groups that the module itself does not use


def _with_tensor_names(body: str) -> str:
    """Renames the functions of matmul2d like other functions, with operand types at the end."""

    def renamed(match: re.Match[str]) -> str:
        name = re.sub(r"(?:_(?:b?f?\d+|[df]v|tg|i\d+|ui\d+))+$", lambda m: m[0].replace("_", "."), match[1])
        return "@air.tensor_" + name.replace(".b16", ".bf16")

    return re.sub(r"@__tensorops_impl_matmul2d_op_(\w+)", renamed, body)


def _narrowed(body: str) -> str:
    """Replaces <64 x T> with <2 x T>, because a thread holds two elements of a simdgroup's matrix."""

    def shuffle(match: re.Match[str]) -> str:
        lanes = [x.strip().removeprefix("i32 ") for x in match[1].split(",")]
        kept = [{"poison": "poison", "undef": "poison", "0": "0", "1": "1", "64": "2", "65": "3"}.get(x) for x in lanes]
        if any(k is None for k in kept[:2]) or len(lanes) not in (2, 64):
            raise TranslateError(f"a simdgroup matrix is used by more than its thread's two elements: {match[0]}")
        return f"<2 x i32> <{', '.join(f'i32 {k}' if k != 'poison' else 'i32 poison' for k in kept[:2])}>"

    lines = []
    has_structs = re.search(r" = type \{[^\n]*<64 x ", body) is not None
    if has_structs and "@llvm.memcpy" in body:
        raise TranslateError("copies of structures that hold simdgroup matrices are not known to the software device")
    for line in body.split("\n"):
        if has_structs and "@llvm.lifetime." in line:
            continue  # the argument of this call is the size of the full matrix, but a thread holds only two elements
        if "<64 x " in line:
            if re.match(r"\s+(?:%[\w.]+ = load|store) ", line):
                line = re.sub(r", align \d+", "", line)
            if "shufflevector" in line:
                line = re.sub(r"<\d+ x i32> <((?:i32 (?:\d+|poison|undef)(?:, )?)+)>", shuffle, line)
                line = line.replace("<64 x i32> zeroinitializer", "<2 x i32> zeroinitializer")
            line = re.sub(r"(<64 x \w+> <[^,<>]+, [^,<>]+), [^<>]*>", r"\1>", line).replace("<64 x ", "<2 x ")
        lines.append(line)
    return "\n".join(lines)


def _plain(body: str) -> str:
    """Removes features of Metal's targets, and Metal's aliasing rules for buffers."""
    body = re.sub(r"^target (?:datalayout|triple) = .*$", "", body, flags=re.MULTILINE)
    body = re.sub(r"^source_filename = .*$", "", body, flags=re.MULTILINE)
    body = re.sub(r"^@llvm\.(?:compiler\.)?used = .*$", "", body, flags=re.MULTILINE)
    body = re.sub(r", ![\w.]+ !\d+", "", body)
    body = re.sub(r' "air-buffer-no-alias"| externally_initialized', "", body)
    body = re.sub(r', section "air\.fc_initializer"', "", body)
    body = re.sub(r'(define [^\n]*?) section "air\.static_init"', r"\1", body)
    body = body.replace("addrspacecast", "bitcast")
    body = re.sub(r" ?addrspace\(\d+\)", "", body)
    body = re.sub(r"(@llvm\.\w+(?:\.\w+)*?)((?:\.p[123])+)(?=[.(])", lambda m: m[1] + ".p0" * (len(m[2]) // 3), body)
    body = re.sub(r"^(define [^\n]*?)(?: #\d+)?((?: align \d+)?) \{$", rf"\1\2 #{_OURS} {{", body, flags=re.MULTILINE)
    body = re.sub(r"^define weak_odr ", "define internal ", body, flags=re.MULTILINE)
    seen: set[str] = set()
    lines = []
    for line in body.split("\n"):
        if match := re.match(rf"declare [^@]*({_SYMBOL})\(", line):
            if match[1] in seen:
                continue
            seen.add(match[1])
        lines.append(line)
    return "\n".join(lines)


def _find_kernel(body: str, symbol: str) -> tuple[int, int]:
    """Returns the start of the kernel's definition, and the end of the definition's first line."""
    match = re.search(rf"^define [^\n]*?{re.escape(symbol)}\([^\n]*\{{$", body, re.MULTILINE)
    if match is None:
        raise MetadataError(f"the kernel {symbol} has no definition")
    return match.start(), match.end()


def _parameter_types(body: str, symbol: str) -> list[str]:
    start, end = _find_kernel(body, symbol)
    line = body[start:end]
    opening = line.index("(", line.index(symbol))
    return [_bare(p) for p in _commas(line[opening + 1 : line.rindex(")")])]


def _commas(text: str) -> list[str]:
    """Splits at commas outside of brackets."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char in "<([{") - (char in ">)]}")
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    return [*parts, current.strip()] if current.strip() else parts


def _bare(text: str) -> str:
    """Returns the type at the start of a parameter, or after the attributes of a result."""
    match = re.search(r"<\d+ x \w+>|\b(?:void|ptr|half|bfloat|float|i\d+)\b", text)
    if match is None:
        raise TranslateError(f"a value of type {text!r} is not known to the software device")
    return match[0]


def _hoisted(code: str, names: Sequence[str]) -> tuple[str, list[str]]:
    """Converts constant expressions with threadgroup variables to instructions at the kernel's start."""
    hoisted: list[str] = []
    if not names:
        return code, hoisted
    pattern = re.compile("(?:" + "|".join(re.escape(n) for n in names) + r")(?![\w.$-])")
    at = 0
    while match := _EXPRESSION.search(code, at):
        end, depth = match.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        inside = code[match.end() : end - 1]
        if _EXPRESSION.search(inside):
            at = match.end()  # an inner expression first
            continue
        if not pattern.search(inside):
            at = end
            continue
        name = f"%sm.c{len(hoisted)}"
        whole = code[match.start() : end]
        hoisted.append(f"  {name} = {match[0][:-2]} {inside}")
        code = code.replace(whole, name)
        at = 0
    return code, hoisted


def _initialisers(body: str) -> tuple[str, list[str]]:
    match = re.search(r"^@llvm\.global_ctors = .*$", body, re.MULTILINE)
    if match is None:
        return body, []
    return body.replace(match[0], ""), re.findall(rf"i32 65535, ptr ({_SYMBOL})", match[0])


def _read_builtin(i: int, argument: Argument, type_: str) -> list[str]:
    if argument.builtin not in BUILTINS:
        raise MetadataError(f"argument {argument.name!r}: air.{argument.builtin} is not known to the software device")
    lines = [f"  call void @sm_builtin_{argument.builtin}(ptr %place)"]
    element, length = type_, 1
    if match := re.fullmatch(r"<(\d) x (\w+)>", type_):
        element, length = match[2], int(match[1])
    value = "poison"
    for j in range(length):
        lines += [
            f"  %f{i}.{j} = getelementptr i32, ptr %place, i64 {j}",
            f"  %w{i}.{j} = load i32, ptr %f{i}.{j}",
            f"  %n{i}.{j} = " + (f"trunc i32 %w{i}.{j} to {element}" if element != "i32" else f"add i32 %w{i}.{j}, 0"),
        ]
        if length == 1:
            lines.append(f"  %x{i} = add {element} %n{i}.{j}, 0")
        else:
            name = f"%x{i}" if j + 1 == length else f"%v{i}.{j}"
            lines.append(f"  {name} = insertelement {type_} {value}, {element} %n{i}.{j}, i32 {j}")
            value = name
    return lines
