"""Writes the tables of docs/formats/checkpoints.md, which list what each reader of checkpoints reads and refuses.

python scripts/checkpoint_tables.py --write
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from torch_marlin_metal.checkpoints.known_formats import FORMATS

PAGE = Path(__file__).parents[1] / "docs/formats/checkpoints.md"
BEGIN = "<!-- formats: written by scripts/checkpoint_tables.py -->\n\n"
END = "\n<!-- end of the formats -->"


def tables() -> str:
    """Returns a section for each format that `FORMATS` lists."""
    parts = []
    for fmt in FORMATS:
        parts.append(f"### {fmt.title}\n\nThe reader takes {' or '.join(fmt.containers)}.\n")
        parts.append(_table(("read", "weight format"), fmt.variants))
        if fmt.refused:
            parts.append(_table(("refused", "because"), fmt.refused))
    return "\n".join(parts)


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["| {} | {} |".format(*row) for row in (head, ("---", "---"), *rows)]) + "\n"


def page(text: str) -> str:
    """Returns the page `text` with new tables."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE} has no section between {BEGIN.strip()!r} and {END.strip()!r}")
    return before + begin + tables() + end + after


if __name__ == "__main__":
    made = page(PAGE.read_text())
    if "--write" in sys.argv:
        PAGE.write_text(made)
    else:
        sys.stdout.write(made)
