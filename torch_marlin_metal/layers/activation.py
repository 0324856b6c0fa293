"""Finds the operator that computes the activation between the products of a mixture's experts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal import extension
from torch_marlin_metal.layers.equivalence import DTYPES, TOLERANCE, in_mode, random_like
from torch_marlin_metal.ops.decoder import ActivationName, gated_activation

Activation = Callable[[Tensor], Tensor]
DEPTH = 3  # levels of modules in which to look for the limit and alpha of an activation
SAMPLES = 256  # the least number of elements of each random input
# The sizes of the random input. The large ones change the results of an activation that has a limit.
SIZES = (1.0, 4.0, 16.0, 64.0, 2.0**10, 2.0**14)


@dataclass(frozen=True)
class KnownActivation:
    """A gated activation that one operator computes.

    Attributes:
        activation: as in `gated_activation`.
        interleaved: whether the columns alternate between gate and up. Otherwise they are two halves.
        swapped: whether up comes before gate.
        limit: as in `gated_activation`.
        alpha: as in `gated_activation`.
    """

    activation: ActivationName
    interleaved: bool = False
    swapped: bool = False
    limit: float | None = None
    alpha: float | None = None

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Returns `[..., I]` of gate and up `[..., 2 * I]`."""
        one, two = (gate_up[..., ::2], gate_up[..., 1::2]) if self.interleaved else gate_up.chunk(2, -1)
        gate, up = (two, one) if self.swapped else (one, two)
        return gated_activation(gate, up, activation=self.activation, limit=self.limit, alpha=self.alpha)

    def options(self) -> dict[str, Any]:
        """Returns the arguments of `moe_gemm_gated`, which computes all but swapped activations."""
        options = {"activation": self.activation, "interleaved": self.interleaved}
        numbers = {"limit": self.limit, "alpha": self.alpha}
        return options | {name: number for name, number in numbers.items() if number is not None}


def find_known(activation: Activation, columns: int) -> KnownActivation | None:
    """Returns the known activation that gives equal results, or None if there is none.

    The function compares results of random input on the CPU, in each dtype. Results and input must have the same dtype.

    Args:
        activation: takes `[..., columns]` and returns `[..., columns / 2]`.
        columns: the columns of gate and up together.
    """
    if columns % 2 or extension.refusal is not None:
        return None
    owner = activation if isinstance(activation, nn.Module) else getattr(activation, "__self__", None)
    # A model can be made while another device is the default one.
    with torch.no_grad(), torch.device("cpu"):
        inputs = [x.to(dtype) for x in _inputs(columns) for dtype in DTYPES]
        try:
            pairs = [(x, activation(x)) for x in inputs]
            if isinstance(owner, nn.Module):
                with in_mode(owner, training=True):
                    pairs.append((inputs[0], activation(inputs[0])))
        except Exception:  # the activation takes other arguments, or needs another device
            return None
        for known in _known(owner):
            if all(_agrees(known(x), expected) for x, expected in pairs):
                return known
    return None


def _inputs(columns: int) -> Iterator[Tensor]:
    """Yields random input of many sizes. Gate and up have different sizes, whichever columns they are in."""
    x = random_like(torch.empty(-(-SAMPLES // columns), columns, dtype=torch.float32, device="cpu"))
    is_first_half = torch.arange(columns, device="cpu") < columns // 2
    for size in SIZES:
        yield size * x
        for is_large in (
            is_first_half,
            ~is_first_half,
            *(torch.arange(columns, device="cpu") % 2 == i for i in range(2)),
        ):
            yield torch.where(is_large, size, 1.0) * x


def _agrees(got: Tensor, expected: Tensor) -> bool:
    """Returns whether results are equal except for rounding, where the expected one is far from its dtype's limit."""
    if got.shape != getattr(expected, "shape", None) or got.dtype != expected.dtype:
        return False
    # The original may exceed the range of its dtype earlier, because it rounds several times.
    is_small = expected.abs() < torch.finfo(expected.dtype).max / 2
    error = (got.float() - expected.float()).where(is_small, 0).abs().max()
    size = expected.float().where(is_small, 0).abs().max().clamp(min=1)
    return bool(error <= TOLERANCE[expected.dtype] * size)


def _known(owner: Any) -> Iterator[KnownActivation]:
    """Yields all that an activation can be, if it is a method of `owner`."""
    numbers = sorted(_numbers(owner))
    for interleaved in (False, True):
        for swapped in (False, True):
            for name in ("silu", "gelu", "gelu_tanh"):
                yield KnownActivation(name, interleaved, swapped)
            for limit in numbers:
                yield KnownActivation("limited_silu", interleaved, swapped, limit)
            for limit, alpha in product(numbers, repeat=2):
                yield KnownActivation("clamped_silu", interleaved, swapped, limit, alpha)


def _numbers(owner: Any, depth: int = DEPTH) -> set[float]:
    """Returns the positive numbers among the attributes of an object and of the modules in it."""
    found: set[float] = set()
    for value in vars(owner).values() if depth and hasattr(owner, "__dict__") else ():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < inf:
            found.add(float(value))
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, nn.Module):
                found |= _numbers(part, depth - 1)
    return found
