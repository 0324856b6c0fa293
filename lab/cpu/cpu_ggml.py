"""Compares `gemm` on the CPU with ggml's matrix product for Q4_0 (symmetric, groups of 32), in one interleaved run.

Needs ggml's shared libraries. They come from an installed `llama-cpp-python`, or from the folder that `--library`
names. With groups of 32, both programs multiply the same weights. Errors are relative root mean squares, compared with
an fp64 product of the exact weights and the fp32 activations. `high` means torch.set_float32_matmul_precision("high"),
which lets kernels use fewer bits.
"""

import argparse
import ctypes
import importlib.util
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import torch_marlin_metal as tmm
from lab.cpu.cpu_gemm import Call, cold_bytes, ratio, row, table, time_calls
from torch_marlin_metal.cli.bench import processor_name

OPS = torch.ops.torch_marlin_metal

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
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
             "install llama-cpp-python or name a folder by --library")  # fmt: skip


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


def from_blocks(blocks: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts Q4_0 blocks to this package's words [K/8, N] and fp16 scales [K / 32, N].

    The low nibbles of a block hold its first codes.
    """
    codes = np.concatenate([blocks["codes"] & 15, blocks["codes"] >> 4], axis=2)
    nibbles = codes.reshape(len(blocks), -1, 8).astype(np.uint32)
    words = np.bitwise_or.reduce(nibbles << np.arange(0, 32, 4, dtype=np.uint32), axis=2)
    return torch.from_numpy(words.T.copy().view(np.int32)), torch.from_numpy(blocks["scale"].T.copy())


class Kind(NamedTuple):
    """Options of a product of this package: group size, activations' dtype, and precision setting for fp32."""

    group_size: int
    dtype: torch.dtype
    precision: str = "highest"

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"group {self.group_size} {name}" + (f" {self.precision}" if self.dtype == torch.float32 else "")


KINDS = tuple(
    kind
    for group_size in (32, 128)
    for kind in (
        Kind(group_size, torch.float32), Kind(group_size, torch.float32, "high"), Kind(group_size, torch.bfloat16)
    )
)  # fmt: skip


def ours(copies: list[tuple[torch.Tensor, torch.Tensor]], kind: Kind, a: torch.Tensor, index: int) -> torch.Tensor:
    words, scales = copies[index % len(copies)]
    torch.set_float32_matmul_precision(kind.precision)  # takes 0.2 us
    return OPS.gemm(a, words, scales, weight_format="uint4b8", group_size=kind.group_size)


def error(result: np.ndarray, a: np.ndarray, weight: np.ndarray) -> str:
    """Returns the relative root mean square error against fp64, over at most eight rows."""
    exact = a[:8].astype(np.float64) @ weight
    return f"{np.linalg.norm(result[:8] - exact) / np.linalg.norm(exact):.1e}"


def compare(ggml: Ggml, K: int, N: int, rows: list[int], budget: float) -> None:
    """For one shape, compares this package with every layout of ggml that supports the weight."""
    weight = np.random.default_rng(0).standard_normal((N, K), np.float32)
    blocks = quantize(ggml, weight, GGML_TYPE_Q4_0, K // BLOCK * Q4_0.itemsize)
    number = max(2, cold_bytes() // blocks.nbytes)
    rivals = layouts(ggml, blocks, K, N, number, GGML_TYPE_Q4_0)
    words, scales = from_blocks(blocks.view(Q4_0))
    weights = {32: scales, 128: scales[::4].contiguous()}
    copies = {group: [(words.clone(), scales.clone()) for _ in range(number)] for group, scales in weights.items()}
    exact = {
        group: OPS.dequantize(words, scales, weight_format="uint4b8", group_size=group, dtype=torch.float32)
        .numpy().astype(np.float64)
        for group, scales in weights.items()
    }  # fmt: skip
    own = [str(kind) for kind in KINDS]
    table(
        f"K x N = {K} x {N}. Ratios above 1: this package is faster, at the group size and with the activations named.",
        ["M", *(f"us {name}" for name in (*rivals, *own)), *(f"{name} / {key}" for name in rivals for key in own),
         *(f"error {name}" for name in (*rivals, *own))],
    )  # fmt: skip
    for M in rows:
        a = np.random.default_rng(M).standard_normal((M, K), np.float32)
        products = {name: rival.of(a) for name, rival in rivals.items()}
        gemms = {
            str(kind): partial(ours, copies[kind.group_size], kind, torch.from_numpy(a).to(kind.dtype))
            for kind in KINDS
        }  # fmt: skip
        calls: dict[str, Call] = {name: call for name, (call, _) in products.items()} | gemms
        times = time_calls(calls, budget)
        row(
            M, *(f"{statistics.median(times[name]) * 1e6:.0f}" for name in (*rivals, *own)),
            *(ratio(times, name, key) for name in rivals for key in own),
            *(error(read(), a, exact[32]) for _, read in products.values()),
            *(error(gemms[str(kind)](0).float().numpy(), a, exact[kind.group_size]) for kind in KINDS),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, help="folder with libggml-base and libggml-cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--shapes", nargs="+", default=["4096x4096"], metavar="KxN")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds for each line")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ggml = Ggml(folder_of_libraries(arguments.library), arguments.threads)
    print(f"{processor_name()}, {arguments.threads} threads, torch {torch.__version__}; {tmm.cpu_capability().isa}")
    for shape in arguments.shapes:
        K, N = (int(size) for size in shape.split("x"))
        compare(ggml, K, N, arguments.rows, arguments.budget)


if __name__ == "__main__":
    main()
