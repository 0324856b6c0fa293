"""What all commands share: exit codes, tables for people, one JSON object for programs, one line for an error."""

import functools
import json
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from tqdm import tqdm

from torch_marlin_metal.convert import CheckpointError

DONE = 0
ANSWER_IS_NO = 1  # inspect: layers would be refused; verify: the checkpoints differ
WRONG_USE = 2  # click's own code for a wrong command line
FAILED = 3  # the input is damaged or refused, or the output cannot be written
INTERRUPTED = 130  # 128 + SIGINT, as shells report it

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of text.")]


def reported(command: Callable[..., int]) -> Callable[..., None]:
    """Makes a function that returns an exit code into a command: every foreseen failure becomes one line."""

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        as_json = bool(arguments.get("as_json"))
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                code = command(**arguments)
        except CheckpointError as error:
            code = _fail(error, FAILED, as_json)
        except (ValueError, FileExistsError) as error:
            code = _fail(error, WRONG_USE, as_json)
        except OSError as error:
            code = _fail(error, FAILED, as_json)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = INTERRUPTED
        raise typer.Exit(code)

    return run


def show(value: dict[str, Any], text: RenderableType, as_json: bool) -> None:
    """Prints the result of a command, as JSON or as text."""
    if as_json:
        print(json.dumps(value, indent=1))
        return
    # A pipe has no width: lines stay whole for the program that reads them.
    Console(width=None if sys.stdout.isatty() else 200).print(text, soft_wrap=isinstance(text, str))


def table(title: str, *headings: str, right: tuple[str, ...] = ()) -> Table:
    """Makes an empty table; the columns named in `right` are aligned there."""
    made = Table(title=title, title_justify="left", caption_justify="left")
    for heading in headings:
        made.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return made


def progress_bar(total: int, unit: str, as_json: bool) -> "tqdm[Any]":
    """Makes a progress bar on stderr; there is none where stderr is no terminal."""
    return tqdm(total=total, unit=unit, unit_scale=unit == "B", disable=True if as_json else None, file=sys.stderr)


def human_bytes(count: float) -> str:
    """Returns a size with its unit."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _fail(error: Exception, code: int, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": str(error), "type": type(error).__name__}))
    else:
        print(f"error: {error}", file=sys.stderr)
    return code


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)
