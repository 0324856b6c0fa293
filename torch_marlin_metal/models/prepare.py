"""Compiles the Metal kernels of a model before its first call."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from torch_marlin_metal.layers.embedding import MarlinEmbedding
from torch_marlin_metal.layers.equivalence import check_module
from torch_marlin_metal.layers.experts import ExpertWeights, MarlinExperts
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.layers.packed_layer import PackedLayer
from torch_marlin_metal.packed_weight import WEIGHT_TENSORS

ROWS = (1, 16, 128, 512)  # one token, and prompts of several lengths, which may use different kernels
MOST_THREADS = 8  # a compiling thread only waits for one of Metal's compiler processes
# Before torch 2.15, two threads that use PyTorch kernels for the first time can crash the process, because both change
# a table without a lock.
TORCH_LOCKS_ITS_KERNELS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)

Tasks = dict[tuple[Any, ...], Callable[[], None]]


def prepare(
    model: nn.Module,
    rows: Iterable[int] = ROWS,
    *,
    dtype: torch.dtype | None = None,
    progress: bool = True,
) -> int:
    """Compiles the Metal kernels of a model's packed layers, so that its first calls do not wait for compilation.

    Metal compiles a kernel at its first use. macOS caches the result for later processes, until macOS, PyTorch or this
    package is updated. Kernels that the process has already compiled are not compiled again. Layers that are not on
    mps, and `MarlinExperts` with a `top_k` of None, are skipped: their first call compiles their kernels.

    Args:
        model: a model or a layer, on its device.
        rows: row counts M of later products: sequences times tokens for a prompt, and 1 for a generated token.
        dtype: dtype of the activations. None means each layer's `.weight.dtype`.
        progress: True to show a progress bar.

    Returns:
        The number of distinct products whose kernels are compiled. Each row count is a separate product.

    Raises:
        TypeError: `model` is not a module.
        ValueError: a row count is below 1.
        RuntimeError: a kernel does not compile. The message names it. All other kernels are compiled.

    Examples:
        >>> model = nn.Sequential(tmm.MarlinLinear.from_linear(nn.Linear(64, 32)))
        >>> device = "mps" if torch.backends.mps.is_available() else "cpu"
        >>> compiled = tmm.prepare(model.to(device), progress=False)  # 0 on a CPU, which has nothing to compile
    """
    check_module("prepare", model)
    listed = list(rows) if isinstance(rows, Iterable) else []
    if not listed or not all(isinstance(M, int) and M >= 1 for M in listed):
        raise ValueError(f"prepare: rows: expected numbers of at least 1, got {listed or rows!r}")
    rows = sorted(set(listed))
    mixtures: Tasks = {}
    products: Tasks = {}
    for experts in model.modules():
        if isinstance(experts, MarlinExperts) and experts.top_k and experts.down.place.type == "mps":
            for M in rows:
                for stack in (experts.gate_up, experts.down):
                    if not isinstance(stack, ExpertWeights):
                        continue  # the first call compiles its kernels
                    is_down, kind = stack is experts.down, dtype or stack.dtype
                    kind = experts.down_dtype or kind if is_down else kind
                    task = partial(_run_without_experts, experts, M, experts.top_k, kind, is_down)
                    mixtures[(is_down, experts.top_k, *_kind(stack, M, kind))] = task
    for layer in model.modules():
        if isinstance(layer, MarlinEmbedding) or not isinstance(layer, MarlinLinear):
            continue
        if layer.b_packed.device.type == "mps":
            kind = layer.product_dtype or dtype or layer.dtype
            for M in rows:
                products[_kind(layer, M, kind)] = partial(_compile, layer, M, kind)
    count, most = len(mixtures) + len(products), min(MOST_THREADS, os.cpu_count() or 1)
    with tqdm(total=count, desc="Compiling Metal kernels", unit="product", disable=not progress) as bar:
        # The tasks for mixtures use PyTorch kernels. The tasks for other products do not, except the probe of the GPU,
        # which one thread runs while the others wait.
        futures = _run(mixtures, most if TORCH_LOCKS_ITS_KERNELS else 1, bar.update)
        futures += _run(products, most, bar.update)
    for future in futures:
        future.result()
    return count


def _run(tasks: Tasks, threads: int, ended: Callable[[], object]) -> list[Future[None]]:
    """Runs tasks in threads and calls `ended` after each. Returns after all tasks have ended."""
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(task) for task in tasks.values()]
        for future in futures:
            future.add_done_callback(lambda _: ended())
    return futures


def _kind(layer: PackedLayer, M: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Returns a key for the layer's product with M rows. Products with equal keys use the same kernels."""
    tensors = [*(layer._buffers[name] for name in WEIGHT_TENSORS), layer.bias]
    kinds = [None if t is None else (t.shape, t.dtype, t.storage_offset() % 4) for t in tensors]
    return (M, dtype, layer.weight_format, layer.group_size, *kinds)


def _compile(layer: MarlinLinear, M: int, dtype: torch.dtype) -> None:
    """Compiles the kernels of a layer's product with M rows of activations. Uses no PyTorch kernel."""
    tensors, named = layer._arguments(layer.bias)
    torch.ops.torch_marlin_metal.compile_gemm(*tensors, **named, M=M, dtype=dtype)


def _run_without_experts(experts: MarlinExperts, T: int, top_k: int, dtype: torch.dtype, is_down: bool) -> None:
    """Compiles the kernels of a product by running it on rows that have no expert.

    The product then reads no weight and multiplies nothing. For gate and up, the activation runs after the product.
    """
    stack = experts.down if is_down else experts.gate_up
    device = stack.place
    ids = torch.full((T, top_k), -1, device=device)
    size = (T, top_k, stack.in_features) if is_down else (T, stack.in_features)
    a = torch.zeros(size, dtype=dtype, device=device)
    with torch.no_grad():
        if is_down:
            stack(a, ids, torch.zeros(T, top_k, device=device), reduce=True)
        else:
            experts.inner(a, ids)
