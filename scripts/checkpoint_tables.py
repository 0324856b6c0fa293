"""Writes the tables of docs/formats/checkpoints.md: the variants that each checkpoint reader reads and refuses.

python -m scripts.checkpoint_tables --write
"""

from collections.abc import Sequence
from pathlib import Path

from scripts import page_section
from torch_marlin_metal.checkpoints.known_formats import FORMATS

PAGE = Path(__file__).parents[1] / "docs/formats/checkpoints.md"


def tables() -> str:
    """Returns a section for each format that `FORMATS` lists."""
    parts = []
    for fmt in FORMATS:
        parts.append(f"### {fmt.title}\n\nThe reader accepts {' or '.join(fmt.containers)}.\n")
        parts.append(_table(("read", "weight format"), fmt.variants))
        if fmt.refused:
            parts.append(_table(("refused", "because"), fmt.refused))
    return "\n".join(parts).strip()


def _table(head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["| {} | {} |".format(*row) for row in (head, ("---", "---"), *rows)]) + "\n"


if __name__ == "__main__":
    page_section.main(PAGE, "scripts.checkpoint_tables", tables)
