"""Selects math modes other than safe, and functions other than precise. Metal's default is fast for both.

A varied mode is safe mode with a seed for the choices that Metal leaves open: the contraction of sums and products, and
the order in which a reduction adds its lanes. If a kernel relies on one of these choices, its result differs in some
varied mode.

The mode determines clang's flags. In fast and relaxed mode, half subnormals become zero, because a GPU may treat half
subnormals as zero in these modes. (The executor flushes fp32 subnormals in every mode.)

The functions are a separate setting: it determines whether `exp` is `precise::exp` or `fast::exp`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .tokens import SourceError

SAFE, RELAXED, FAST = MODES = ("safe", "relaxed", "fast")

_RELAXED_FLAGS = ["-funsafe-math-optimizations", "-ffp-contract=fast"]
# (contraction, order of a reduction as numbered in metal_simdgroup). Safe mode is ("on", 0).
_CHOICES = [(contract, order) for contract in ("on", "off", "fast") for order in (0, 1, 2)][1:]
_VARIED = {
    f"varied-{contract}-{order}": [f"-ffp-contract={contract}", f"-DSM_REDUCTION_ORDER={order}"]
    for contract, order in _CHOICES
}
_MODE_FLAGS = {SAFE: [], RELAXED: _RELAXED_FLAGS, FAST: [*_RELAXED_FLAGS, "-ffinite-math-only"], **_VARIED}
PRECISE = "precise"
FUNCTIONS = (PRECISE, FAST)
_FUNCTION_FLAGS = {PRECISE: [], FAST: ["-DSM_FAST_FUNCTIONS"]}  # read by metal_config


class Math(NamedTuple):
    """The math mode and the setting of functions for compiling a library.

    Attributes:
        mode: one of MODES, or a varied mode (see the top of this file).
        functions: one of FUNCTIONS.
    """

    mode: str = SAFE
    functions: str = PRECISE

    @property
    def flags(self) -> list[str]:
        """Returns clang's flags for this mode and these functions."""
        return [*_MODE_FLAGS[self.mode], *_FUNCTION_FLAGS[self.functions]]


PLAIN = Math()
ALL = tuple(Math(mode, functions) for mode in MODES for functions in FUNCTIONS)
FLUSHING = (RELAXED, FAST)


def varied(seed: int) -> str:
    """Returns the name of a varied mode (see the top of this file). Seeds 0 to 7 give the eight different modes."""
    return list(_VARIED)[seed % len(_VARIED)]


_ARITHMETIC = re.compile(
    r"^(?P<start>  (?P<result>%[\w.]+) = (?:fadd|fsub|fmul|fdiv)(?: \w+)* half) (?P<left>[^,]+), (?P<right>[^,]+)"
    r"(?P<rest>.*)$",
    re.MULTILINE,
)
_TO_HALF = re.compile(
    r"^(?P<start>  (?P<result>%[\w.]+) = fptrunc (?:\w+ )*(?:float|double) [^ ]+ to half)(?P<rest>.*)$", re.MULTILINE
)
_FROM_HALF = re.compile(r"^(?P<start>  %[\w.]+ = fpext (?:\w+ )*half) (?P<value>[^ ]+)(?P<rest> to .*)$", re.MULTILINE)
_FLUSH = """
define internal half @sm.flush(half %x) alwaysinline {
  %bits = bitcast half %x to i16
  %exponent = and i16 %bits, 31744
  %small = icmp eq i16 %exponent, 0
  %sign = and i16 %bits, -32768
  %flushed = select i1 %small, i16 %sign, i16 %bits
  %y = bitcast i16 %flushed to half
  ret half %y
}
"""

_PRAGMA = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+METAL[ \t]+fp\b[ \t]*(?P<what>.*?)[ \t]*$", re.MULTILINE)
_PRAGMAS = {
    "contract(off)": "clang fp contract(off)",
    "contract(on)": "clang fp contract(on)",
    "contract(fast)": "clang fp contract(fast)",
    "math_mode(safe)": "float_control(precise, on)",
    "math_mode(relaxed)": "float_control(precise, off)",
    "math_mode(fast)": "float_control(precise, off)",
}


def replace_pragmas(text: str) -> str:
    """Replaces `#pragma METAL fp ...` in preprocessed text with clang's pragmas.

    Raises:
        SourceError: an unknown setting.
    """

    def clang(match: re.Match[str]) -> str:
        what = re.sub(r"\s", "", match["what"])
        if what not in _PRAGMAS:
            line = text.count("\n", 0, match.start()) + 1
            raise SourceError(line, f"#pragma METAL fp: expected one of {', '.join(_PRAGMAS)}, got {what!r}")
        return f"#pragma {_PRAGMAS[what]}"

    return _PRAGMA.sub(clang, text)


def flush_half(text: str) -> str:
    """Returns LLVM text in which arithmetic on half reads and returns subnormals as zero."""

    def debug(match: re.Match[str]) -> str:
        found = re.search(r", !dbg !\d+", match["rest"])
        return found.group() if found else ""

    def flushed(name: str, value: str, location: str) -> str:
        return f"  {name} = call half @sm.flush(half {value}){location}\n"

    def arithmetic(match: re.Match[str]) -> str:
        name, location = f"%sm.{match['result'][1:]}", debug(match)
        lines = flushed(f"{name}.l", match["left"], location) + flushed(f"{name}.r", match["right"], location)
        start = match["start"].replace(match["result"], f"{name}.half", 1)
        result = flushed(match["result"], f"{name}.half", location)
        return f"{lines}{start} {name}.l, {name}.r{match['rest']}\n{result}".rstrip("\n")

    def to_half(match: re.Match[str]) -> str:
        name = f"%sm.{match['result'][1:]}.half"
        start = match["start"].replace(match["result"], name, 1)
        return f"{start}{match['rest']}\n{flushed(match['result'], name, debug(match))}".rstrip("\n")

    count = 0

    def from_half(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        line = flushed(f"%sm.half{count}", match["value"], debug(match))
        return f"{line}{match['start']} %sm.half{count}{match['rest']}"

    text = _ARITHMETIC.sub(arithmetic, text)
    return _FROM_HALF.sub(from_half, _TO_HALF.sub(to_half, text)) + _FLUSH
