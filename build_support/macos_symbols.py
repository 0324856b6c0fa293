"""Which system symbols the macOS module may use.

A symbol of a system library is known to exist on macOS 14 when PyTorch's own dylibs, built for that system, import it
from the same library. What they do not import and we need is on the short list below, each with its reason.
"""

import re
import subprocess
from pathlib import Path

# install name of each system library by the name that llvm-nm prints
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


def imported_symbols(dylibs: list[Path]) -> dict[str, set[str]]:
    """Returns the symbols that some dylibs import, by system library."""
    found: dict[str, set[str]] = {name: set() for name in SYSTEM_LIBRARIES}
    for dylib in dylibs:
        printed = subprocess.run(["llvm-nm-19", "-m", "-u", str(dylib)], capture_output=True, text=True, check=True)
        for symbol, library in re.findall(r"external (\S+) \(from ([^)]+)\)", printed.stdout):
            if library in found:
                found[library].add(symbol)
    return found


def system_symbols(dylibs: list[Path]) -> dict[str, set[str]]:
    """Returns all symbols that may be used, by system library: what PyTorch's dylibs import and the short list."""
    allowed = imported_symbols(dylibs)
    for library, extra in EXTRA_SYMBOLS.items():
        allowed[library] |= set(extra)
    return allowed
