"""Defines the system symbols and selectors that the macOS module may use.

PyTorch's own dylibs are built for the oldest supported macOS. So a system symbol that these dylibs import, or a
selector that they send, exists on that macOS. The lists below contain the other symbols and selectors that we need.
"""

import re
import subprocess
from pathlib import Path

from softmetal.apple.macho import MachO

# The install name of each system library, by the name that llvm-nm prints.
SYSTEM_LIBRARIES = {
    "libSystem": "/usr/lib/libSystem.B.dylib",
    "libc++": "/usr/lib/libc++.1.dylib",
    "libobjc": "/usr/lib/libobjc.A.dylib",
    "Foundation": "/System/Library/Frameworks/Foundation.framework/Versions/C/Foundation",
    "CoreFoundation": "/System/Library/Frameworks/CoreFoundation.framework/Versions/A/CoreFoundation",
    "Metal": "/System/Library/Frameworks/Metal.framework/Versions/A/Metal",
}

EXTRA_SYMBOLS = {
    "libSystem": {
        "_ldexpf": "C99 math; in the libSystem of every macOS",
        "dyld_stub_binder": "named by the linker for lazy binding",
    },
    "libc++": {
        "__ZdlPvm": "C++14 sized deallocation, in libc++ since macOS 10.12",
    },
    "Metal": {
        "_OBJC_CLASS_$_MTLFunctionConstantValues": "class of the Metal framework since macOS 10.12",
    },
}

# Selectors that PyTorch's dylibs do not send, each with the first macOS that supports it (Apple's documentation).
EXTRA_SELECTORS = {
    "error": "10.11",
    "memoryBarrierWithScope:": "10.14",
    "newFunctionWithName:constantValues:error:": "10.12",
    "operatingSystemVersion": "10.10",
    "processInfo": "10.0",
    "respondsToSelector:": "10.0",
    "rootCommandBuffer": "11.0",
    "setFastMathEnabled:": "10.11",
    "setConstantValue:type:atIndex:": "10.12",
    "setShouldMaximizeConcurrentCompilation:": "13.3",
    "status": "10.11",
}
# Selectors of newer versions of macOS. The code uses them only if the object responds to them.
NEWER_SELECTORS = {"setMathFloatingPointFunctions:": "15.0", "setMathMode:": "15.0"}


def selector_problems(objects: list[Path], sources: list[Path], dylibs: list[Path]) -> list[str]:
    """Returns a line for each selector that the oldest macOS may lack and that the sources use without a check.

    Args:
        objects: the compiled Objective-C++ sources of the extension.
        sources: the same sources as text, which are searched for `respondsToSelector:@selector(NAME)`.
        dylibs: PyTorch's libraries for macOS.
    """
    by_pytorch = set().union(*(MachO(path).sent_selectors() for path in dylibs))
    known = (by_pytorch - set(NEWER_SELECTORS)) | set(EXTRA_SELECTORS)
    guarded = {
        name for path in sources for name in re.findall(r"respondsToSelector:@selector\(([\w:]+)\)", path.read_text())
    }
    problems = []
    for path in objects:
        for name in sorted(MachO(path).sent_selectors() - known):
            if name not in NEWER_SELECTORS:
                problems.append(f"{path.name}: sends {name}, which PyTorch does not send and no list explains")
            elif name not in guarded:
                since = NEWER_SELECTORS[name]
                problems.append(f"{path.name}: sends {name} of macOS {since} without asking respondsToSelector:")
    return problems


def imported_symbols(dylibs: list[Path]) -> dict[str, set[str]]:
    """Returns the symbols that the dylibs import, by system library."""
    found: dict[str, set[str]] = {name: set() for name in SYSTEM_LIBRARIES}
    for dylib in dylibs:
        printed = subprocess.run(["llvm-nm-19", "-m", "-u", str(dylib)], capture_output=True, text=True, check=True)
        for symbol, library in re.findall(r"external (\S+) \(from ([^)]+)\)", printed.stdout):
            if library in found:
                found[library].add(symbol)
    return found


def system_symbols(dylibs: list[Path]) -> dict[str, set[str]]:
    """Returns all allowed symbols by system library: the imports of PyTorch's dylibs, and EXTRA_SYMBOLS."""
    allowed = imported_symbols(dylibs)
    for library, extra in EXTRA_SYMBOLS.items():
        allowed[library] |= set(extra)
    return allowed
