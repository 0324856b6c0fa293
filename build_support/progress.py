"""Shows what ninja compiles: one line on a terminal, ten lines in a log, in place of a command for each file."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator

_COMPILES = re.compile(r"^\[(\d+)/(\d+)\] .* -c (?:-c )?(\S+) -o ")


def shorten(lines: Iterable[str], root: str, terminal: bool) -> Iterator[str]:
    """Yields "[8/79] csrc/core/x.cpp" for compiles of files below `root`, and other lines unchanged.

    On a terminal each compile overwrites the one before it. Elsewhere each tenth of the compiles has a line.
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
    """Shortens, inside a `with` block, the lines that this process and the tools that it starts print."""
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
        os.dup2(screen, 1)  # closes the pipe's last writing end, so the copier ends
        copier.join()
        os.close(screen)
