"""Reads Metal libraries. A metallib contains functions, each as a module of LLVM bitcode.

Apple does not document the layout. This reader supports the layout of the libraries in public wheels (MLX 0.32.4,
PyTorch 2.13.0).
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"MTLB"
BITCODE_WRAPPER = 0x0B17C0DE
_HEADER = struct.Struct("<4s3H2B2HQ8Q")


class MetallibError(ValueError):
    """The data are no metallib, or have an unknown form."""


@dataclass(frozen=True)
class Function:
    """A function of the library: its name, and the place and hash of its bitcode."""

    name: str
    offset: int
    size: int
    sha256: bytes


class Metallib:
    """A library in memory.

    Args:
        data: the whole file.
        where: the library's name in error messages.

    Attributes:
        functions: by name.

    Raises:
        MetallibError: `data` is not a metallib, or the metallib is incomplete.
    """

    def __init__(self, data: bytes | memoryview, where: str = "metallib") -> None:
        self._data = memoryview(data)
        self._where = where
        if len(data) < _HEADER.size or bytes(self._data[:4]) != MAGIC:
            raise MetallibError(f"{where}: expected a metallib, got {len(data)} bytes that begin {bytes(data[:4])!r}")
        header = _HEADER.unpack_from(self._data)
        self.size = header[8]
        (listed, list_size), _, _, (self._bitcode, _) = (header[9 + i : 11 + i] for i in range(0, 8, 2))
        if self.size > len(data):
            raise MetallibError(f"{where}: expected {self.size} bytes, got {len(data)}")
        try:
            functions = list(self._read(listed, list_size))
        except (struct.error, UnicodeDecodeError, KeyError) as error:
            raise MetallibError(f"{where}: its function list cannot be read: {error!r}") from error
        self.functions = {f.name: f for f in functions}

    def bitcode(self, name: str) -> bytes:
        """Returns the bitcode module of one function.

        Raises:
            KeyError: there is no such function.
            MetallibError: the bytes do not have the hash that the library states, or are not LLVM bitcode.
        """
        if name not in self.functions:
            raise KeyError(f"{self._where}: no function {name!r} among {len(self.functions)}")
        function = self.functions[name]
        code = bytes(self._data[function.offset : function.offset + function.size])
        if hashlib.sha256(code).digest() != function.sha256:
            raise MetallibError(f"{self._where}: the bitcode of {name!r} does not have its listed SHA-256")
        if int.from_bytes(code[:4], "little") != BITCODE_WRAPPER:
            raise MetallibError(f"{self._where}: {name!r} is no LLVM bitcode: it begins {code[:4].hex()}")
        return code

    def _read(self, start: int, size: int) -> Iterator[Function]:
        (count,) = struct.unpack_from("<I", self._data, start)
        at, end = start + 4, start + 4 + size  # the size does not include the count
        for _ in range(count):
            (entry,) = struct.unpack_from("<I", self._data, at)
            yield self._function(dict(self._tags(at + 4, min(at + entry, end))))
            at += entry

    def _tags(self, at: int, end: int) -> Iterator[tuple[str, bytes]]:
        while at + 4 <= end and (tag := bytes(self._data[at : at + 4]).decode("ascii")) != "ENDT":
            (length,) = struct.unpack_from("<H", self._data, at + 4)
            yield tag, bytes(self._data[at + 6 : at + 6 + length])
            at += 6 + length

    def _function(self, tags: dict[str, bytes]) -> Function:
        return Function(
            name=tags["NAME"].rstrip(b"\0").decode(),
            offset=self._bitcode + struct.unpack("<3Q", tags["OFFT"])[2],
            size=int.from_bytes(tags["MDSZ"], "little"),
            sha256=tags["HASH"],
        )


@functools.lru_cache(maxsize=4)
def _open(path: Path, stamp: tuple[int, int]) -> Metallib:
    return Metallib(path.read_bytes(), str(path))


def open_metallib(path: str | Path) -> Metallib:
    """Reads the library in a file. If the file is unchanged, a second call does not read it again.

    Raises:
        OSError: the file cannot be read.
        MetallibError: the file is not a metallib.
    """
    status = Path(path).stat()
    return _open(Path(path).resolve(), (status.st_mtime_ns, status.st_size))
