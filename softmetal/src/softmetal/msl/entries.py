"""Writes the text that the translation adds for the executor: one entry for each kernel, and the tables of the
entries.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .attributes import Parameter, placed_indices

_SIGNED = ("bool", "char", "short", "int", "long", "int8_t", "int16_t", "int32_t", "int64_t")
_INTEGERS = {*_SIGNED, "uchar", "ushort", "uint", "ulong", *(f"u{t}" for t in _SIGNED if t.endswith("_t"))}


@dataclass(slots=True)
class KernelSignature:
    """A kernel as the source defines it."""

    parameters: list[Parameter]


@dataclass(slots=True)
class FunctionConstant:
    """A declaration `constant T name [[function_constant(index)]];`."""

    name: str
    type: str
    index: int
    value: str | None  # C text, or None if the constant has no value
    number: int  # position of the constant in the order of the source

    @property
    def is_defined(self) -> bool:
        return self.value is not None

    @property
    def is_late(self) -> bool:
        """Whether the value is inserted into the LLVM text (llvm/specialise.py), not into the C++ text."""
        literal = r"true|false|[-+]?(?:0|[1-9]\d*)[uUlL]*"
        return self.type in _INTEGERS and self.value is not None and re.fullmatch(literal, self.value) is not None

    def definition(self) -> str:
        """Returns the C++ text that replaces the declaration."""
        if self.value is None:
            return f'static const sm::UndefinedConstant<{self.type}> {self.name}{{"{self.name}"}}'
        if self.is_late:
            return f'extern const {self.type} {self.name} __asm__("sm_constant_{self.number}")'
        arguments = self.value.strip("{}").replace("inf", "__builtin_inf()").replace("nan", '__builtin_nan("")')
        return f"static const {self.type} {self.name} = sm::constant_value<{self.type}>({arguments})"


@dataclass(slots=True)
class Entry:
    """A kernel that can be launched, which is a function or an instance of a template."""

    number: int
    host_name: str
    function: str  # "f" or "f<half, 4>", as the entry calls it
    kernel: KernelSignature
    limit: str  # largest number of threads of a threadgroup, as a constant expression
    path: str  # the namespace of the entry, in the form "ns::"
    has_code: bool

    def text(self) -> str:
        """Returns the C function that calls the kernel, and the table of the kernel's arguments."""
        n, function = self.number, self.function
        parts = []
        if self.has_code:
            call = ", ".join([f"&{function}", *(_source(p) for p in self.kernel.parameters)])
            parts.append(f"static void sm_entry_{n}(const sm_bindings* sm_b) {{ sm::Call<{call}>::run(sm_b); }}")
        parts.append(f"static const unsigned sm_limit_{n} = {self.limit};")
        for source in ("buffer", "threadgroup"):
            indices = ", ".join(placed_indices([p for p in self.kernel.parameters if not p.gate], source))
            message = f"{self.host_name}: two arguments have the same {source} index"
            parts.append(f'static_assert(sm::are_distinct<{indices}>(), "{message}");')
        if rows := self._arguments():
            parts.append(f"static const sm_argument sm_arguments_{n}[] = {{{', '.join(rows)}}};")
        return " " + " ".join(parts)

    def row(self) -> str:
        """Returns the kernel's line in the library's table."""
        n, count = self.number, len(self._arguments())
        entry = f"{self.path}sm_entry_{n}" if self.has_code else "nullptr"
        arguments = f"{self.path}sm_arguments_{n}" if count else "nullptr"
        return f'{{"{self.host_name}", {entry}, {arguments}, {count}, {self.path}sm_limit_{n}, 0}}'

    def _arguments(self) -> list[str]:
        rows = []
        for i, p in enumerate(self.kernel.parameters):
            if p.source not in ("buffer", "threadgroup"):
                continue
            kind = f"SM_ARGUMENT_{p.source.upper()}"
            if p.gate:
                kind = f"({p.gate}) ? {kind} : SM_ARGUMENT_ABSENT"
            is_constant = "true" if p.is_constant else "false"
            rows.append(f'sm::argument<decltype(&{self.function}), {i}>("{p.name}", {kind}, {p.index}, {is_constant})')
        return rows


def _source(parameter: Parameter) -> str:
    if parameter.source in ("buffer", "threadgroup"):
        return f"sm::{parameter.source.capitalize()}<{parameter.index}>"
    return f"sm::Builtin<sm::{parameter.source}>"


def tables(entries: Sequence[Entry], constants: Sequence[FunctionConstant]) -> str:
    """Returns the end of the file: the tables that the library exports."""
    rows = [f'{{"{c.name}", "{c.type}", {c.index}, {int(c.is_defined)}}}' for c in constants]
    return (
        "\n#pragma clang attribute pop\n"
        f"static const sm_kernel sm_kernels[] = {{{', '.join([*(e.row() for e in entries), '{}'])}}};\n"
        f"static const sm_function_constant sm_constants[] = {{{', '.join([*rows, '{}'])}}};\n"
        f"SM_TABLE({len(entries)}, {len(constants)})\n"
    )
