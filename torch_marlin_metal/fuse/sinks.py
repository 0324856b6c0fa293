"""Computes attention with sinks in half as many operations if there are few queries.

gpt-oss appends a learned logit, the sink, to each head's scores, and drops the sink's probability after the softmax.
PyTorch has no fused attention with sinks, so transformers uses a sequence of operators. For few queries, half of these
operators are unnecessary. The keys and values need not be copied for each head of a group. The largest score need not
be subtracted, because the softmax subtracts it anyway. Scaling and mask become part of the product.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.fuse.forwards import function_called
from torch_marlin_metal.fuse.masks import kept_with
from torch_marlin_metal.layers.equivalence import agrees, is_supported, random_like

Attention = Callable[..., tuple[Tensor, Tensor | None]]
# With more queries than this, the original function is used. A long prompt gains little from fewer dispatches, and the
# fused function needs much memory for it, because it repeats the mask for each head of a group.
MOST_QUERIES = 16
PARAMETERS = ["module", "query", "key", "value", "attention_mask", "scaling"]


def attention_of(module: nn.Module) -> tuple[str, FunctionType] | None:
    """Returns the name and object of the attention function that a module with sinks calls, or None."""
    sinks = module._parameters.get("sinks")
    return None if sinks is None or sinks.dim() != 1 else function_called(type(module).forward, PARAMETERS)


def _wide(mask: Tensor, B: int, groups: int, repeats: int) -> Tensor:
    """Reshapes a mask `[B or 1, 1, S, L]` to `[B * groups or 1, repeats * S, L]`."""
    shared, (S, L) = len(mask) == 1, mask.shape[2:]
    parts = mask.view(len(mask), 1, 1, S, L).expand(-1, 1 if shared else groups, repeats, -1, -1)
    return parts.reshape(1 if shared else B * groups, repeats * S, L)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    sinks = module.sinks
    (B, heads, S, D), (groups, L) = query.shape, key.shape[1:3]
    repeats = heads // groups
    q, k, v = query.reshape(B * groups, repeats * S, D), key.flatten(0, 1), value.flatten(0, 1)
    if mask is None:
        scores = torch.bmm(q, k.mT) * scaling
    else:
        wide = kept_with(mask, ("sinks", groups, repeats, B), module, lambda: _wide(mask, B, groups, repeats))
        scores = torch.baddbmm(wide, q, k.mT, alpha=scaling)
    # With five dimensions, the sinks are expanded without a copy.
    logits = sinks.view(1, groups, repeats, 1, 1).expand(B, -1, -1, S, -1)
    weights = torch.softmax(torch.cat((scores.view(B, groups, repeats, S, L), logits), -1), -1)[..., :-1]
    out = torch.bmm(weights.reshape(B * groups, repeats * S, L), v).view(B, heads, S, -1)
    return out.transpose(1, 2).contiguous(), weights.reshape(B, heads, S, L)


def fused_attention(original: FunctionType) -> Attention:
    """Returns an attention function with fewer operations for few queries. Other calls use the original."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        sinks: Any = module.sinks
        fits = (
            query.dim() == 4
            and query.shape[2] <= MOST_QUERIES
            and query.dtype == key.dtype == value.dtype == sinks.dtype
        )
        if attention_mask is not None:
            fits = (
                fits
                and attention_mask.shape[1:] == (1, query.shape[2], key.shape[2])
                and attention_mask.dtype == query.dtype
            )
        if fits and is_supported(query) and not dropout:
            return _attend(module, query, key, value, attention_mask, scaling)
        result: tuple[Tensor, Tensor | None] = original(
            module, query, key, value, attention_mask, scaling, dropout, **kwargs
        )
        return result

    return attention


def is_proved(module: Any, original: FunctionType) -> bool:
    """Returns True if the two functions agree on random input for this module's heads, with and without a mask."""
    sinks, groups = module.sinks, getattr(module, "num_key_value_groups", 1)
    shape = (2, len(sinks) // groups, 5, 8)
    ours = fused_attention(original)
    options = {"dtype": sinks.dtype, "device": sinks.device}
    sizes = [(2, len(sinks), 1, 8), shape, shape, (2, 1, 1, 5), (2, len(sinks), 3, 8), (2, 1, 3, 5)]
    query, key, value, mask, queries, masks = (
        random_like(torch.empty(size, **options), seed) for seed, size in enumerate(sizes)
    )
    try:
        for tensors in (
            (query, key, value, None),
            (query, key, value, mask),
            (query[:1], key[:1], value[:1], mask[:1]),
            (queries, key, value, masks),
            (queries, key, value, masks[:1]),
        ):
            pairs = zip(ours(module, *tensors, 0.3), original(module, *tensors, 0.3), strict=True)
            if not all(agrees(*pair) for pair in pairs):
                return False
    except Exception:  # the attention needs other arguments
        return False
    return True
