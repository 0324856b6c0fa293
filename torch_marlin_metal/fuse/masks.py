"""Converts an attention mask once per forward of the model instead of once per layer.

transformers makes a boolean mask that all layers share. At each call, PyTorch's attention converts the mask to numbers
(zeros and minus infinities), which takes three operations. The first layer with a fused attention converts the mask and
stores the result as an attribute of the mask. The other layers use the stored result.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.fuse.forwards import globals_of
from torch_marlin_metal.layers.equivalence import random_like

Attention = Callable[..., Any]
KEPT = "_torch_marlin_metal_kept"  # the mask's attribute for values computed from it


def functions_of(forward: Callable[..., Any]) -> tuple[str, Any] | None:
    """Returns (name in the forward's Python file, transformers' table of attention functions).

    Returns None if the forward does not use the table.
    """
    for name, found in globals_of(forward):
        value: Any = found
        if hasattr(type(value), "get_interface") and "sdpa" in value:
            return name, value
    return None


def kept_with(mask: Tensor, key: Any, module: Any, make: Callable[[], Tensor]) -> Tensor:
    """Returns the result of `make` for a mask. Only the first module in a forward computes the result.

    Tensors have no attributes while torch.compile traces, so then every call computes the result.

    Args:
        mask: the mask, which stores the result as an attribute.
        key: everything that the result depends on besides the mask.
        module: the calling module. PyTorch does not count the changes of a mask made in inference mode. Such a mask's
            result is computed again when the module that computed it calls again, which is in the next forward.
        make: computes the result.
    """
    if torch.compiler.is_compiling():
        return make()
    version = None if mask.is_inference() else mask._version
    kept = getattr(mask, KEPT, None)
    if kept is None or kept[0] != version:
        kept = version, {}
        setattr(mask, KEPT, kept)
    values: dict[Any, tuple[int, Tensor]] = kept[1]
    if key not in values or (version is None and values[key][0] == id(module)):
        values[key] = id(module), make()
    return values[key][1]


def _numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def converting(original: Attention) -> Attention:
    """Returns an attention function that converts a boolean mask to numbers before it calls `original`."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        mask, dtype = attention_mask, query.dtype
        if mask is not None and mask.dtype == torch.bool and kwargs.get("position_bias") is None:
            mask = kept_with(mask, dtype, module, lambda: _numbers(attention_mask, dtype))
        return original(module, query, key, value, mask, **kwargs)

    return attention


class AttentionFunctions:
    """Transformers' table of attention functions, in which PyTorch's attention receives numeric masks.

    Entries that are added to the original table later are found here too.
    """

    def __init__(self, original: Any) -> None:
        self._original = original
        self._sdpa = original["sdpa"]
        self._converting = converting(self._sdpa)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def get_interface(self, name: str, default: Attention) -> Attention:
        found: Attention = self._original.get_interface(name, default)
        return self._converting if found is self._sdpa else found


def is_proved(functions: Any) -> bool:
    """Returns True if PyTorch's attention has equal results for a boolean mask and for the same mask as numbers."""
    query, key, value = (
        random_like(torch.empty(2, 4, tokens, 8, device="cpu"), seed) for seed, tokens in enumerate((3, 5, 5))
    )
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool, device="cpu").tril(1)
    mask[1, :, 0] = False
    module = torch.nn.Module()
    try:
        original = functions["sdpa"]
        expected, got = (f(module, query, key, value, mask)[0] for f in (original, converting(original)))
    except Exception:  # the attention needs other arguments
        return False
    return torch.equal(got, expected)
