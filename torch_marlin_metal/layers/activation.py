"""Finds the operator that computes the activation between the products of a mixture's experts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal import extension
from torch_marlin_metal.layer_ops import ActivationName, gated_activation
from torch_marlin_metal.layers.proof import DTYPES, agrees, agrees_in_training, random_like

Activation = Callable[[Tensor], Tensor]
DEPTH = 3  # levels of modules in which to look for the limit and alpha of an activation
SAMPLES = 256  # the least number of elements for each size of the input
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
        return options | ({} if self.limit is None else {"limit": self.limit, "alpha": self.alpha})


def find_known(activation: Activation, columns: int) -> KnownActivation | None:
    """Returns the known activation that gives equal results, or None if there is none.

    The function compares results of random input on the CPU. Results and input must have the same dtype.

    Args:
        activation: takes `[..., columns]` and returns `[..., columns / 2]`.
        columns: the columns of gate and up together.
    """
    if columns % 2 or extension.refusal is not None:
        return None
    # A model can be made while another device is the default one.
    with torch.no_grad(), torch.device("cpu"):
        x = random_like(torch.empty(len(SIZES), -(-SAMPLES // columns), columns, dtype=torch.float32))
        inputs = [x * torch.tensor(SIZES)[:, None, None], *(x[:1].to(dtype) for dtype in DTYPES)]
        try:
            pairs = [(part, activation(part)) for whole in inputs for part in whole]
        except Exception:  # the activation takes other arguments, or needs another device
            return None
        owner = getattr(activation, "__self__", None)
        for known in _known(owner):
            if all(agrees(known(part), expected) for part, expected in pairs) and (
                not isinstance(owner, nn.Module)
                or agrees_in_training(owner, lambda known=known: known(x), lambda: activation(x))  # type: ignore[misc]
            ):
                return known
    return None


def _known(owner: Any) -> Iterator[KnownActivation]:
    """Yields all that an activation can be, if it is a method of `owner`."""
    limits = list(permutations(sorted(_numbers(owner)), 2))
    for interleaved in (False, True):
        for swapped in (False, True):
            for name in ("silu", "gelu", "gelu_tanh"):
                yield KnownActivation(name, interleaved, swapped)
            for limit, alpha in limits:
                yield KnownActivation("clamped_silu", interleaved, swapped, limit, alpha)


def _numbers(owner: Any, depth: int = DEPTH) -> set[float]:
    """Returns the positive numbers among the attributes of an object and of the modules in it."""
    found: set[float] = set()
    for value in vars(owner).values() if depth and hasattr(owner, "__dict__") else ():
        if isinstance(value, float) and 0 < value < inf:
            found.add(value)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, nn.Module):
                found |= _numbers(part, depth - 1)
    return found
