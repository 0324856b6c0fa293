"""Merging of adapters into packed weights: the sum is quantized again, and the old weight is kept for unmerging."""

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
    """The adapters that a call of `merge` adds, and the weight without and with these adapters."""

    names: list[str]
    original: Weight
    merged: Weight


class PackedMerging(Generic[Weight]):
    """The merging methods of peft's layers, for a base layer with a packed weight.

    Each merge starts from the original weight, adds all adapters that are merged by then, and quantizes the sum. The
    rounding errors of several merges therefore do not add up.
    """

    lora_A: Any  # noqa: N815  the name that peft gives it
    merged_adapters: list[str]
    planned: MergePlan[Weight] | None = None
    _last: MergePlan[Weight] | None = None  # of the last merge; in a plan, a module does not become part of the layer

    def _weight(self) -> Weight:
        """Returns the present weight of the base layer."""
        raise NotImplementedError

    def _set_weight(self, weight: Weight) -> None:
        """Gives the base layer another weight with the same sizes and format, on the base layer's device."""
        raise NotImplementedError

    def _quantized_sum(self, original: Weight, names: list[str]) -> Weight:
        """Adds adapters to the weight that was never merged, and quantizes the sum in the weight's own format."""
        raise NotImplementedError

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight and quantizes the sum.

        Args:
            safe_merge: has no effect, because the result is always checked before the layer is changed.
            adapter_names: the adapters to merge; None means the active ones.

        Raises:
            ValueError: the sum is not finite, or the format cannot hold it. The layer is unchanged.
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
        """Computes the weight that the next call of `merge` sets, and changes nothing else.

        Raises:
            ValueError: as `merge`.
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
    """Raises a ValueError if a sum with the adapter of this name is not finite."""
    if not all(tensor is None or bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise ValueError(
            f"merge: NaNs detected in the merged weights. The adapter {name} seems to be broken: expected finite values"
        )


def quantize_sum(total: Tensor, original: PackedWeight, names: Sequence[str]) -> PackedWeight:
    """Quantizes the sum of a weight and adapters, float32 `[N, K]`, in the format and act-order of `original`.

    Raises:
        ValueError: the format cannot hold the sum.
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
