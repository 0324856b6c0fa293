"""Compares our declarations and calls of the Metal API with Apple's SDK metadata (`api_metadata`).

The compiler compiles our headers for arm64 macOS. One Mach-O reader then reads the selectors, encodings and enum values
in our object file and in Apple's binary.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..build import COMPILER, RUNTIME
from .api_metadata import Metadata, Registration, load
from .macho import MachO, Method, Protocol

INCLUDE = RUNTIME / "include"
HEADERS = ("Foundation/Foundation.h", "Metal/Metal.h")
# Selectors in Apple's documentation of frameworks whose metadata this check does not read.
OTHER_FRAMEWORKS = {"rootCommandBuffer"}  # MPSCommandBuffer, MetalPerformanceShaders
# An object file lists the methods of protocols, but not those of a class that it only declares. Each @interface is
# therefore compiled as a protocol whose name has this prefix.
INTERFACE_PREFIX = "Interface_"

# The declarations of Apple's <objc/objc.h>, for a compile without an SDK.
_OBJC_H = """#pragma once
#include <stdbool.h>
typedef bool BOOL;
#define YES __objc_yes
#define NO __objc_no
#define nil ((id)0)
#define Nil ((Class)0)
"""


@dataclass
class Declarations:
    """The declarations of headers: protocols, classes (as protocols), enum values and exported constants."""

    protocols: dict[str, Protocol] = field(default_factory=dict)
    enums: dict[str, int] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)

    def selectors(self) -> set[str]:
        """Returns all selectors that any protocol or class declares."""
        return {selector for protocol in self.protocols.values() for selector, _ in protocol.methods}


@dataclass
class Report:
    """The result of a comparison: contradictions, and declarations that the metadata does not cover."""

    problems: list[str] = field(default_factory=list)
    unverified: set[str] = field(default_factory=set)


def declarations(include: Path = INCLUDE, headers: Sequence[str] = HEADERS) -> Declarations:
    """Compiles the headers for arm64 macOS and reads their declarations.

    Raises:
        RuntimeError: the headers do not compile.
    """
    text = "".join((include / header).read_text() for header in headers)
    interfaces = re.findall(r"^@interface\s+(\w+)[^\n{]*(?:\{[^}]*\})?(.*?)^@end", text, re.S | re.M)
    names = sorted(set(re.findall(r"^@protocol\s+(\w+)[^;\n]*$", text, re.M)))
    enums = [
        name
        for body in re.findall(r"(?:NS_ENUM|NS_OPTIONS)\([^)]*\)\s*\{([^}]*)\}|\benum \{([^}]*)\}", text)
        for name in re.findall(r"^\s*(\w+)\s*=", body[0] or body[1].replace(",", "\n"), re.M)
    ]
    if len(names) + len(interfaces) != len(re.findall("^@end", text, re.M)):
        raise RuntimeError("softmetal.apple.api_check: cannot read all declarations of the stand-in headers")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "objc").mkdir()
        (root / "objc" / "objc.h").write_text(_OBJC_H)
        source = "".join(f"#include <{header}>\n" for header in headers)
        for name, body in interfaces:
            body = re.sub(r"\b(ObjectType|KeyType|instancetype)\b(<\w+>)?", "id", body)
            source += f"@protocol {INTERFACE_PREFIX}{name}\n{body}@end\n"
        listed = [*names, *(INTERFACE_PREFIX + name for name, _ in interfaces)]
        source += "void* protocols(int i) {\n" + "".join(
            f"  if (i == {i}) return (__bridge void*)@protocol({name});\n" for i, name in enumerate(listed)
        )
        source += "  return 0;\n}\n"
        source += '__attribute__((used, section("__DATA,__enums"))) const long long enums[] = {0'
        source += "".join(f", (long long){name}" for name in enums) + "};\n"
        (root / "headers.m").write_text(source)
        compiled = MachO(compile_for_mac(root / "headers.m", root / "headers.o", [f"-I{root}", f"-I{include}"]))
        values = compiled.integers("__enums")[1:]
        found = compiled.protocols()
    constants = set(re.findall(r"^FOUNDATION_EXPORT [^;()]*?(\w+);", text, re.M))
    return Declarations(found, dict(zip(enums, values, strict=True)), constants)


def compile_for_mac(source: Path, target: Path, flags: Sequence[str]) -> Path:
    """Compiles Objective-C to an arm64 macOS object, without an SDK.

    Raises:
        RuntimeError: the source does not compile.
    """
    command = [COMPILER, "-x", "objective-c", "-target", "arm64-apple-macos14", "-fobjc-runtime=macosx-14.0"]
    command += ["-ffreestanding", "-nostdlibinc", "-fblocks", "-Wno-everything", *flags]
    command += ["-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{source.name} does not compile for macOS:\n{done.stderr}")
    return target


def check_declarations(declared: Declarations, apple: Metadata) -> Report:
    """Compares every declared protocol method, class method, enum value and constant with Apple's."""
    report = Report()
    for protocol in declared.protocols.values():
        for method in protocol.methods.values():
            _check_method(protocol.name, method, apple, report)
    for name, value in declared.enums.items():
        if name not in apple.enums:
            report.problems.append(f"enum {name}: not in Apple's metadata")
        elif apple.enums[name] != value:
            report.problems.append(f"enum {name}: {value}, Apple's is {apple.enums[name]}")
    report.problems += [f"constant {name}: not in Apple's metadata" for name in declared.constants - apple.constants]
    return report


def check_sent(objects: Sequence[Path], declared: Declarations) -> Report:
    """Checks that the headers declare every selector that the code in compiled macOS objects sends."""
    report = Report()
    known = declared.selectors()
    classes = {name.removeprefix(INTERFACE_PREFIX) for name in declared.protocols if name.startswith(INTERFACE_PREFIX)}
    for path in objects:
        compiled = MachO(path)
        for selector in sorted(compiled.sent_selectors() - known - OTHER_FRAMEWORKS):
            report.problems.append(f"{path.name}: sends {selector}, which the checked headers do not declare")
        for name in sorted(compiled.class_references() - classes):
            report.problems.append(f"{path.name}: uses class {name}, which the checked headers do not declare")
    return report


def _check_method(owner: str, method: Method, apple: Metadata, report: Report) -> None:
    name = f"{'+' if method.is_class_method else '-'}[{owner.removeprefix(INTERFACE_PREFIX)} {method.selector}]"
    real = apple.protocols.get(owner)
    if real is not None:
        theirs = real.methods.get((method.selector, method.is_class_method))
        if theirs is None:
            report.problems.append(f"{name}: Apple's {owner} has no such method")
        elif _types(theirs.types) != _types(method.types):
            report.problems.append(f"{name}: encoding {_types(method.types)}, Apple's is {_types(theirs.types)}")
        return
    owners = {owner.removeprefix(INTERFACE_PREFIX), "NSObject"}  # PyObjC records methods of protocols under NSObject
    candidates = [r for r in apple.registrations.get(method.selector, []) if r.owner in owners]
    mismatches = [list(_mismatches(method, candidate)) for candidate in candidates]
    if any(not found for found in mismatches):
        return
    # Two protocols may declare the same selector with different types. PyObjC records a selector only once, perhaps
    # with the types of the other protocol.
    others = [p.methods.get((method.selector, method.is_class_method)) for p in apple.protocols.values()]
    is_theirs = any(not list(_mismatches(m, r)) for m in others if m is not None for r in candidates)
    if not candidates or is_theirs:
        report.unverified.add(name)
    else:
        report.problems.append(f"{name}: {mismatches[0][0]}")


def _mismatches(method: Method, theirs: Registration) -> Iterator[str]:
    ours = [_bare(kind) for kind in _types(method.types)]
    for position, kind in theirs.types.items():
        index = 0 if position is None else position + 1
        if index >= len(ours):
            yield f"{len(ours) - 3} arguments, Apple's has one at position {position}"
        elif ours[index] != _bare(kind):
            place = "result" if position is None else f"argument {position - 2}"
            yield f"{place} is {ours[index]}, Apple's is {_bare(kind)}"


_QUALIFIERS = "rnNoORV"


def _types(encoding: str) -> list[str]:
    """Splits an encoding into result, self, selector and arguments, without stack offsets."""
    types, i = [], 0
    while i < len(encoding):
        end = _type_end(encoding, i)
        types.append(encoding[i:end])
        i = end
        while i < len(encoding) and encoding[i].isdigit():
            i += 1
    return types


def _type_end(text: str, i: int) -> int:
    while text[i] in _QUALIFIERS + "^":
        i += 1
    if text[i] in "{[(":
        depth = 0
        while True:
            depth += (text[i] in "{[(") - (text[i] in "}])")
            i += 1
            if depth == 0:
                return i
    return i + 2 if text[i : i + 2] in ("@?", "^?") else i + 1


def _bare(kind: str) -> str:
    """Drops qualifiers and struct names from a type, and replaces PyObjC's letters (Z: BOOL, z: byte, t: text)."""
    kind = re.sub(r"\{\w*\??=", "{=", re.sub(rf"^[{_QUALIFIERS}]+", "", kind))
    kind = re.sub(rf"\^[{_QUALIFIERS}]+", "^", kind)
    return {"Z": "B", "z": "C", "^t": "*"}.get(kind, kind)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares our headers, and the Metal calls of arm64 macOS object files, with Apple's. Returns 1 if a check fails.

    The command is `python -m softmetal.apple.api_check OBJECT...`.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("objects", nargs="*", type=Path, help="arm64 macOS objects")
    parser.add_argument("--include", type=Path, default=INCLUDE, help="the folder of the stand-in headers")
    chosen = parser.parse_args(arguments)
    objects = chosen.objects
    declared = declarations(chosen.include)
    report = check_declarations(declared, load())
    problems = report.problems + check_sent(objects, declared).problems
    methods = sum(len(protocol.methods) for protocol in declared.protocols.values())
    print(
        "\n".join(problems)
        or f"API: {methods} methods ({len(report.unverified)} that the metadata does not record), "
        f"{len(declared.enums)} enum values, {len(objects)} objects: as in Apple's SDK"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
