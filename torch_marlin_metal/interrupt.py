"""Lets Ctrl-C end the command line while it imports torch, which takes seconds.

Importing any module of the package imports torch, so `cli.main.main` begins too late to handle Ctrl-C during that
import. The package therefore imports this module before torch. In programs other than the command line, it changes
nothing.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

EXIT_CODE = 130  # 128 + SIGINT, as shells report it


def is_command() -> bool:
    """Returns whether this process is `torch-marlin-metal` or `python -m torch_marlin_metal`."""
    if sys.argv[:1] == ["-m"]:  # Python replaces "-m" by the module's path only after it has imported the package
        return "torch_marlin_metal" in sys.orig_argv[1:]
    return Path(sys.argv[0]).stem == "torch-marlin-metal" if sys.argv else False


def _end(number: int, frame: FrameType | None) -> None:
    # Ends the process at once. Some of torch's modules would catch an exception as a failed import.
    os.write(2, b"interrupted\n")
    os._exit(EXIT_CODE)


def raise_again() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt, as Python does by default, so that a command can clean up its files."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)
