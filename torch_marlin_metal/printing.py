"""The base of results that print as a table, by `print` as by rich."""

from abc import abstractmethod

from rich.console import Console, RenderableType


class RichText:
    """Prints the same table by `print` as by rich."""

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """Returns the table that rich prints."""

    def __str__(self) -> str:
        console = Console(width=160, force_terminal=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip("\n")
