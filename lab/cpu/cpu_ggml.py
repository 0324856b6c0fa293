"""Calls ggml's matrix products on the CPU through its shared libraries, for programs that compare them with ours."""

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from lab.cpu.cpu_gemm import Call

BLOCK = 32
PART = 64  # rows that one thread quantizes at a time
Q4_0 = np.dtype([("scale", np.float16), ("codes", np.uint8, (BLOCK // 2,))])
GGML_TYPE_F32, GGML_TYPE_Q4_0 = 0, 2


class InitParams(ctypes.Structure):
    """ggml_init_params of ggml.h."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


# The result type and argument types of each function, from ggml.h, ggml-alloc.h, ggml-backend.h and ggml-cpu.h.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ggml_init": (c_void_p, InitParams),
    "ggml_new_tensor_2d": (c_void_p, c_void_p, c_int, c_int64, c_int64),
    "ggml_new_tensor_3d": (c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64),
    "ggml_log_set": (None, c_void_p, c_void_p),
    "ggml_mul_mat": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_mul_mat_id": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_swiglu": (c_void_p, c_void_p, c_void_p),
    "ggml_mul": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_add": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_view_2d": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_size_t, c_size_t),
    "ggml_new_graph": (c_void_p, c_void_p),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_quantize_chunk": (c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, c_void_p, c_void_p),
    "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_tensor_get": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_backend_dev_supports_op": (c_bool, c_void_p, c_void_p),
    "ggml_backend_reg_dev_get": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_reg_get_proc_address": (c_void_p, c_void_p, c_char_p),
    "ggml_backend_buft_name": (c_char_p, c_void_p),
    "ggml_backend_cpu_buffer_type": (c_void_p,),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_cpu_reg": (c_void_p,),
}
LOG = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda *_: None)


def folder_of_libraries(given: Path | None) -> Path:
    """Returns the folder of ggml's shared libraries. Exits with a message if there are none."""
    folders = [given] if given else []
    spec = None if given else importlib.util.find_spec("llama_cpp")
    if spec and spec.origin:
        folders += [Path(spec.origin).parent / "lib", Path(spec.origin).parent]
    for folder in folders:
        if list(folder.glob("libggml-cpu.*")):
            return folder
    where = f"in {given}" if given else "and no installed llama-cpp-python"
    sys.exit(f"lab/cpu/cpu_ggml.py: expected libggml-base and libggml-cpu, found none {where}; "
             "install llama-cpp-python or name a folder")  # fmt: skip


class Ggml:
    """The functions of ggml that a product needs."""

    def __init__(self, folder: Path, threads: int) -> None:
        libraries = [
            ctypes.CDLL(str(next(iter(sorted(folder.glob(f"lib{name}.*"))))), mode=ctypes.RTLD_GLOBAL)
            for name in ("ggml-base", "ggml-cpu")
        ]
        for name, (result, *arguments) in SIGNATURES.items():
            function = next(getattr(library, name) for library in libraries if hasattr(library, name))
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self.call("log_set", LOG, None)
        self.backend = self.call("backend_cpu_init")
        self.call("backend_cpu_set_n_threads", self.backend, threads)

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a function of ggml by its name without the prefix "ggml_"."""
        return getattr(self, name)(*arguments)

    def device(self) -> int:
        return int(self.call("backend_reg_dev_get", self.call("backend_cpu_reg"), 0))

    def buffer_types(self) -> dict[str, int]:
        """Returns the plain layout and the layouts into which the CPU backend repacks weights."""
        reg = self.call("backend_cpu_reg")
        address = self.call("backend_reg_get_proc_address", reg, b"ggml_backend_dev_get_extra_bufts")
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(address)(self.device())
        found = [self.call("backend_cpu_buffer_type")]
        while extra and (kind := extra[len(found) - 1]):
            found.append(kind)
        return {self.call("backend_buft_name", kind).decode(): kind for kind in found}

    def context(self) -> int:
        """Returns a new context for tensors whose data is allocated separately."""
        return int(self.call("init", InitParams(64 * 2**20, None, True)))


class Product:
    """Copies of one weight in one of ggml's layouts. Multiplies them by activations."""

    def __init__(
        self, ggml: Ggml, kind: int, blocks: np.ndarray, K: int, N: int, copies: int, of_type: int = GGML_TYPE_Q4_0
    ) -> None:
        self.ggml, self.K, self.N = ggml, K, N
        context = ggml.context()
        self.weights = [ggml.call("new_tensor_2d", context, of_type, K, N) for _ in range(copies)]
        if not ggml.call("backend_alloc_ctx_tensors_from_buft", context, kind):
            raise MemoryError("ggml: no memory for the weights")
        x = ggml.call("new_tensor_2d", context, GGML_TYPE_F32, K, 1)
        product = ggml.call("mul_mat", context, self.weights[0], x)
        self.is_supported = bool(ggml.call("backend_dev_supports_op", ggml.device(), product))
        for weight in self.weights if self.is_supported else ():
            ggml.call("backend_tensor_set", weight, blocks.ctypes.data, 0, blocks.nbytes)

    def of(self, a: np.ndarray) -> tuple[Call, Callable[[], np.ndarray]]:
        """Returns the call to time, and a function that reads the call's result."""
        ggml, context = self.ggml, self.ggml.context()
        x = ggml.call("new_tensor_2d", context, GGML_TYPE_F32, self.K, len(a))
        results = [ggml.call("mul_mat", context, weight, x) for weight in self.weights]
        graphs = []
        for result in results:
            graphs.append(ggml.call("new_graph", context))
            ggml.call("build_forward_expand", graphs[-1], result)
        ggml.call("backend_alloc_ctx_tensors_from_buft", context, ggml.call("backend_cpu_buffer_type"))
        ggml.call("backend_tensor_set", x, a.ctypes.data, 0, a.nbytes)

        def read() -> np.ndarray:
            out = np.empty((len(a), self.N), np.float32)
            ggml.call("backend_tensor_get", results[0], out.ctypes.data, 0, out.nbytes)
            return out

        return lambda index: ggml.call("backend_graph_compute", ggml.backend, graphs[index % len(graphs)]), read


def quantize(ggml: Ggml, weight: np.ndarray, of_type: int, row_bytes: int) -> np.ndarray:
    """Quantizes fp32 [N, K] to blocks with ggml's own function. Returns the blocks as bytes [N, row_bytes]."""
    N, K = weight.shape
    blocks = np.empty((N, row_bytes), np.uint8)

    def part(first: int) -> None:
        rows = min(PART, N - first)
        ggml.call("quantize_chunk", of_type, weight.ctypes.data, blocks.ctypes.data, first * K, rows, K, None)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(part, range(0, N, PART)))
    return blocks


def layouts(ggml: Ggml, blocks: np.ndarray, K: int, N: int, copies: int, of_type: int) -> dict[str, Product]:
    """Returns a Product for each layout that supports the type of the weight."""
    products = {name: Product(ggml, kind, blocks, K, N, copies, of_type) for name, kind in ggml.buffer_types().items()}
    return {name: product for name, product in products.items() if product.is_supported}
