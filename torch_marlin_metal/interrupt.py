"""Lets Ctrl-C end the command line during the import of torch, which takes seconds.

Importing any module of the package imports torch, so `cli.main.main` starts too late to handle Ctrl-C during that
import. The package therefore imports this module before torch. In programs other than the command line, this module has
no effect.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

EXIT_CODE = 130  # 128 + SIGINT, the exit code that shells use


def is_command() -> bool:
    """Returns True in a process of `torch-marlin-metal` or `python -m torch_marlin_metal`."""
    if sys.argv[:1] == ["-m"]:  # Python replaces "-m" by the module's path after the import of the package
        return "torch_marlin_metal" in sys.orig_argv[1:]
    return Path(sys.argv[0]).stem == "torch-marlin-metal" if sys.argv else False


def _end(number: int, frame: FrameType | None) -> None:
    # End the process at once. Some of torch's modules would treat an exception as a failed import.
    os.write(2, b"interrupted\n")
    os._exit(EXIT_CODE)


def raise_again() -> None:
    """Restores Python's default, KeyboardInterrupt on Ctrl-C, so that a command can clean up its files."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)
