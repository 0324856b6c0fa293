"""Declares the device library's C functions (`runtime/python_api.h`) for ctypes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from .executor.bindings import Result, executor


class Argument(Structure):
    """The C struct `softmetal_argument`: either a buffer with an offset, or bytes, which can contain addresses."""

    _fields_ = [
        ("handle", c_void_p),
        ("offset", c_uint64),
        ("bytes", c_void_p),
        ("length", c_uint64),
        ("resident", POINTER(c_void_p)),
        ("resident_count", c_uint64),
    ]


class Library:
    """The loaded device library. Its C functions are attributes, whose names lack the prefix `softmetal_`.

    Args:
        path: path of the device library. The constructor loads the executor first.
    """

    def __init__(self, path: Path) -> None:
        executor()
        library = ctypes.CDLL(str(path), os.RTLD_GLOBAL | os.RTLD_LAZY)  # extensions find their symbols here
        self._functions: dict[str, Callable[..., Any]] = {}
        signatures: dict[str, tuple[object, list[object]]] = {
            "free": (None, [c_void_p]),
            "autorelease_pools": (c_size_t, []),
            "set_checked": (None, [c_int]),
            "is_checked": (c_int, []),
            "set_validates": (c_int, [c_int]),
            "compiles_concurrently": (c_int, []),
            "set_seed": (None, [c_uint64]),
            "set_thread_limit": (c_uint32, [c_uint32]),
            "stream": (c_int64, []),
            "set_stream": (c_void_p, [c_int64]),
            "stream_counts": (None, [POINTER(c_uint64)]),
            "set_compile_hook": (None, [c_void_p]),
            "fail_allocation": (c_int64, [c_int64]),
            "fail_command_buffer": (None, [c_int64, c_char_p]),
            "faults": (c_void_p, []),
            "clear": (None, []),
            "record_count": (c_size_t, []),
            "record": (POINTER(Result), [c_size_t, POINTER(c_char_p), POINTER(c_uint64)]),
            "new_shader_library": (c_void_p, [c_char_p, POINTER(c_void_p)]),
            "function_names": (c_void_p, [c_void_p]),
            "new_pipeline_named": (c_void_p, [c_void_p, c_char_p, POINTER(c_void_p)]),
            "release": (None, [c_void_p]),
            "pipeline_limits": (None, [c_void_p, POINTER(c_uint64)]),
            "dispatch": (c_void_p, [c_void_p, POINTER(Argument), c_size_t, POINTER(c_uint64), POINTER(c_uint64)]),
            "gpu_address": (c_uint64, [c_void_p]),
            "contents": (c_void_p, [c_void_p]),
            "error_buffer": (c_void_p, []),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(library, f"softmetal_{name}")
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function

    def __getattr__(self, name: str) -> Callable[..., Any]:
        try:
            function: Callable[..., Any] = self._functions[name]
        except KeyError:
            raise AttributeError(name) from None
        return function

    def take_text(self, pointer: int | None) -> str | None:
        """Returns the text at an owned pointer and frees it. Returns None for a null pointer."""
        if not pointer:
            return None
        text = ctypes.string_at(pointer).decode(errors="replace")
        self.free(pointer)
        return text
