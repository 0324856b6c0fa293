"""Declares the structures and functions of executor.h for ctypes."""

from __future__ import annotations

import ctypes as c
import functools

from ..msl.tools import OUTPUT
from .build import build_executor

SLOTS = 31


class Uint3(c.Structure):
    _fields_ = [("x", c.c_uint32), ("y", c.c_uint32), ("z", c.c_uint32)]


class Argument(c.Structure):
    _fields_ = [
        ("name", c.c_char_p),
        ("kind", c.c_uint32),
        ("index", c.c_uint32),
        ("is_const", c.c_uint32),
        ("is_reference", c.c_uint32),
        ("element_bytes", c.c_uint32),
        ("element_align", c.c_uint32),
    ]


class Kernel(c.Structure):
    _fields_ = [
        ("name", c.c_char_p),
        ("entry", c.c_void_p),
        ("arguments", c.POINTER(Argument)),
        ("argument_count", c.c_uint32),
        ("max_total_threads", c.c_uint32),
        ("static_threadgroup_bytes", c.c_uint32),
    ]


class FunctionConstant(c.Structure):
    _fields_ = [("name", c.c_char_p), ("type", c.c_char_p), ("index", c.c_uint32), ("is_defined", c.c_uint32)]


class ConstantValue(c.Structure):
    _fields_ = [("name", c.c_char_p), ("index", c.c_uint32), ("value", c.c_char_p)]


class CompileRequest(c.Structure):
    _fields_ = [
        ("source", c.c_char_p),
        ("file_name", c.c_char_p),
        ("include_paths", c.POINTER(c.c_char_p)),
        ("include_path_count", c.c_uint32),
        ("constants", c.POINTER(ConstantValue)),
        ("constant_count", c.c_uint32),
        ("checked", c.c_uint32),
        ("math", c.c_uint32),
        ("fast_functions", c.c_uint32),
        ("defines", c.POINTER(c.c_char_p)),
        ("define_count", c.c_uint32),
        ("kernel", c.c_char_p),
        ("language_version", c.c_uint32),
    ]


class Buffer(c.Structure):
    _fields_ = [
        ("base", c.c_void_p),
        ("length", c.c_uint64),
        ("offset", c.c_uint64),
        ("read_only", c.c_uint32),
        ("label", c.c_char_p),
        ("initialised", c.c_void_p),
    ]


class Dispatch(c.Structure):
    _fields_ = [
        ("library", c.c_void_p),
        ("kernel", c.POINTER(Kernel)),
        ("threads_per_grid", Uint3),
        ("threads_per_threadgroup", Uint3),
        ("buffers", Buffer * SLOTS),
        ("threadgroup_bytes", c.c_uint32 * SLOTS),
        ("seed", c.c_uint64),
        ("perturb_seed", c.c_uint64),
        ("os_threads", c.c_uint32),
        ("watchdog", c.c_double),
        ("resident", c.POINTER(Buffer)),
        ("resident_count", c.c_uint32),
    ]


class Fault(c.Structure):
    _fields_ = [
        ("kind", c.c_uint32),
        ("is_fatal", c.c_uint32),
        ("message", c.c_char_p),
        ("kernel", c.c_char_p),
        ("file", c.c_char_p),
        ("line", c.c_uint32),
        ("thread", Uint3),
        ("threadgroup", Uint3),
        ("simdgroup", c.c_uint32),
        ("buffer", c.c_int32),
        ("offset", c.c_int64),
    ]


class Counters(c.Structure):
    _fields_ = [
        *(
            (name, c.c_uint64)
            for name in (
                *("threads", "threadgroups", "threadgroup_barriers", "simdgroup_barriers", "simd_operations", "mmas"),
                *("atomics", "has_bytes", "device_bytes_read", "device_bytes_written", "distinct_bytes_read"),
                *("distinct_bytes_written", "threadgroup_bytes_read", "threadgroup_bytes_written"),
            )
        ),
        *(
            (f"buffer_{name}", c.c_uint64 * SLOTS)
            for name in ("bytes_read", "bytes_written", "distinct_read", "distinct_written")
        ),
    ]


class Result(c.Structure):
    _fields_ = [("fault_count", c.c_uint32), ("faults", c.POINTER(Fault)), ("counters", Counters)]


@functools.cache
def executor() -> c.CDLL:
    """Builds the executor's library if it is outdated, loads it and declares the types of its functions.

    Raises:
        RuntimeError: the library does not build, or its structures differ from the declarations in this file.
    """
    library = c.CDLL(str(build_executor(OUTPUT)), c.RTLD_GLOBAL)
    sizes = (c.c_uint32 * 6)()
    library.sm_struct_sizes(sizes)
    mirrored = [c.sizeof(t) for t in (CompileRequest, Buffer, Dispatch, Fault, Counters, Result)]
    if list(sizes) != mirrored:
        raise RuntimeError(f"executor.h and bindings.py differ: sizes {list(sizes)} and {mirrored}")
    library.sm_compile.argtypes = [c.POINTER(CompileRequest), c.POINTER(c.c_void_p)]
    library.sm_free_text.argtypes = [c.c_void_p]
    library.sm_library_open.argtypes = [c.c_char_p, c.POINTER(c.c_void_p)]
    library.sm_library_open.restype = c.c_void_p
    for name in ("kernel", "constant"):
        getattr(library, f"sm_library_{name}").argtypes = [c.c_void_p, c.c_uint32]
    for name in ("is_checked", "kernel_count", "constant_count"):
        getattr(library, f"sm_library_{name}").argtypes = [c.c_void_p]
    library.sm_library_kernel.restype = c.POINTER(Kernel)
    library.sm_library_constant.restype = c.POINTER(FunctionConstant)
    library.sm_launch.argtypes = [c.POINTER(Dispatch)]
    library.sm_launch.restype = c.POINTER(Result)
    library.sm_free_result.argtypes = [c.POINTER(Result)]
    return library
