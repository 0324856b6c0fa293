"""Reads the Objective-C metadata of 64-bit Mach-O files, both images and relocatable objects.

Reads the data for `api_check`: protocols with their methods and type encodings, sent selectors, and referenced classes.
Layouts: Apple's open-source objc4 (`objc-runtime-new.h`) and cctools (`mach-o/loader.h`, `mach-o/reloc.h`,
`mach-o/fixup-chains.h`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FAT_MAGIC, FAT_MAGIC_64, MACHO_MAGIC_64 = 0xCAFEBABE, 0xCAFEBABF, 0xFEEDFACF
CPU_TYPE_ARM64 = 0x0100000C
LC_SYMTAB, LC_SEGMENT_64, LC_DYLD_CHAINED_FIXUPS = 0x2, 0x19, 0x80000034
MH_OBJECT = 1
N_EXT, N_TYPE, N_UNDF = 0x01, 0x0E, 0x00
RELATIVE_METHODS_FLAG = 0x80000000  # flag in the entsize of a method list: entries are 32-bit relative offsets


class MachOError(ValueError):
    """A file is not a Mach-O file for arm64, or needs a feature that this reader lacks."""


@dataclass(frozen=True)
class Method:
    """One method of a protocol: its selector and its Objective-C type encoding, including stack offsets."""

    selector: str
    types: str
    is_class_method: bool


@dataclass
class Protocol:
    """A protocol's methods by (selector, is_class_method), and the names of the protocols that it adopts."""

    name: str
    adopts: list[str] = field(default_factory=list)
    methods: dict[tuple[str, bool], Method] = field(default_factory=dict)


@dataclass(frozen=True)
class _Section:
    segment: str
    name: str
    address: int
    size: int
    offset: int
    relocation_offset: int
    relocation_count: int


class MachO:
    """The arm64 code of a Mach-O file.

    Args:
        path: an image (dylib, bundle; fat or thin) or a relocatable object.

    Raises:
        MachOError: the file holds no arm64 code.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _thin(path.read_bytes(), path)
        self._sections: list[_Section] = []
        self._segments: list[tuple[int, int, int]] = []  # address, size, file offset
        self._pointers: dict[int, int] = {}  # address of each pointer that a relocation sets -> value of the pointer
        self._external: dict[int, str] = {}  # address of each pointer to an external symbol -> name of the symbol
        self._symbols: list[tuple[str, int, int]] = []  # name, type, value
        filetype, self._chained = self._read_load_commands()
        if filetype == MH_OBJECT:
            self._apply_relocations()

    def section(self, name: str) -> bytes:
        """Returns the contents of a section.

        Raises:
            MachOError: the file has no section with that name.
        """
        for section in self._sections:
            if section.name == name:
                return self._data[section.offset : section.offset + section.size]
        raise MachOError(f"{self.path}: no section {name}")

    def _read_load_commands(self) -> tuple[int, bool]:
        magic, _, _, filetype, count = struct.unpack_from("<5I", self._data)
        if magic != MACHO_MAGIC_64:
            raise MachOError(f"{self.path}: expected a 64-bit Mach-O file, got magic {magic:#x}")
        offset, chained = 32, False
        for _ in range(count):
            command, size = struct.unpack_from("<2I", self._data, offset)
            if command == LC_SEGMENT_64:
                self._read_segment(offset)
            elif command == LC_SYMTAB:
                self._read_symbols(offset)
            chained |= command == LC_DYLD_CHAINED_FIXUPS
            offset += size
        return filetype, chained

    def _read_segment(self, offset: int) -> None:
        address, size, file_offset, file_size, _, _, sections = struct.unpack_from("<4Q2iI", self._data, offset + 24)
        self._segments.append((address, min(size, file_size), file_offset))
        for i in range(sections):
            at = offset + 72 + 80 * i
            name, segment, start, length, where, _, rel, rel_count = struct.unpack_from("<16s16s2Q4I", self._data, at)
            self._sections.append(_Section(_name(segment), _name(name), start, length, where, rel, rel_count))

    def _read_symbols(self, offset: int) -> None:
        table, count, strings, _ = struct.unpack_from("<4I", self._data, offset + 8)
        for i in range(count):
            string, kind, _, _, value = struct.unpack_from("<IBBHQ", self._data, table + 16 * i)
            end = self._data.index(b"\0", strings + string)
            self._symbols.append((self._data[strings + string : end].decode(), kind, value))

    def _apply_relocations(self) -> None:
        """Applies the pointer-sized absolute relocations of an object, which have type 0."""
        for section in self._sections:
            for i in range(section.relocation_count):
                where, word = struct.unpack_from("<iI", self._data, section.relocation_offset + 8 * i)
                symbol, length, external, kind = word & 0xFFFFFF, word >> 25 & 3, word >> 27 & 1, word >> 28
                if kind != 0 or length != 3:
                    continue
                at = section.address + where
                addend = struct.unpack_from("<q", self._data, section.offset + where)[0]
                if not external:
                    self._pointers[at] = addend
                    continue
                name, symbol_kind, value = self._symbols[symbol]
                if symbol_kind & N_TYPE == N_UNDF:
                    self._external[at] = name
                else:
                    self._pointers[at] = value + addend

    def _offset(self, address: int) -> int:
        for start, size, file_offset in self._segments:
            if start <= address < start + size:
                return file_offset + address - start
        raise MachOError(f"{self.path}: address {address:#x} lies in no segment")

    def _pointer(self, address: int) -> int:
        if address in self._pointers:
            return self._pointers[address]
        if address in self._external:
            return 0
        value: int = struct.unpack_from("<Q", self._data, self._offset(address))[0]
        if self._chained and value >> 63 == 0:
            return value & 0xFFFFFFFFF  # dyld_chained_ptr_64_rebase: 36 bits of target
        return 0 if self._chained else value

    def _string(self, address: int) -> str:
        start = self._offset(address)
        return self._data[start : self._data.index(b"\0", start)].decode()

    def _pointers_of(self, section_name: str) -> Iterator[int]:
        for section in self._sections:
            if section.name == section_name:
                yield from range(section.address, section.address + section.size, 8)

    def protocols(self) -> dict[str, Protocol]:
        """Returns every protocol that the file defines, by name."""
        found = {}
        for at in self._pointers_of("__objc_protolist"):
            protocol = self._protocol(self._pointer(at))
            found[protocol.name] = protocol
        return found

    def _protocol(self, address: int) -> Protocol:
        _, name, adopted, *lists = (self._pointer(address + 8 * i) for i in range(7))
        protocol = Protocol(self._string(name))
        if adopted:
            count = self._pointer(adopted)
            for i in range(count):
                protocol.adopts.append(self._string(self._pointer(self._pointer(adopted + 8 + 8 * i) + 8)))
        for which, methods in enumerate(lists):
            if methods:
                for selector, types in self._methods(methods):
                    method = Method(selector, types, is_class_method=bool(which & 1))
                    protocol.methods[selector, method.is_class_method] = method
        return protocol

    def _methods(self, address: int) -> Iterator[tuple[str, str]]:
        entry_size, count = struct.unpack_from("<2I", self._data, self._offset(address))
        if entry_size & RELATIVE_METHODS_FLAG:
            for i in range(count):
                at = address + 8 + 12 * i
                name, types, _ = struct.unpack_from("<3i", self._data, self._offset(at))
                yield self._string(self._pointer(at + name)), self._string(at + 4 + types)
        else:
            for i in range(count):
                at = address + 8 + (entry_size & 0xFFFC) * i
                yield self._string(self._pointer(at)), self._string(self._pointer(at + 8))

    def sent_selectors(self) -> set[str]:
        """Returns every selector that the file's code sends or names with `@selector`."""
        return {self._string(self._pointer(at)) for at in self._pointers_of("__objc_selrefs")}

    def integers(self, section_name: str) -> list[int]:
        """Returns the contents of a section as signed 64-bit integers."""
        found: list[int] = []
        for section in self._sections:
            if section.name == section_name:
                found += struct.unpack_from(f"<{section.size // 8}q", self._data, section.offset)
        return found

    def class_references(self) -> set[str]:
        """Returns the names of the Objective-C classes that the file uses but does not define."""
        prefix = "_OBJC_CLASS_$_"
        return {name.removeprefix(prefix) for name in self.undefined_symbols() if name.startswith(prefix)}

    def undefined_symbols(self) -> set[str]:
        """Returns the names of the symbols that the file uses but does not define."""
        return {name for name, kind, _ in self._symbols if kind & N_EXT and kind & N_TYPE == N_UNDF}


def _name(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode()


def _thin(data: bytes, path: Path) -> bytes:
    """Returns the arm64 slice of a fat file, or a thin file unchanged."""
    if len(data) < 32:
        raise MachOError(f"{path}: expected a Mach-O file, got {len(data)} bytes")
    magic, count = struct.unpack_from(">2I", data)
    if magic in (FAT_MAGIC, FAT_MAGIC_64):
        entry = ">2I2Q2I" if magic == FAT_MAGIC_64 else ">5I"
        for i in range(count):
            kind, _, offset, size, *_ = struct.unpack_from(entry, data, 8 + struct.calcsize(entry) * i)
            if kind == CPU_TYPE_ARM64:
                return data[offset : offset + size]
    elif struct.unpack_from("<2I", data) == (MACHO_MAGIC_64, CPU_TYPE_ARM64):
        return data
    raise MachOError(f"{path}: holds no code for processor type {CPU_TYPE_ARM64:#x}")
