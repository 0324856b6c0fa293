"""Exit codes and output of all commands: tables for people, JSON for programs, and one line for an error.

Names and messages may come from untrusted files, so they are printed as plain text. No part of them is treated as
markup, and unprintable characters (escape sequences, line breaks) are escaped.
"""

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.protocol import rich_cast
from rich.table import Table
from tqdm import tqdm
from typer.core import TyperGroup

from torch_marlin_metal import extension, interrupt
from torch_marlin_metal.checkpoints.options import spelled
from torch_marlin_metal.convert import CheckpointError
from torch_marlin_metal.printing import printable

DONE = 0
ANSWER_IS_NO = 1  # inspect found an unreadable layer, verify a difference, or fit no format that fits
WRONG_USE = 2  # click's own code for a wrong command line
FAILED = 3  # the input is damaged or refused, or the output cannot be written
INTERRUPTED = interrupt.EXIT_CODE
BROKEN_PIPE = 141  # 128 + SIGPIPE

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout instead of text.")]


def reported(command: Callable[..., int]) -> Callable[..., None]:
    """Wraps a function as a command: prints an expected error as one line, and exits with the function's code."""

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        as_json = bool(arguments.get("as_json"))
        try:
            with warnings.catch_warnings(), spelled(_as_option):
                warnings.showwarning = _show_warning
                extension.warn()
                code = command(**arguments)
        except CheckpointError as error:
            code = _fail(error, FAILED, as_json)
        except BrokenPipeError:
            code = BROKEN_PIPE
        except (ValueError, FileExistsError, ImportError) as error:  # ImportError: a package that an option needs
            code = _fail(error, WRONG_USE, as_json)
        except (OSError, RuntimeError, MemoryError) as error:  # torch raises RuntimeError for lack of memory
            code = _fail(error, FAILED, as_json)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = INTERRUPTED
        raise typer.Exit(code)

    return run


def _as_option(option: str, value: object) -> str:
    """Formats an option of the package as an option of the command line."""
    name = f"--{'write-gptq-version' if option == 'version' else option.replace('_', '-')}"
    name = f"convert {name}" if option == "on_unsupported" else name  # inspect lists what convert would refuse
    return name if value is None or value is True else f"{name} {value}"


class Commands(TyperGroup):
    """The group of all commands. With --json, it also reports a wrong command line as a JSON object."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        if not extra.get("standalone_mode", True) or "--json" not in (sys.argv if args is None else args):
            return super().main(args, *rest, **extra)
        try:
            code = super().main(args, *rest, **{**extra, "standalone_mode": False})
        except Exception as error:
            if not hasattr(error, "format_message"):  # all versions of click have it on their errors
                raise
            code = _fail(ValueError(error.format_message()), WRONG_USE, as_json=True)
        sys.exit(code)


def show(value: dict[str, Any], text: RenderableType, as_json: bool) -> None:
    """Prints the result of a command, as JSON or as text."""
    if as_json:
        # JSON has no NaN and infinity, so they become null.
        _print(json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=1))
        return
    if isinstance(text, str):
        _print(printable(text, keep="\n"))
        return
    # A pipe has no width, and its lines must not wrap.
    width = None if sys.stdout is not None and sys.stdout.isatty() else 10_000
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    with console.capture() as captured:  # if rich wrote to a closed pipe itself, it would end the program
        console.print(*_fitted(text, console.width), sep="\n")
    _print(captured.get().removesuffix("\n"))


def _fitted(shown: Any, width: int) -> Iterator[Any]:
    """Yields the tables, titles and captions. A table that is too wide for the terminal becomes lines of cells."""
    shown = rich_cast(shown)
    if isinstance(shown, Group):
        for part in shown.renderables:
            yield from _fitted(part, width)
        return
    if not isinstance(shown, Table):
        yield shown
        return
    title, caption, shown.title, shown.caption = shown.title, shown.caption, None, None
    columns = [[str(column.header), *map(str, column.cells)] for column in shown.columns]
    heads, *rows = zip(*columns, strict=True)
    lines = [
        "\n".join(f"{head}: {cell}".removeprefix(": ") for head, cell in zip(heads, row, strict=True) if cell)
        for row in rows
    ]
    has_place = sum(min(max(map(len, column)), 12) + 3 for column in columns) < width
    yield from filter(None, (title, shown if has_place else "\n\n".join(lines), caption))


def stream(text: str) -> None:
    """Prints a part of a longer text to stdout at once. Escapes unprintable characters."""
    _print(printable(text, keep="\n\t"), end="")


def _print(text: str, end: str = "\n") -> None:
    """Prints to stdout and flushes, so that an error occurs in the command and not when the program ends."""
    try:
        if sys.stdout is None:
            raise OSError("stdout is closed")
        print(text, end=end, flush=True)
    except OSError:
        # Python flushes stdout again when the program ends. With the null device, this flush cannot fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout = None
        raise


def progress_bar(total: int, unit: str, as_json: bool) -> "tqdm[Any]":
    """Makes a progress bar on stderr, which is shown only if stderr is a terminal."""
    return tqdm(total=total, unit=unit, unit_scale=unit == "B", disable=True if as_json else None, file=sys.stderr)


def _fail(error: Exception, code: int, as_json: bool) -> int:
    message = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.filename and error.strerror:
        files = " -> ".join(map(str, filter(None, (error.filename, error.filename2))))
        message = f"{files}: {error.strerror}"  # without Python's "[Errno 2]"
    if as_json:
        try:
            _print(json.dumps({"error": message, "type": type(error).__name__}))
            return code
        except OSError:
            pass  # stdout itself failed; stderr reports it
    print(f"error: {printable(message)}", file=sys.stderr)
    return code


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {printable(str(message))}", file=sys.stderr)
