"""Writes keys and values into transformers' static caches with one operator.

To store new tokens, a layer of a static cache runs several operations, which compute positions, copy the keys, and copy
the values. The operator `write_cache` does the same work in one dispatch. A fused attention therefore receives a
`CacheWriter` instead of its cache. The `update` of the writer calls `write_cache`. The cache object does not change.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.fuse.forwards import code_of, reads, updated_argument
from torch_marlin_metal.layers.equivalence import is_supported, random_like
from torch_marlin_metal.ops.decoder import write_cache

TOKENS = 6  # length of the caches in `is_proved`, which compares `CacheWriter` with the original


class CacheWriter:
    """Replaces a transformers `Cache` during one call of an attention module. Only `update` is not the cache's own."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __len__(self) -> int:
        return len(self._original)

    def update(self, k: Tensor, v: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        """Stores the keys and values of new tokens, and returns all keys and values, like the original."""
        layers = self._original.layers
        if layer < len(layers) and _write(layers[layer], k, v):
            return layers[layer].keys, layers[layer].values
        return self._original.update(k, v, layer, *args, **kwargs)


def _write(layer: Any, k: Tensor, v: Tensor) -> bool:
    """Writes new tokens into a layer of a cache if `write_cache` supports it. Returns True if it wrote them."""
    utils = sys.modules["transformers.cache_utils"]
    slides = type(layer) is utils.StaticSlidingWindowLayer
    needs_grad = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    if not (slides or type(layer) is utils.StaticLayer) or not is_supported(k) or k.dtype != v.dtype or needs_grad:
        return False
    tokens = k.shape[-2]
    if slides and layer.cumulative_length_int + tokens > layer.max_cache_len:
        return False  # the window is full: the oldest tokens must be dropped
    if not layer.is_initialized:
        layer.lazy_initialization(k, v)
    keys, start = layer.keys, layer.cumulative_length
    if keys.dtype != k.dtype or keys.device != k.device or start.device != k.device or k.shape[:2] != keys.shape[:2]:
        return False
    write_cache(keys, layer.values, k, v, start)
    start.add_(tokens)
    if slides:
        layer.cumulative_length_int += tokens
    return True


def static_cache(model: Any, tokens: int) -> Any:
    """Makes an empty static cache for a transformers model."""
    return sys.modules["transformers.cache_utils"].StaticCache(config=model.config, max_cache_len=tokens)


def is_replaceable(cache: Any) -> bool:
    """Returns True if a `CacheWriter` can wrap the cache: a transformers `Cache` that is not offloaded."""
    utils = sys.modules.get("transformers.cache_utils")
    if utils is None or not isinstance(cache, utils.Cache) or type(cache).update is not utils.Cache.update:
        return False
    return not cache.offloading


def cache_name(model: Any) -> str:
    """Returns the name of a model's argument for the cache. transformers 5.24 renames this argument."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def argument_of(forward: Callable[..., Any]) -> str | None:
    """Returns the name of the cache argument if the forward only calls methods of the cache, else None."""
    code = code_of(forward)
    return None if code is None or "isinstance" in code.co_names else updated_argument(forward)


@cache
def is_proved() -> bool:
    """Returns True if `CacheWriter` fills the installed transformers' static caches like their own `update`."""
    utils = sys.modules.get("transformers.cache_utils")
    if utils is None:
        return False
    k, v = (random_like(torch.empty(2, 3, TOKENS, size, device="cpu"), seed=size) for size in (4, 8))
    try:
        kinds: Any = ((utils.StaticLayer, {}), (utils.StaticSlidingWindowLayer, {"sliding_window": TOKENS - 1}))
        for kind, options in kinds:
            if reads(kind.update, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)):
                return False  # `CacheWriter` would ignore these arguments
            ours, theirs = kind(max_cache_len=TOKENS, **options), kind(max_cache_len=TOKENS, **options)
            for first, last in ((0, 3), (3, 4), (4, 5)):
                new = k[:, :, first:last], v[:, :, first:last]
                expected = theirs.update(*new)
                if not _write(ours, *new) or not all(map(torch.equal, (ours.keys, ours.values), expected)):
                    return False
                if ours.get_seq_length() != theirs.get_seq_length() or not torch.equal(
                    ours.cumulative_length, theirs.cumulative_length
                ):
                    return False
    except Exception:  # another version of transformers has other caches
        return False
    return True


def with_writer(original: Callable[..., Any], argument: str) -> Callable[..., Any]:
    """Returns a forward that wraps its cache, the argument called `argument`, in a `CacheWriter`."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(argument)
        # A compiler fuses the operations of `update` itself, and supports PyTorch's operators better than ours.
        if cache is not None and not torch.compiler.is_compiling() and is_replaceable(cache):
            kwargs[argument] = CacheWriter(cache)
        return original(self, *args, **kwargs)

    return forward
