"""Predicts the time of a token on a GPU from its operations, with the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lab import model
from lab.model.experts import applies_gate
from lab.model.kernel import DISPATCH_SECONDS
from lab.token.operations import Product
from torch_marlin_metal.profiling import AppleSiliconGPU

_SCALES = {2: "float16", 4: "float32"}


@dataclass(frozen=True)
class TokenCost:
    """The predicted time of a token on one GPU, in seconds.

    Attributes:
        gpu: the chip's name.
        weights: time of all products, without their launches.
        dispatches: time of all launches.
        attention: time to read the keys and values of the earlier tokens.
    """

    gpu: str
    weights: float
    dispatches: float
    attention: float

    @property
    def seconds(self) -> float:
        """Returns the predicted time of the whole token."""
        return self.weights + self.dispatches + self.attention


@dataclass(frozen=True)
class Work:
    """The work of a GPU for one token.

    Attributes:
        operations: number of operations without views.
        products: each product, and how often it runs.
        cache_bytes: bytes of keys and values that attention reads.
    """

    operations: int
    products: dict[Product, int]
    cache_bytes: float


def _dispatches_of_experts(product: Product, gpu: AppleSiliconGPU, activations: str) -> int:
    """Returns the number of dispatches of a product with several experts, for one token."""
    problem = model.ExpertsProblem.of_tokens(
        1, product.experts, product.experts, product.N, product.K, reduce=product.reduces, rows_by_slot=product.reduces,
        weight_format=product.weight_format, group_size=product.group_size, activations=activations,
    )  # fmt: skip
    tiling, _ = model.best(problem, gpu)
    separate_gate = product.is_gated and not applies_gate(tiling, problem)
    return len(model.costs(problem, tiling, gpu).dispatches) + separate_gate


def cost_of(work: Work, gpu: AppleSiliconGPU, dtype: torch.dtype, dispatch_seconds: float | None = None) -> TokenCost:
    """Returns the predicted time of a token on a GPU.

    A product with experts is counted as one product with a row for each expert that it reads. A dense product reads its
    weight once, as fast as the chip can. Any other operation costs one dispatch; its memory traffic and instructions
    are not counted.

    Args:
        work: the operations of the token.
        gpu: the GPU.
        dtype: dtype of the activations.
        dispatch_seconds: time of one dispatch; None means the time that the model assumes.
    """
    activations = str(dtype).removeprefix("torch.")
    weights, dispatches = 0.0, work.operations
    for product, count in work.products.items():
        if not product.weight_format:
            read = product.N * product.K * product.itemsize * product.experts
            weights += count * read / gpu.reachable_dram_bytes_per_second
            continue
        problem = model.Problem(
            1, product.N, product.K, product.weight_format, product.group_size, activations,
            _SCALES.get(product.itemsize),
        )  # fmt: skip
        tiling, predicted = model.best(problem, gpu)
        parts = model.costs(problem, tiling, gpu).dispatches
        weights += count * product.experts * (predicted - sum(part.launch_seconds for part in parts))
        own = len(parts) if product.experts == 1 else _dispatches_of_experts(product, gpu, activations)
        dispatches += count * (own - 1)  # work.operations has one of them
    seconds = DISPATCH_SECONDS if dispatch_seconds is None else dispatch_seconds
    attention = work.cache_bytes / gpu.reachable_dram_bytes_per_second
    return TokenCost(gpu.name, weights, dispatches * seconds, attention)
