"""Finds an operator that computes the activation between the two products of a mixture's experts."""

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
DEPTH = 3  # levels of modules to search for the limit and alpha of an activation
SAMPLES = 256  # minimum number of elements of each random input
# Magnitudes of the random inputs. The large ones reveal an activation's limit.
SIZES = (1.0, 4.0, 16.0, 64.0, 2.0**10, 2.0**14)


@dataclass(frozen=True)
class KnownActivation:
    """A gated activation that a single operator computes.

    Attributes:
        activation: see `gated_activation`.
        interleaved: True if the columns alternate between gate and up. False if they are two halves.
        swapped: True if up comes before gate.
        limit: see `gated_activation`.
        alpha: see `gated_activation`.
    """

    activation: ActivationName
    interleaved: bool = False
    swapped: bool = False
    limit: float | None = None
    alpha: float | None = None

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Computes the activation `[..., I]` of gate and up `[..., 2 * I]`."""
        one, two = (gate_up[..., ::2], gate_up[..., 1::2]) if self.interleaved else gate_up.chunk(2, -1)
        gate, up = (two, one) if self.swapped else (one, two)
        return gated_activation(gate, up, activation=self.activation, limit=self.limit, alpha=self.alpha)

    def options(self) -> dict[str, Any]:
        """Returns the arguments for `moe_gemm_gated`, which supports all activations that are not swapped."""
        options = {"activation": self.activation, "interleaved": self.interleaved}
        numbers = {"limit": self.limit, "alpha": self.alpha}
        return options | {name: number for name, number in numbers.items() if number is not None}


def find_known(activation: Activation, columns: int) -> KnownActivation | None:
    """Returns the known activation with the same results, or None if there is none.

    The function compares results on random CPU input, in each dtype. Results and input must have the same dtype.

    Args:
        activation: a function from `[..., columns]` to `[..., columns / 2]`.
        columns: the number of columns of gate and up together.
    """
    if columns % 2 or extension.refusal is not None:
        return None
    owner = activation if isinstance(activation, nn.Module) else getattr(activation, "__self__", None)
    # The caller may create the model while another default device is set.
    with torch.no_grad(), torch.device("cpu"):
        inputs = [x.to(dtype) for x in _inputs(columns) for dtype in DTYPES]
        try:
            pairs = [(x, activation(x)) for x in inputs]
            if isinstance(owner, nn.Module):
                with in_mode(owner, training=True):
                    pairs.append((inputs[0], activation(inputs[0])))
        except Exception:  # the activation needs other arguments or another device
            return None
        for known in _known(owner):
            if all(_agrees(known(x), expected) for x, expected in pairs):
                return known
    return None


def _inputs(columns: int) -> Iterator[Tensor]:
    """Yields random inputs of many magnitudes. In some of them, gate and up differ in magnitude."""
    x = random_like(torch.empty(-(-SAMPLES // columns), columns, dtype=torch.float32, device="cpu"))
    column, half = torch.arange(columns, device="cpu"), columns // 2
    for size in SIZES:
        yield size * x
        for is_large in (column < half, column >= half, column % 2 == 0, column % 2 == 1):
            yield torch.where(is_large, size, 1.0) * x


def _agrees(got: Tensor, expected: Tensor) -> bool:
    """Returns True if results are equal up to rounding. Ignores elements near the limit of the expected dtype."""
    if got.shape != getattr(expected, "shape", None) or got.dtype != expected.dtype:
        return False
    # The original may overflow earlier, because it rounds several times.
    is_small = expected.abs() < torch.finfo(expected.dtype).max / 2
    error = (got.float() - expected.float()).where(is_small, 0).abs().max()
    size = expected.float().where(is_small, 0).abs().max().clamp(min=1)
    return bool(error <= TOLERANCE[expected.dtype] * size)


def _known(owner: Any) -> Iterator[KnownActivation]:
    """Yields all known activations with the numbers found in `owner`, the object whose method is the activation."""
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
    """Returns the positive numbers among the attributes of an object and of its modules."""
    found: set[float] = set()
    for value in vars(owner).values() if depth and hasattr(owner, "__dict__") else ():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < inf:
            found.add(float(value))
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, nn.Module):
                found |= _numbers(part, depth - 1)
    return found
