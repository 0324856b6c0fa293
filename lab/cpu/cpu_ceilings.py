"""Measures the peak memory and arithmetic rates of this machine's CPU, with C++ that is compiled on first use."""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".cpp")


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise SystemExit("cpu_ceilings.py: expected a C++ compiler (CXX, c++, g++ or clang++), found none")
    flags = ["-std=c++20", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cpu_ceilings.so")
        subprocess.run([compiler, *flags, str(SOURCE), "-o", str(path)], check=True)
        library = ctypes.CDLL(str(path))
    library.stream_read.restype = ctypes.c_double
    library.stream_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.fp32_peak.restype = ctypes.c_double
    library.fp32_peak.argtypes = [ctypes.c_int]
    return library


def stream_read(data: torch.Tensor, threads: int) -> float:
    """Returns the bytes per second at which `threads` threads read `data` (contiguous, larger than the caches) once."""
    return data.nbytes / float(_library().stream_read(data.data_ptr(), data.nbytes, threads))


def fp32_peak(threads: int) -> float:
    """Returns the fp32 operations per second of `threads` threads that only execute multiply-adds on registers."""
    return float(_library().fp32_peak(threads))
