"""Tables for people: their layout, and a base class for results that `print` and rich show as a table."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table


class RichText:
    """Makes `print` show the same table as rich."""

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """Returns the table that rich prints."""

    def __str__(self) -> str:
        console = Console(width=160, force_terminal=False, markup=False, emoji=False, highlight=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip("\n")


def printable(text: str, keep: str = "") -> str:
    """Escapes unprintable characters as in a Python string, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def table(
    title: str, *headings: str, rows: Iterable[Sequence[str]], right: Sequence[str] = (), caption: str = ""
) -> Table:
    """Makes a table. The columns in `right` are right-aligned. Unprintable characters are escaped."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title_justify="left", caption_justify="left")
    made.title, made.caption = printable(title), printable(caption, "\n") or None
    for heading in headings:
        made.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(printable, row))
    return made
