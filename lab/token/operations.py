"""Records the PyTorch operations of a run. On mps, every operation except views takes at least one dispatch."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

# Operations that are not counted. `_unsafe_view` is a view, although its schema does not say so. The others only
# allocate memory.
NO_DISPATCH = {
    *("aten._unsafe_view.default", "aten.empty.memory_format", "aten.empty_like.default", "aten.empty_strided.default"),
}
KINDS = ("4-bit products", "dense products", "attention", "fused operators", "copies", "other operations")
OUTSIDE = -1  # key of the part of the model outside of its decoder layers

_PRODUCTS = {"gemm", "gemm_fp32", "moe_gemm", "moe_gemm_gated", "gemm_transposed"}
_DENSE = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution", "_grouped_mm", "grouped_mm"}
_COPIES = {
    *("cat", "clone", "_to_copy", "copy_", "copy", "index_copy_", "index_copy", "index_put_", "stack"),
    *("slice_scatter", "constant_pad_nd", "repeat", "contiguous", "roll"),
}


def kind_of(operation: str) -> str:
    """Returns the kind of an operation, one of `KINDS`. `operation` is its name, for example "aten.mm.default"."""
    namespace, name = operation.split(".")[:2]
    if namespace == "torch_marlin_metal":
        return KINDS[0] if name in _PRODUCTS else KINDS[3]
    if name in _DENSE:
        return KINDS[1]
    if "scaled_dot_product" in name:
        return KINDS[2]
    return KINDS[4] if name in _COPIES else KINDS[5]


@dataclass(frozen=True)
class Product:
    """A product with a weight `[K, N]`.

    Attributes:
        N: columns of the weight.
        K: rows of the weight.
        weight_format: format of the weight, or "" for a dense weight.
        group_size: group size of the weight.
        experts: the number of expert weights that the product reads; 1 for a product without experts.
        reduces: whether the results of the experts are added.
        is_gated: whether the operation also applies a gated activation.
        itemsize: bytes of an element of a dense weight, or of a floating scale.
        has_zeros: whether the weight has zero points.
    """

    N: int
    K: int
    weight_format: str = ""
    group_size: int = 0
    experts: int = 1
    reduces: bool = False
    is_gated: bool = False
    itemsize: int = 2
    has_zeros: bool = False


def product_of(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """Returns the product that an operation computes, or None if the operation is no product."""
    kind, name = kind_of(operation), operation.split(".")[1]
    if kind == "4-bit products":
        words, scales = args[1], args[2]
        chosen = min(words.shape[0], args[3].numel()) if name in ("moe_gemm", "moe_gemm_gated") else 1
        return Product(
            N=words.shape[-1],
            K=8 * words.shape[-2],
            weight_format=kwargs["weight_format"],
            group_size=kwargs["group_size"],
            experts=chosen,
            reduces=bool(kwargs.get("reduce", False)),
            is_gated=name == "moe_gemm_gated",
            itemsize=scales.element_size(),
            has_zeros=kwargs.get("zeros") is not None,
        )
    if kind != "dense products":
        return None
    weight = args[_weight_of(operation)]
    batch = weight.shape[0] if name in ("bmm", "baddbmm") else 1
    K, N = (weight.shape[1:].numel(), weight.shape[0]) if name in ("linear", "convolution") else weight.shape[-2:]
    return Product(N=N, K=K, experts=batch, itemsize=weight.element_size())


@dataclass
class Part:
    """The operations of one decoder layer, or of the rest of the model.

    Attributes:
        counts: how often each operation runs. The keys are names such as "aten.add.Tensor".
        kinds: how many operations there are of each kind.
        products: how often each product with a weight runs.
        cache_bytes: bytes of the keys and values of one earlier token that attention reads.
    """

    counts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    products: Counter[Product] = field(default_factory=Counter)
    cache_bytes: float = 0.0


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records all operations except views.

    Args:
        model: the model that runs. A dense product counts as a product with a weight only if the weight is a parameter
            of the model.
        tokens: length of the keys and values. A dense product counts as attention if one of its factors has this
            length.
    """

    def __init__(self, model: nn.Module | None = None, layers: nn.ModuleList | None = None, tokens: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: dict[int, Part] = {OUTSIDE: Part()}
        self._current = OUTSIDE
        self._hooks: list[RemovableHandle] = []
        self._layers = layers
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters()} if model is not None else set()
        self._tokens = tokens

    @property
    def counts(self) -> Counter[str]:
        """Returns how often each operation ran, in all parts together."""
        return sum((part.counts for part in self.parts.values()), Counter())

    def __enter__(self) -> Operations:
        for index, layer in enumerate(self._layers or ()):
            self.parts[index] = Part()
            self._hooks.append(layer.register_forward_pre_hook(partial(self._enter, index)))
            self._hooks.append(layer.register_forward_hook(partial(self._enter, OUTSIDE)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def _enter(self, index: int, *_: Any) -> None:
        self._current = index

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func.is_view and func.namespace != "prim" and str(func) not in NO_DISPATCH:
            self._record(str(func), args, kwargs)
        return func(*args, **kwargs)

    def _record(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        part, kind = self.parts[self._current], kind_of(operation)
        product = product_of(operation, args, kwargs)
        cached: tuple[Tensor, ...] = args[1:3] if kind == "attention" else ()
        if product is not None and kind == "dense products":
            weight = args[_weight_of(operation)]
            if weight.untyped_storage().data_ptr() not in self._weights:
                product = None
                if self._tokens in weight.shape[-2:]:
                    kind, cached = "attention", (weight,)
        part.counts[operation] += 1
        part.kinds[kind] += 1
        if product is not None:
            part.products[product] += 1
        if self._tokens:
            part.cache_bytes += sum(_bytes(tensor) for tensor in cached) / self._tokens


def _bytes(cached: Tensor) -> float:
    """Returns the bytes of keys or values. If a head is repeated without a copy, it is counted once."""
    numbers = [size for size, stride in zip(cached.shape, cached.stride(), strict=True) if stride != 0]
    return float(math.prod(numbers) * cached.element_size())


def _weight_of(operation: str) -> int:
    """Returns the index of the weight among the arguments of a dense product."""
    return 2 if operation.split(".")[1] in ("addmm", "baddbmm") else 1
