"""Reads Apple's SDK metadata for Metal and Foundation from PyObjC's macOS wheels.

It reads two files of each wheel and runs none of their code. `_Metal.cpython-311-darwin.so` contains the protocols,
with full type encodings for each selector. `_metadata.py` contains argument types by selector, enum values, and the
names of constants.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

from . import wheels
from .macho import MachO, Protocol

FRAMEWORKS = {"Metal": "pyobjc-metal", "Foundation": "pyobjc-cocoa"}  # framework: the wheel that describes it


@dataclass
class Registration:
    """One `registerMetaDataForSelector` call.

    `types` maps argument positions to types, as far as known. The key None stands for the result.
    """

    owner: str  # a class, or NSObject for methods of protocols
    selector: str
    types: dict[int | None, str]


@dataclass
class Metadata:
    """The metadata of all wheels. Each field is indexed by name."""

    protocols: dict[str, Protocol] = field(default_factory=dict)
    registrations: dict[str, list[Registration]] = field(default_factory=dict)
    enums: dict[str, int] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)


def load() -> Metadata:
    """Loads the metadata of all frameworks.

    Raises:
        WheelUnavailable: a wheel is not in the cache and cannot be fetched, or it is not the pinned one.
    """
    metadata = Metadata()
    for framework, wheel in FRAMEWORKS.items():
        folder = wheels.unpack(wheel) / framework
        binary = MachO(folder / f"_{framework}.cpython-311-darwin.so")
        for name, protocol in binary.protocols().items():
            metadata.protocols.setdefault(name, protocol)
        _read_source((folder / "_metadata.py").read_text(), metadata)
    return metadata


def _read_source(source: str, metadata: Metadata) -> None:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("enums", "constants") and isinstance(node.value, ast.Constant):
                _read_table(name, str(node.value.value), metadata)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "r":
            owner, selector, record = (_literal(argument) for argument in node.args)
            registration = _registration(owner.decode(), selector.decode(), record)
            metadata.registrations.setdefault(registration.selector, []).append(registration)


def _read_table(name: str, text: str, metadata: Metadata) -> None:
    for entry in filter(None, text.split("$")):
        key, _, value = entry.partition("@")
        if name == "constants":
            metadata.constants.add(key)
        elif value.lstrip("-").isdigit():
            metadata.enums[key] = int(value)


def _literal(node: ast.expr) -> Any:
    """Evaluates a literal. As on 64-bit Apple silicon, `sel32or64(a, b)` is b and `selAorI(a, b)` is a."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _literal(node.args[1 if node.func.id == "sel32or64" else 0])
    if isinstance(node, ast.Dict):
        return {_literal(k): _literal(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    return ast.literal_eval(node)


def _registration(owner: str, selector: str, record: dict[str, Any]) -> Registration:
    types: dict[int | None, str] = {}
    for position, entry in [(None, record.get("retval", {})), *record.get("arguments", {}).items()]:
        kind = entry.get("type")
        if kind is not None:
            types[position] = kind.decode() if isinstance(kind, bytes) else kind
    return Registration(owner, selector, types)
