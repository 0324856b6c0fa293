"""Things that print as a table, by `print` as by rich."""

from abc import abstractmethod

from rich.console import Console, RenderableType


class RichText:
    """What `__rich__` shows is also the text of `str`."""

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """Returns what rich prints."""

    def __str__(self) -> str:
        console = Console(width=160, force_terminal=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip("\n")
