"""Reads and writes generated sections of documentation pages.

The section that `python -m NAME` generates is between the lines `<!-- NAME -->` and `<!-- end of NAME -->` of a page.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path


def section(page: Path, name: str, new: str | None = None) -> str:
    """Returns the text of a section without the empty lines around it. If given, `new` first replaces the text.

    Raises:
        ValueError: the page has no such section.
    """
    text = page.read_text()
    found = re.search(
        f"(?<=<!-- {re.escape(name)} -->\n\n).*(?=\n\n<!-- end of {re.escape(name)} -->)", text, re.DOTALL
    )
    if found is None:
        raise ValueError(f"{page} has no section between <!-- {name} --> and <!-- end of {name} -->")
    if new is None:
        return found[0]
    page.write_text(text[: found.start()] + new.strip() + text[found.end() :])
    return new.strip()


def main(page: Path, name: str, make: Callable[[], str]) -> None:
    """Prints the text of a section, or writes it to the page if the program has the argument --write."""
    if sys.argv[1:] not in ([], ["--write"]):
        sys.exit(f"usage: python -m {name} [--write]")
    made = make()
    if sys.argv[1:]:
        section(page, name, made)
    else:
        print(made)
