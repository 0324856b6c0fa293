"""Reads a module's metadata: the kernel's arguments, thread limit and function constants."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

# One operand of a metadata node: text, a number, a reference to a node, or a global.
Operand = str | int | bool | None
_NODE = re.compile(r"^!(\d+) = (?:distinct )?!\{(.*)\}$", re.MULTILINE)
_NAMED = re.compile(r"^!([a-z][\w.]*) = !\{(.*)\}$", re.MULTILINE)
_OPERAND = re.compile(
    r'!"(?P<text>(?:[^"\\]|\\[0-9A-Fa-f]{2})*)"|!(?P<node>\d+)|i1 (?P<flag>true|false)|i\d+ (?P<number>-?\d+)|'
    r'ptr (?:addrspace\(\d+\) )?(?P<global>@(?:"[^"]*"|[\w.$-]+))|(?P<null>null)'
)
THREADGROUP_SPACE = 3


class MetadataError(ValueError):
    """The metadata have a form that this reader does not support."""


@dataclass(frozen=True)
class Argument:
    """A parameter of the kernel: a buffer, threadgroup memory, or a position."""

    position: int
    name: str
    builtin: str  # "thread_position_in_grid", or "" for memory
    index: int = -1
    address_space: int = 0
    is_const: bool = False
    is_reference: bool = False
    element_bytes: int = 1
    element_align: int = 1
    gate: str = ""  # the global that is true if the argument exists, or ""


@dataclass(frozen=True)
class Constant:
    """A function constant, and the global variable that holds its value."""

    symbol: str
    type: str
    name: str
    index: int


@dataclass(frozen=True)
class KernelInfo:
    """The kernel of a module."""

    symbol: str
    arguments: tuple[Argument, ...]
    max_total_threads: int  # 0: not given
    constants: tuple[Constant, ...]


class _Nodes:
    def __init__(self, text: str) -> None:
        self._text = dict(_NODE.findall(text))
        self._named = dict(_NAMED.findall(text))

    def named(self, name: str) -> list[list[Operand]]:
        return [self.node(n) for n in re.findall(r"!(\d+)", self._named.get(name, ""))]

    def node(self, number: str | int) -> list[Operand]:
        return list(_operands(self._text[str(number)]))


def _operands(text: str) -> Iterator[Operand]:
    for match in _OPERAND.finditer(text):
        if match["text"] is not None:
            yield re.sub(r"\\([0-9A-Fa-f]{2})", lambda m: chr(int(m[1], 16)), match["text"])
        elif match["node"] is not None:
            yield f"!{match['node']}"
        elif match["flag"] is not None:
            yield match["flag"] == "true"
        elif match["number"] is not None:
            yield int(match["number"])
        else:
            yield match["global"]


def read_metadata(text: str) -> KernelInfo:
    """Reads the metadata of a module in LLVM's text form.

    Raises:
        MetadataError: the module does not have exactly one kernel, or the kind of an argument is unknown.
    """
    nodes = _Nodes(text)
    kernels = nodes.named("air.kernel")
    if len(kernels) != 1:
        raise MetadataError(f"expected a module with one kernel, got {len(kernels)}")
    symbol, _, arguments, *properties = kernels[0]
    limit = 0
    for reference in properties:
        name, *values = nodes.node(str(reference).removeprefix("!"))
        if name == "air.max_work_group_size":
            limit = _integer(values[0])
    listed = [nodes.node(r.removeprefix("!")) for r in nodes.node(str(arguments)[1:]) if isinstance(r, str)]
    return KernelInfo(
        symbol=str(symbol),
        arguments=tuple(_argument(a, nodes) for a in listed),
        max_total_threads=limit,
        constants=tuple(
            Constant(str(g), str(kind), str(name), _integer(index))
            for g, kind, name, index, *_ in nodes.named("air.function_constants")
        ),
    )


def _integer(value: Operand) -> int:
    if not isinstance(value, int):
        raise MetadataError(f"expected a number, got {value!r}")
    return value


def _argument(operands: list[Operand], nodes: _Nodes) -> Argument:
    position, *rest = operands
    gate = ""
    if rest and rest[0] == "air.function_constant":
        gate = str(nodes.node(str(rest[1])[1:])[0])
        rest = rest[2:]
    kind = str(rest[0])
    values: dict[str, Operand] = {str(k): v for k, v in itertools.pairwise(rest) if isinstance(k, str)}
    name = str(values.get("air.arg_name", ""))
    if kind == "air.buffer":
        return Argument(
            position=_integer(position),
            name=name,
            builtin="",
            index=_integer(values["air.location_index"]),
            address_space=_integer(values["air.address_space"]),
            is_const="air.read" in rest,
            is_reference="air.buffer_size" in rest,
            element_bytes=_integer(values.get("air.arg_type_size", 1)),  # absent: void
            element_align=_integer(values.get("air.arg_type_align_size", 1)),
            gate=gate,
        )
    if not kind.startswith("air.") or gate:
        raise MetadataError(f"argument {name!r}: {kind} is not known to the software device")
    return Argument(position=_integer(position), name=name, builtin=kind.removeprefix("air."))
