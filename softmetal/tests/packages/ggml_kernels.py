"""Reads ggml's Metal source from a wheel of whisper.cpp, in which it is text inside a dylib."""

from __future__ import annotations

import functools
import re

from softmetal.apple import wheels

_DYLIB = "pywhispercpp/.dylibs/libggml-metal.0.13.1.dylib"
DEFINES = ("GGML_METAL_EMBED_LIBRARY=1", "GGML_METAL_HAS_BF16=1")


@functools.cache
def ggml_source() -> str:
    """Returns the text of ggml's Metal file.

    Raises:
        WheelUnavailable: the wheel is not cached and cannot be downloaded.
    """
    dylib = (wheels.unpack("ggml-metal") / _DYLIB).read_bytes()
    found = re.search(rb"#define GGML_COMMON_DECL_METAL[\t\n\r -~\x80-\xff]+", dylib)
    assert found is not None, f"{_DYLIB} holds no Metal source"
    return found[0].decode()
