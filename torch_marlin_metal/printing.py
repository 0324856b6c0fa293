"""The base class of results that `print` and rich print as a table."""

from abc import abstractmethod

from rich.console import Console, RenderableType


class RichText:
    """Makes `print` show the same table as rich."""

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """Returns the table that rich prints."""

    def __str__(self) -> str:
        console = Console(width=160, force_terminal=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip("\n")
