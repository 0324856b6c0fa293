"""Shows what ninja compiles: a short line for each file, in place of the compiler's whole command."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator

_COMPILES = re.compile(r"^(\[\d+/\d+\]) .* -c (?:-c )?(\S+) -o ")


def shorten(line: str, root: str) -> str:
    """Returns "[3/79] csrc/core/x.cpp" for a line with the compile of a file below `root`; other lines unchanged."""
    found = _COMPILES.match(line)
    return f"{found[1]} {os.path.relpath(found[2], root)}\n" if found else line


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
            for line in lines:
                out.write(shorten(line, root))
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
