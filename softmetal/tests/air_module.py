"""Makes metallibs from LLVM text, to test the loader without Apple's files."""

from __future__ import annotations

import hashlib
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

_WRAPPER = struct.Struct("<5I")


def bitcode(text: str) -> bytes:
    """Assembles a module and adds the header that metallibs have before their bitcode."""
    code = subprocess.run(["llvm-as-19", "-o", "-"], input=text.encode(), capture_output=True, check=True).stdout
    return _WRAPPER.pack(0x0B17C0DE, 0, _WRAPPER.size, len(code), 0xFFFFFFFF) + code


def _tag(name: str, data: bytes) -> bytes:
    return name.encode() + struct.pack("<H", len(data)) + data


def metallib(modules: Mapping[str, str]) -> bytes:
    """Makes a metallib. `modules` maps the name of each kernel to its LLVM text."""
    entries, codes = b"", b""
    for name, text in modules.items():
        code = bitcode(text)
        tags = _tag("NAME", name.encode() + b"\0") + _tag("TYPE", b"\2") + _tag("HASH", hashlib.sha256(code).digest())
        tags += _tag("MDSZ", struct.pack("<Q", len(code))) + _tag("OFFT", struct.pack("<3Q", 0, 0, len(codes)))
        tags += _tag("VERS", struct.pack("<4H", 2, 6, 3, 1)) + b"ENDT"
        entries += struct.pack("<I", len(tags) + 4) + tags
        codes += code
    start = 88
    after = start + 4 + len(entries) + 4
    sections = (start, len(entries), after, 0, after, 0, after, len(codes))
    header = struct.pack("<4s3H2B2HQ8Q", b"MTLB", 0x8001, 2, 7, 0, 0x81, 14, 0, after + len(codes), *sections)
    return header + struct.pack("<I", len(modules)) + entries + b"ENDT" + codes


def buffer(position: int, name: str, index: int, *, space: int = 1, access: str = "read_write", gate: str = "") -> str:
    """Returns the metadata of a float buffer. `gate` is the metadata node of the function constant that enables it."""
    gated = f'!"air.function_constant", {gate}, ' if gate else ""
    return (
        f'!{{i32 {position}, {gated}!"air.buffer", !"air.location_index", i32 {index}, i32 1, !"air.{access}", '
        f'!"air.address_space", i32 {space}, !"air.arg_type_size", i32 4, !"air.arg_type_align_size", i32 4, '
        f'!"air.arg_type_name", !"float", !"air.arg_name", !"{name}"}}'
    )


def builtin(position: int, name: str) -> str:
    return f'!{{i32 {position}, !"air.{name}", !"air.arg_type_name", !"uint", !"air.arg_name", !"i"}}'


def save(folder: Path, modules: Mapping[str, str]) -> Path:
    path = folder / "kernels.metallib"
    path.write_bytes(metallib(modules))
    return path
