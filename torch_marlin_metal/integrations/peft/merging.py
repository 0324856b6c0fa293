"""Merges adapters into packed weights. The sum is quantized, and the original weight is stored for unmerging."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor

from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.quantize.weight import quantize_weight

Weight = TypeVar("Weight")


@dataclass(frozen=True)
class MergePlan(Generic[Weight]):
    """The adapters to add in a call of `merge`, and the weight without and with these adapters."""

    names: list[str]
    original: Weight
    merged: Weight


class PackedMerging(Generic[Weight]):
    """The merging methods of peft's layers, for a base layer with a packed weight.

    Each merge starts from the original weight, adds all merged adapters, and quantizes the sum. Rounding errors of
    several merges therefore do not accumulate.
    """

    lora_A: Any  # noqa: N815 peft's name
    merged_adapters: list[str]
    planned: MergePlan[Weight] | None = None
    _last: MergePlan[Weight] | None = None  # the last merge; nn.Module would register a stack itself as a child

    def _weight(self) -> Weight:
        raise NotImplementedError

    def _set_weight(self, weight: Weight) -> None:
        """Sets another weight of the same sizes and format on the base layer, on its device."""
        raise NotImplementedError

    def _quantized_sum(self, original: Weight, names: list[str]) -> Weight:
        """Adds adapters to the original, unmerged weight, and quantizes the sum in the weight's format."""
        raise NotImplementedError

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight and quantizes the sum.

        Args:
            safe_merge: no effect, because the result is always checked before the layer changes.
            adapter_names: the adapters to merge. None means the active adapters.

        Raises:
            ValueError: the sum is not finite, or the format cannot represent it. The layer does not change.
        """
        if self.planned is None:
            self.plan_merge(adapter_names)
        plan, self.planned = self.planned, None
        if plan is None or not plan.names:
            return
        self._set_weight(plan.merged)
        self._last = plan
        self.merged_adapters.extend(plan.names)

    def plan_merge(self, adapter_names: list[str] | None = None) -> None:
        """Computes the weight that the next call of `merge` will set. The layer does not change.

        Raises:
            ValueError: see `merge`.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        original = self._weight() if self._last is None else self._last.original
        with torch.no_grad():
            merged = self._quantized_sum(original, [*self.merged_adapters, *names]) if names else original
        self.planned = MergePlan(names, original, merged)

    def unmerge(self) -> None:
        """Restores the packed weight from before the first merge, bit for bit."""
        if self._last is None:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        self._set_weight(self._last.original)
        self._last = None
        self.merged_adapters.clear()


def check_finite(name: str, *tensors: Tensor | None) -> None:
    """Raises a ValueError if the sum with adapter `name` is not finite."""
    if not all(tensor is None or bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise ValueError(
            f"merge: NaNs detected in the merged weights. The adapter {name} seems to be broken: expected finite values"
        )


def quantize_sum(total: Tensor, original: PackedWeight, names: Sequence[str]) -> PackedWeight:
    """Quantizes the sum of a weight and adapters, float32 `[N, K]`, with the format and act-order of `original`.

    Raises:
        ValueError: the format cannot represent the sum.
    """
    if original.perm is not None:
        total = total[:, original.perm]
    options: dict[str, Any] = {} if original.lut is None else {"lut": original.lut}
    scales = original.one_level().scales
    if scales.is_floating_point():
        options["scale_dtype"] = scales.dtype
    try:
        packed = quantize_weight(
            total.contiguous(), original.weight_format, original.group_size, "mse", name=original.name, **options
        )
    except ValueError as error:
        raise ValueError(
            f"merge: adapters {list(names)}: {original.weight_format} cannot hold the sum: {error}"
        ) from error
    return replace(packed, perm=original.perm, bias=original.bias, source=original.source)
