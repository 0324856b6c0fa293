"""Reads and writes the sections of pages that programs write.

The section of `python -m NAME` lies between the lines `<!-- NAME -->` and `<!-- end of NAME -->` of a page.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path


def section(page: Path, name: str, new: str | None = None) -> str:
    """Returns the text of a section without the empty lines around it, after writing `new` there if it is given.

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
    """Prints the text of a section, or writes it into the page if the program's only argument is --write."""
    if sys.argv[1:] not in ([], ["--write"]):
        sys.exit(f"usage: python -m {name} [--write]")
    made = make()
    if sys.argv[1:]:
        section(page, name, made)
    else:
        print(made)
