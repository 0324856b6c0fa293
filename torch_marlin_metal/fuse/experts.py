"""Computes the activation between the products of a mixture's packed experts in one operator."""

import copy
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.fuse.proof import agrees, random_like, runs
from torch_marlin_metal.layer_ops import gated_activation
from torch_marlin_metal.layers.experts import MarlinExperts

Activation = Callable[[Tensor], Tensor]
DEPTH = 3  # levels of modules in which to look for the limit and alpha of an activation


def _numbers(owner: Any, depth: int = DEPTH) -> set[float]:
    """Returns the positive numbers among the attributes of an object and of the modules in it."""
    found: set[float] = set()
    for value in vars(owner).values() if depth and hasattr(owner, "__dict__") else ():
        if isinstance(value, float) and value > 0:
            found.add(value)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, nn.Module):
                found |= _numbers(part, depth - 1)
    return found


def _candidates(activation: Activation) -> Iterator[dict[str, Any]]:
    for name in ("silu", "gelu", "gelu_tanh"):
        yield {"activation": name}
    numbers = sorted(_numbers(getattr(activation, "__self__", None)))
    for limit, alpha in permutations(numbers, 2):
        yield {"activation": "clamped_silu", "limit": limit, "alpha": alpha}


def _halves(gate_up: Tensor, is_interleaved: bool, is_swapped: bool) -> tuple[Tensor, Tensor]:
    one, two = (gate_up[..., ::2], gate_up[..., 1::2]) if is_interleaved else gate_up.chunk(2, -1)
    return (two, one) if is_swapped else (one, two)


def fused_activation(experts: MarlinExperts) -> Activation | None:
    """Returns a function that computes the experts' activation in one operator, or None if no known form is equal."""
    (activation,) = experts._activation
    # The input contains large numbers too, so that a wrong limit changes the results.
    scales = experts.gate_up.scales
    x = (
        random_like(torch.empty(4, 64, device=scales.device))
        * torch.tensor([1.0, 4.0, 16.0, 64.0], device=scales.device)[:, None]
    )
    try:
        expected = activation(x)
    except Exception:  # the activation takes other arguments
        return None
    orders = [(interleaved, swapped) for interleaved in (False, True) for swapped in (False, True)]
    for options in _candidates(activation):
        for order in orders:
            if all(map(agrees, gated_activation(*_halves(x, *order), **options), expected)):
                return _FusedActivation(activation, order, options)
    return None


class _FusedActivation:
    """The activation of experts in one operator. Pickle stores the original activation in its place."""

    def __init__(self, original: Activation, order: tuple[bool, bool], options: dict[str, Any]) -> None:
        self._original, self._order, self._options = original, order, options

    def __call__(self, gate_up: Tensor) -> Tensor:
        if not runs(gate_up):
            return self._original(gate_up)
        return gated_activation(*_halves(gate_up, *self._order), **self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_FusedActivation":
        return _FusedActivation(copy.deepcopy(self._original, memo), self._order, self._options)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unchanged, (self._original,)


def _unchanged(original: Activation) -> Activation:
    return original
