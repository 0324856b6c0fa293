"""ctypes view of the device library's C functions (`runtime/python_api.h`)."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

BUFFER_SLOTS = 31


class UInt3(Structure):
    """`sm_uint3`."""

    _fields_ = [("x", c_uint32), ("y", c_uint32), ("z", c_uint32)]


class Fault(Structure):
    """`sm_fault`: one finding of checked mode."""

    _fields_ = [
        ("kind", c_uint32),
        ("is_fatal", c_uint32),
        ("message", c_char_p),
        ("kernel", c_char_p),
        ("file", c_char_p),
        ("line", c_uint32),
        ("thread", UInt3),
        ("threadgroup", UInt3),
        ("simdgroup", c_uint32),
        ("buffer", c_int32),
        ("offset", c_int64),
    ]


class CounterFields(Structure):
    """`sm_counters`."""

    _fields_ = [
        *((name, c_uint64) for name in ("threads", "threadgroups", "threadgroup_barriers", "simdgroup_barriers")),
        *((name, c_uint64) for name in ("simd_operations", "mmas", "atomics", "has_bytes")),
        *((name, c_uint64) for name in ("device_bytes_read", "device_bytes_written")),
        *((name, c_uint64) for name in ("distinct_bytes_read", "distinct_bytes_written")),
        *((name, c_uint64) for name in ("threadgroup_bytes_read", "threadgroup_bytes_written")),
        *((name, c_uint64 * BUFFER_SLOTS) for name in ("buffer_bytes_read", "buffer_bytes_written")),
        *((name, c_uint64 * BUFFER_SLOTS) for name in ("buffer_distinct_read", "buffer_distinct_written")),
    ]


class Result(Structure):
    """`sm_result`."""

    _fields_ = [("fault_count", c_uint32), ("faults", POINTER(Fault)), ("counters", CounterFields)]


class Argument(Structure):
    """`softmetal_argument`: a buffer with an offset, or bytes."""

    _fields_ = [("handle", c_void_p), ("offset", c_uint64), ("bytes", c_void_p), ("length", c_uint64)]


class Library:
    """The loaded device library.

    Args:
        executor: path of the executor's library, loaded first.
        device: path of the device library.
    """

    def __init__(self, executor: Path, device: Path) -> None:
        mode = os.RTLD_GLOBAL | os.RTLD_LAZY  # the host extension finds its symbols here
        self._executor = ctypes.CDLL(str(executor), mode)
        self._c = ctypes.CDLL(str(device), mode)
        signatures: dict[str, tuple[object, list[object]]] = {
            "free": (None, [c_void_p]),
            "set_checked": (None, [c_int]),
            "is_checked": (c_int, []),
            "set_seed": (None, [c_uint64]),
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
            "host_pointer": (c_void_p, [c_void_p, POINTER(c_void_p)]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self._c, f"softmetal_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def take_text(self, pointer: int | None) -> str | None:
        """The text at an owned pointer, which is freed; None for a null pointer."""
        if not pointer:
            return None
        text = ctypes.string_at(pointer).decode(errors="replace")
        self.free(pointer)
        return text

    def __getattr__(self, name: str) -> ctypes._CFuncPtr:  # for the type checker: set in __init__
        raise AttributeError(name)
