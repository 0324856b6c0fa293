"""Apple's SDK as data: what PyObjC's macOS wheels record of Metal and Foundation.

Two records are read, without running any of their code: the protocols compiled into `_Metal.cpython-311-darwin.so`
(selectors with full type encodings), and the calls in `_metadata.py` (argument types by selector, enum values, names
of constants).
"""

from __future__ import annotations

import ast
import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .macho import MachO, Protocol

CACHE = Path(__file__).resolve().parents[2] / "build" / "softmetal" / "apple-metadata"


@dataclass(frozen=True)
class Wheel:
    """A pinned macOS wheel, the framework it describes, and its binary with protocols (if it has one)."""

    package: str
    version: str
    file_name: str
    sha256: str
    framework: str


WHEELS = (
    Wheel(
        "pyobjc-framework-Metal",
        "12.2.2",
        "pyobjc_framework_metal-12.2.2-cp311-cp311-macosx_10_9_universal2.whl",
        "9e56862fd12eb3d3da429f15d6721f966d5791e27419ea0fa08f5f3dd0981fe8",
        "Metal",
    ),
    Wheel(
        "pyobjc-framework-Cocoa",
        "12.2.2",
        "pyobjc_framework_cocoa-12.2.2-cp311-cp311-macosx_10_9_universal2.whl",
        "851dca4c16e70b405e5cd5a8c166cf7c445ae54a4cdd95ce9a523803172f32d1",
        "Foundation",
    ),
)


class MetadataUnavailable(RuntimeError):
    """A wheel is not in the cache and could not be fetched."""


@dataclass
class Registration:
    """One `registerMetaDataForSelector` call: types by position (`None` key: the result), None where not recorded."""

    owner: str  # a class, or NSObject for methods of protocols
    selector: str
    types: dict[int | None, str]
    is_complete: bool  # a method of a protocol: every type is recorded


@dataclass
class Metadata:
    """Everything that the wheels say, by name."""

    protocols: dict[str, Protocol] = field(default_factory=dict)
    registrations: dict[str, list[Registration]] = field(default_factory=dict)
    enums: dict[str, int] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)


def fetch(wheel: Wheel, cache: Path = CACHE) -> Path:
    """The wheel's file, from the cache or by pip.

    Raises:
        MetadataUnavailable: it is not cached and pip cannot get it.
        ValueError: the file is not the pinned one.
    """
    path = cache / wheel.file_name
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp"]
        command = [sys.executable, "-m", "pip", "download", *options, "--platform", "macosx_10_9_universal2"]
        done = subprocess.run(
            [*command, "--dest", str(cache), f"{wheel.package}=={wheel.version}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0 or not path.exists():
            raise MetadataUnavailable(
                f"{wheel.package} {wheel.version} cannot be fetched: {done.stderr.strip()[-300:]}"
            )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != wheel.sha256:
        raise ValueError(f"{path.name}: expected sha256 {wheel.sha256}, got {found}")
    return path


def load(cache: Path = CACHE) -> Metadata:
    """Metadata of all pinned wheels. Raises as `fetch` does."""
    metadata = Metadata()
    for wheel in WHEELS:
        path = fetch(wheel, cache)
        binary = f"{wheel.framework}/_{wheel.framework}.cpython-311-darwin.so"
        with zipfile.ZipFile(path) as archive:
            unpacked = Path(archive.extract(binary, cache / wheel.framework))
            source = archive.read(f"{wheel.framework}/_metadata.py").decode()
        for name, protocol in MachO(unpacked, "arm64").protocols().items():
            metadata.protocols.setdefault(name, protocol)
        _read_source(source, metadata)
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
    """A literal in which `sel32or64(a, b)` is b and `selAorI(a, b)` is a, as on a 64-bit Apple-silicon Mac."""
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
    return Registration(owner, selector, types, is_complete=bool(record.get("required", "required" in record)))
