"""Shortens ninja's output: one progress line on a terminal, ten lines in a log, instead of a command for each file."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator

_COMPILES = re.compile(r"^\[(\d+)/(\d+)\] .* -c (?:-c )?(\S+) -o ")


def shorten(lines: Iterable[str], root: str, terminal: bool) -> Iterator[str]:
    """Yields "[8/79] csrc/core/x.cpp" in place of a compile command for a file below `root`, and other lines unchanged.

    On a terminal, each progress line overwrites the previous one. In a log, there is one line for every tenth of the
    files.
    """
    is_open = False
    for line in lines:
        found = _COMPILES.match(line)
        if not found:
            yield "\n" * is_open + line
            is_open = False
            continue
        done, total = int(found[1]), int(found[2])
        text = f"[{done}/{total}] {os.path.relpath(found[3], root)}"
        if terminal:
            yield f"\r\033[K{text}" + "\n" * (done == total)
            is_open = done < total
        elif done * 10 // total > (done - 1) * 10 // total:
            yield text + "\n"


@contextlib.contextmanager
def short_lines(root: str) -> Iterator[None]:
    """Shortens the output of this process and of its child processes inside a `with` block."""
    sys.stdout.flush()
    screen = os.dup(1)
    readable, writable = os.pipe()
    os.dup2(writable, 1)
    os.close(writable)

    def copy() -> None:
        with os.fdopen(readable, errors="replace") as lines, os.fdopen(screen, "w", closefd=False) as out:
            for part in shorten(lines, root, os.isatty(screen)):
                out.write(part)
                out.flush()

    copier = threading.Thread(target=copy)
    copier.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(screen, 1)  # closes the last write end of the pipe, so the copier thread ends
        copier.join()
        os.close(screen)
