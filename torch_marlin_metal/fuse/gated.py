"""Finds gated feed-forward blocks and replaces their activation by one operator."""

from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.layers.activation import KnownActivation
from torch_marlin_metal.layers.equivalence import agrees, agrees_in_training, is_supported, random_like
from torch_marlin_metal.ops.decoder import ActivationName, gated_activation

Forward = Callable[..., Tensor]
Block = Callable[[nn.Module, Tensor], Tensor]
PLAIN: dict[ActivationName, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def linears_of(module: nn.Module) -> list[str]:
    """Returns the names of the Linear-like children."""
    return [name for name, child in module.named_children() if hasattr(child, "in_features")]


def activation_of(module: nn.Module) -> ActivationName | None:
    """Returns the name of the known function that a module's activation equals, or None."""
    others = [child for name, child in module.named_children() if name not in linears_of(module)]
    if len(others) != 1 or any(True for _ in others[0].parameters()):
        return None
    x = torch.linspace(-9, 9, 1001, device="cpu")
    for name, function in PLAIN.items():
        try:
            if torch.allclose(others[0](x), function(x), rtol=1e-5, atol=1e-6):
                return name
        except Exception:  # the activation does not accept a single tensor
            return None
    return None


def is_candidate(module: nn.Module) -> bool:
    """Returns True if a module has two or three projections and one known activation function."""
    return len(linears_of(module)) in (2, 3) and activation_of(module) is not None


def _blocks(names: list[str], activation: ActivationName) -> list[Block]:
    """Returns a forward for each possible order of these projections as gate, up and down."""

    def of_three(gate: str, up: str, down: str) -> Block:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            children: Any = self._modules
            gates, ups = children[gate](x), children[up](x)
            result: Tensor = children[down](gated_activation(gates, ups, activation=activation))
            return result

        return forward

    def of_two(both: str, down: str, swapped: bool, interleaved: bool) -> Block:
        known = KnownActivation(activation, interleaved, swapped)

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            children: Any = self._modules
            result: Tensor = children[down](known(children[both](x)))
            return result

        return forward

    if len(names) == 3:
        return [of_three(gate, up, down) for gate, up, down in permutations(names)]
    flags = [(swapped, interleaved) for interleaved in (False, True) for swapped in (False, True)]
    return [of_two(both, down, *flag) for both, down in permutations(names) for flag in flags]


def fused_block(module: nn.Module) -> Block | None:
    """Returns a forward with a fused activation whose results equal the original's on random input, or None."""
    activation = activation_of(module)
    names = linears_of(module)
    assert activation is not None
    weight = getattr(module._modules[names[0]], "weight", None)
    size: Any = getattr(module._modules[names[0]], "in_features", 0)
    if weight is None or weight.device.type == "meta":
        return None
    dtype = weight.dtype
    x = random_like(torch.empty(2, 3, size, dtype=dtype, device=weight.device))
    if not is_supported(x):
        return None
    try:
        expected = module.forward(x)
    except Exception:  # the block needs other arguments
        return None
    for block in _blocks(names, activation):
        try:
            if agrees(block(module, x), expected) and agrees_in_training(
                module, partial(block, module, x), partial(module.forward, x)
            ):
                return block
        except Exception:  # the shapes do not match in this order
            continue
    return None


def with_original(block: Block, original: Forward) -> Block:
    """Returns a forward that calls the original if the operators do not support the input."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return block(self, x) if is_supported(x) else original(self, x)

    return forward
