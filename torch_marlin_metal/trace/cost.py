"""Predicts the time of a token on a GPU from its operations, by the planner's model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_marlin_metal.extension import native
from torch_marlin_metal.gpu.device import AppleSiliconGPU
from torch_marlin_metal.gpu.planning import plan
from torch_marlin_metal.trace.operations import Product

_SCALES = {2: torch.float16, 4: torch.float32}


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
        """Returns the sum of the three."""
        return self.weights + self.dispatches + self.attention


@dataclass(frozen=True)
class Work:
    """What a GPU has to do for one token.

    Attributes:
        operations: number of operations that are no views.
        products: how often each product runs.
        cache_bytes: bytes of keys and values that attention reads.
    """

    operations: int
    products: dict[Product, int]
    cache_bytes: float


def _dispatches_of_experts(product: Product, gpu: AppleSiliconGPU, dtype: torch.dtype) -> int:
    """Returns the number of dispatches of a product with several experts, for one token."""
    _, _, dispatches, applies_gate = native.moe_plan(
        chip=gpu.name,
        cores=gpu.cores,
        tokens=1,
        top_k=product.experts,
        experts=product.experts,
        N=product.N,
        K=product.K,
        weight_format=product.weight_format,
        group_size=product.group_size,
        activations=str(dtype).removeprefix("torch."),
        rows_by_slot=product.reduces,
        reduce=product.reduces,
        variant="auto",
    )
    return len(dispatches) + (product.is_gated and not applies_gate)


def cost_of(work: Work, gpu: AppleSiliconGPU, dtype: torch.dtype, dispatch_seconds: float | None = None) -> TokenCost:
    """Returns the predicted time of a token on a GPU.

    A product with experts is counted as one product with a row for each expert that it reads. A dense product reads its
    weight once, as fast as the chip can. Any other operation costs one dispatch; the work inside it is not counted.

    Args:
        work: the operations of the token.
        gpu: the GPU.
        dtype: dtype of the activations.
        dispatch_seconds: time of one dispatch; None means the time that the planner's model assumes.
    """
    weights, dispatches = 0.0, work.operations
    launch = 0.0
    for product, count in work.products.items():
        if not product.weight_format:
            read = product.N * product.K * product.itemsize * product.experts
            weights += count * read / gpu.reachable_dram_bytes_per_second
            continue
        chosen = plan(
            1,
            product.N,
            product.K,
            weight_format=product.weight_format,
            group_size=product.group_size,
            dtype=dtype,
            scales_dtype=_SCALES.get(product.itemsize),
            gpu=gpu,
        ).chosen
        launches = [dispatch.launch_seconds for dispatch in chosen.dispatches]
        launch = max(launch, *launches)
        weights += count * product.experts * (chosen.seconds - sum(launches))
        own = len(launches) if product.experts == 1 else _dispatches_of_experts(product, gpu, dtype)
        dispatches += count * (own - 1)  # work.operations has one of them
    launch = launch or plan(1, 8, 8, gpu=gpu).chosen.dispatches[0].launch_seconds
    seconds = launch if dispatch_seconds is None else dispatch_seconds
    attention = work.cache_bytes / gpu.reachable_dram_bytes_per_second
    return TokenCost(gpu.name, weights, dispatches * seconds, attention)
