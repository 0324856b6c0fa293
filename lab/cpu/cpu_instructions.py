"""Counts the instructions that one thread executes, in single-step mode. x86-64 Linux only."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

from lab.cpu.cpu_ceilings import KINDS, compiled

ALL = "all"


@functools.cache
def _library() -> ctypes.CDLL:
    library = compiled(Path(__file__).with_suffix(".cpp"))
    library.end_steps.restype = ctypes.POINTER(ctypes.c_uint64)
    return library


def count(call: Callable[[], object]) -> dict[str, int]:
    """Returns a call's instructions by kind and in total, including those of the Python interpreter.

    One instruction takes 1 to 30 us, depending on the virtual machine.
    """
    library = _library()
    library.begin_steps()
    call()
    counts = library.end_steps()
    return dict(zip((*KINDS, ALL), counts[: len(KINDS) + 1], strict=True))


def each_weight(small: Callable[[], object], large: Callable[[], object], weights: int) -> dict[str, float]:
    """Returns the instructions per weight: the difference of two products, of which `large` has `weights` more."""
    for call in (small, large):
        call()  # the first call of a shape makes plans and allocates memory
    less, more = count(small), count(large)
    return {kind: (more[kind] - less[kind]) / weights for kind in more}
