"""peft's LoRA layer on a packed weight: LoRA, rsLoRA and DoRA, several adapters, merging and exact unmerging."""

import warnings
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import nn

from torch_marlin_metal.integrations.peft.dora import MarlinDoraVariant
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.layers.packed_layer import WEIGHT_BUFFERS
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.quantize.weight import quantize_weight

# Other initializations read or change the weight of the base layer as a float tensor.
INITIALIZATIONS = (True, False, "gaussian")


@dataclass(frozen=True)
class MergePlan:
    """The adapters that a call of `merge` adds, and the weight without and with these adapters."""

    names: list[str]
    original: PackedWeight
    merged: PackedWeight


class MarlinLoraLinear(Linear):  # type: ignore[misc]
    """peft's LoRA layer on a `MarlinLinear`: LoRA, rsLoRA and DoRA, with dropout, biases and several adapters.

    peft's own code adds the adapters to the result of the packed layer. Merging quantizes the sum of weight and
    adapters again, in the base layer's format, and keeps the packed weight from before: `unmerge` restores its bits.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **kwargs: Any,
    ) -> None:
        check_config(config)
        super().__init__(base_layer, adapter_name, config, r=r, lora_alpha=lora_alpha, **kwargs)
        self.fan_in_fan_out = False  # MarlinLinear has nn.Linear's orientation, even if it replaced a Conv1D
        self._unmerged: PackedWeight | None = None
        self.planned: MergePlan | None = None

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Adds an adapter, or replaces the one of this name.

        Raises:
            ValueError: the config asks for what this layer does not support.
        """
        check_config(config)
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    def _get_in_out_features(self, module: MarlinLinear) -> tuple[int, int]:
        return module.in_features, module.out_features

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Returns the variants of LoRA that this layer supports, for peft."""
        return {(): None, ("use_dora",): MarlinDoraVariant}

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight and quantizes the sum.

        However many adapters are merged, and in however many calls, the weight is quantized once from the original.

        Args:
            safe_merge: changes nothing here: the result is always checked before the layer is changed.
            adapter_names: the adapters to merge; None means the active ones.

        Raises:
            ValueError: the sum is not finite, or the format cannot hold it. The layer is unchanged.
        """
        if self.planned is None:
            self.plan_merge(adapter_names)
        plan, self.planned = self.planned, None
        if plan is None or not plan.names:
            return
        _set_weight(self.get_base_layer(), plan.merged)
        self._unmerged = plan.original
        self.merged_adapters.extend(plan.names)

    def plan_merge(self, adapter_names: list[str] | None = None) -> None:
        """Computes the weight that the next call of `merge` sets, and changes nothing else.

        Raises:
            ValueError: as `merge`.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        base: MarlinLinear = self.get_base_layer()
        original = self._unmerged or base.to_packed()
        merged = self._quantized_sum(original, [*self.merged_adapters, *names]) if names else original
        self.planned = MergePlan(names, original, merged)

    def unmerge(self) -> None:
        """Restores the packed weight from before the first merge, bit for bit."""
        if self._unmerged is None:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        base: MarlinLinear = self.get_base_layer()
        _set_weight(base, self._unmerged.to(base.b_packed.device))
        self._unmerged = None
        self.merged_adapters.clear()

    @torch.no_grad()
    def _quantized_sum(self, original: PackedWeight, names: list[str]) -> PackedWeight:
        """Adds adapters to the weight that was never merged, and quantizes the sum in the weight's own format."""
        device = self.get_base_layer().b_packed.device
        original = original.to(device)
        base = original.dequantize().T  # [N, K]
        total, bias = base, original.bias
        for name in names:
            delta = (self.lora_B[name].weight.float() @ self.lora_A[name].weight.float()) * self.scaling[name]
            total = total + delta.to(device)
            if name in self.lora_variant:
                magnitude = self.lora_magnitude_vector[name].weight
                norm = torch.linalg.vector_norm(base + delta.to(device), dim=1).to(magnitude.dtype)
                total = total * (magnitude.float() / norm.float()).unsqueeze(1)
            if self.lora_bias[name]:
                if bias is None:
                    raise ValueError(
                        f"merge: adapter {name!r}: expected a base layer with a bias for lora_bias, got one without"
                    )
                bias = (bias.float() + self.lora_B[name].bias.float() * self.scaling[name]).to(bias.dtype)
            if not torch.isfinite(total).all() or (bias is not None and not torch.isfinite(bias).all()):
                raise ValueError(
                    f"merge: NaNs detected in the merged weights. The adapter {name} seems to be broken: "
                    "expected finite values"
                )
        if original.perm is not None:
            total = total[:, original.perm]
        options: dict[str, Any] = {} if original.lut is None else {"lut": original.lut}
        if original.scales.is_floating_point():
            options["scale_dtype"] = original.scales.dtype
        try:
            packed = quantize_weight(
                total.contiguous(), original.weight_format, original.group_size, "mse", name=original.name, **options
            )
        except ValueError as error:
            raise ValueError(
                f"merge: adapters {names}: {original.weight_format} cannot hold the sum: {error}"
            ) from error
        return replace(packed, perm=original.perm, bias=bias, source=original.source)


def check_config(config: LoraConfig) -> None:
    """Raises a ValueError that names the first setting that `MarlinLoraLinear` does not support."""
    where = "MarlinLoraLinear: LoraConfig: "
    if config.init_lora_weights not in INITIALIZATIONS:
        raise ValueError(
            f"{where}init_lora_weights: expected True, False or 'gaussian' on a packed weight, "
            f"got {config.init_lora_weights!r}"
        )
    for field in fields(config):
        value = getattr(config, field.name)
        if field.metadata.get("is_lora_variant") and field.name != "use_dora" and value:
            raise ValueError(f"{where}{field.name}: expected {field.default!r} on a packed weight, got {value!r}")


def _set_weight(layer: MarlinLinear, packed: PackedWeight) -> None:
    """Gives a layer the tensors of another weight with the same sizes and format."""
    made = MarlinLinear.from_packed(packed, dtype=layer.dtype)
    for name in (*WEIGHT_BUFFERS, "packed_format"):
        setattr(layer, name, getattr(made, name))
    layer.group_size = made.group_size
    layer.bias = made.bias
