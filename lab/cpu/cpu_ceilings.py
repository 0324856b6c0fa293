"""Measures the peak memory and arithmetic rates of this machine's CPU. The C++ code is compiled on first use."""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

# The product instructions: fp32 multiply-adds, byte products, bf16 dot products, tile products of bf16 and of bytes.
KINDS = ("fma_256", "fma_512", "bytes_256", "bytes_512", "bf16_512", "tile_bf16", "tile_bytes")


def compiled(source: Path) -> ctypes.CDLL:
    """Compiles a C++ file for this machine and loads it."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise SystemExit(f"{source.name}: expected a C++ compiler (CXX, c++, g++ or clang++), found none")
    flags = ["-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{source.stem}.so")
        subprocess.run([compiler, *flags, str(source), "-o", str(path)], check=True)
        return ctypes.CDLL(str(path))


@functools.cache
def _library() -> ctypes.CDLL:
    library = compiled(Path(__file__).with_suffix(".cpp"))
    library.stream_read.restype = ctypes.c_double
    library.stream_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.fp32_peak.restype = ctypes.c_double
    library.fp32_peak.argtypes = [ctypes.c_int]
    return library


def stream_read(data: torch.Tensor, threads: int) -> float:
    """Reads `data` (contiguous, larger than the caches) once with `threads` threads. Returns the bytes per second."""
    return data.nbytes / float(_library().stream_read(data.data_ptr(), data.nbytes, threads))


def fp32_peak(threads: int) -> float:
    """Returns the fp32 operations per second of `threads` threads that execute only multiply-adds on registers."""
    return float(_library().fp32_peak(threads))


def instruction_rate(kind: str, threads: int, rows: int = 16) -> float:
    """Returns the instructions per second of `threads` threads that execute only one of KINDS."""
    rate = _library().instruction_rate
    rate.restype = ctypes.c_double
    return float(rate(KINDS.index(kind), threads, rows))
