"""Writes the Python table of the weight formats from the rows of types.h, which the kernels and the C++ code include.

Python reads and converts checkpoints without the compiled extension, so it cannot get the table from the extension.
"""

import re
from pathlib import Path

HEADER = "kernels/shared/types.h"
TABLE = "torch_marlin_metal/formats_table.py"
ROW = re.compile(r'X\((\w+), (\w+), (\d+), (\d+), (\w+), (\w+), (\d+), "([^"]+)", __VA_ARGS__\)')
HEAD = f'''\
"""Written by build_support/embed_formats.py from {HEADER} in every build; edit that file."""

# name, code kind, bits of a code, fixed offset, coding of the scales, role of the zeros, fixed group size or 0, formula
ROWS: tuple[tuple[str, str, int, int, str, str, int, str], ...] = (
'''


def macro(text: str, name: str) -> str:
    """Returns the replacement text of the macro `name` as one line.

    Raises:
        ValueError: the text does not define the macro.
    """
    found = re.search(rf"^#define {name}\b(?:\(.*?\))?((?:[^\n]*\\\n)*[^\n]*)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{HEADER}: expected #define {name}, found none")
    return " ".join(found[1].replace("\\\n", " ").split()).replace(" ,", ",")


def format_table(header: str) -> str:
    """Returns the Python file for the text of types.h.

    Raises:
        ValueError: the header has no rows of formats, or has a row that ROW does not match.
    """
    rows = macro(header, "MARLIN_WEIGHT_FORMATS")
    left = ROW.sub("", rows).strip()
    if left or not rows:
        raise ValueError(f"{HEADER}: expected rows X(name, ..., formula, __VA_ARGS__), got {left or 'none'}")
    lines = [HEAD]
    for name, codes, bits, offset, scales, zeros, group, formula in ROW.findall(rows):
        lines.append(f'    ("{name}", "{codes}", {bits}, {offset}, "{scales}", "{zeros}", {group}, "{formula}"),\n')
    lines.append(")\n")
    lines.append(f"GROUP_SIZES: tuple[int, ...] = ({macro(header, 'MARLIN_GROUP_SIZES')})\n")
    return "".join(lines)


def write_format_table(root: Path) -> None:
    """Writes the table below `root`, if its text has changed."""
    text = format_table((root / HEADER).read_text(encoding="ascii"))
    table = root / TABLE
    if not table.exists() or table.read_text(encoding="utf-8") != text:
        table.write_text(text, encoding="utf-8")
