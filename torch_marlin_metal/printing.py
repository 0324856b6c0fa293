"""Tables for people: how they look, and the base class of results that `print` and rich show as one."""

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
    """Escapes characters that do not print, as in a Python string, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def table(
    title: str, *headings: str, rows: Iterable[Sequence[str]], right: Sequence[str] = (), caption: str = ""
) -> Table:
    """Makes a table; the columns named in `right` are aligned to the right. What does not print is escaped."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title_justify="left", caption_justify="left")
    made.title, made.caption = printable(title), printable(caption, "\n") or None
    for heading in headings:
        made.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(printable, row))
    return made
