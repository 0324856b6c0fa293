"""The tables that a library exports to the executor (`executor/abi.h`), in LLVM's text form."""

from __future__ import annotations

from collections.abc import Sequence

from .metadata import Constant


def string_constant(symbol: str, text: str) -> str:
    """Returns a global that holds a zero-terminated text."""
    data = text.encode() + b"\0"
    escaped = "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:02X}" for b in data)
    return f'{symbol} = private unnamed_addr constant [{len(data)} x i8] c"{escaped}"'


def library_table(kernel_rows: Sequence[str], constants: Sequence[Constant], defined: set[str], checked: bool) -> str:
    """Returns the tables of a library (`executor/abi.h`). `kernel_rows` holds one `sm_kernel` value for each kernel."""
    lines = [
        "%sm_kernel = type { ptr, ptr, ptr, i32, i32, i32 }",
        "%sm_constant = type { ptr, ptr, i32, i32 }",
    ]
    rows = []
    for i, c in enumerate(constants):
        lines += [string_constant(f"@sm_cn{i}", c.name), string_constant(f"@sm_ct{i}", c.type)]
        rows.append(f"%sm_constant {{ ptr @sm_cn{i}, ptr @sm_ct{i}, i32 {c.index}, i32 {int(c.name in defined)} }}")
    kernels = ", ".join(f"%sm_kernel {row}" for row in kernel_rows)
    lines += [
        f"@sm_kernels = internal constant [{len(kernel_rows)} x %sm_kernel] [{kernels}]",
        f"@sm_constants = internal constant [{len(rows)} x %sm_constant] [{', '.join(rows)}]",
        "@sm_table = constant { i32, i32, ptr, i32, ptr, ptr, ptr } { "
        f"i32 {int(checked)}, i32 {len(kernel_rows)}, ptr @sm_kernels, i32 {len(rows)}, ptr @sm_constants, "
        "ptr @sm_sites, ptr getelementptr (%sm_site, ptr @sm_sites, i32 @SITES@) }",
    ]
    return "\n".join(lines)


SITE = "%sm_site = type { ptr, i32, i32, i32, i32 }"
