"""peft's LoRA layer on a packed weight: LoRA, rsLoRA and DoRA, several adapters, merging and exact unmerging."""

from dataclasses import fields, replace
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from torch import nn

from torch_marlin_metal.integrations.peft.dora import MarlinDoraVariant
from torch_marlin_metal.integrations.peft.merging import PackedMerging, check_finite, quantize_sum
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.packed_weight import WEIGHT_TENSORS, PackedWeight

# Other initializations read or change the base layer's weight as a float tensor.
INITIALIZATIONS = (True, False, "gaussian")


class MarlinLoraLinear(PackedMerging[PackedWeight], Linear):  # type: ignore[misc]
    """peft's LoRA layer on a `MarlinLinear`: LoRA, rsLoRA and DoRA, with dropout, biases and several adapters.

    peft's code adds the adapters' updates to the result of the packed layer. Merging adds the adapters to the weight
    and quantizes the sum in the base layer's format. The layer stores its original packed weight, so `unmerge` restores
    the same bits.
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

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Adds an adapter, or replaces the adapter with the same name.

        Raises:
            ValueError: the config has a setting that this layer does not support.
        """
        check_config(config)
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    def _get_in_out_features(self, module: MarlinLinear) -> tuple[int, int]:
        return module.in_features, module.out_features

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Returns the LoRA variants that this layer supports."""
        return {(): None, ("use_dora",): MarlinDoraVariant}

    def _weight(self) -> PackedWeight:
        packed: PackedWeight = self.get_base_layer().to_packed()
        return packed

    def _set_weight(self, weight: PackedWeight) -> None:
        layer: MarlinLinear = self.get_base_layer()
        made = MarlinLinear.from_packed(weight.to(layer.b_packed.device), dtype=layer.dtype)
        for name in (*WEIGHT_TENSORS, "packed_format"):
            setattr(layer, name, getattr(made, name))
        layer.group_size = made.group_size
        layer.bias = made.bias

    def _quantized_sum(self, original: PackedWeight, names: list[str]) -> PackedWeight:
        device = self.get_base_layer().b_packed.device
        original = original.to(device)
        base = original.dequantize().T  # [N, K]
        total = base
        bias = None if original.bias is None else original.bias.float()
        for name in names:
            product = self.lora_B[name].weight.float() @ self.lora_A[name].weight.float()
            delta = (product * self.scaling[name]).to(device)
            total = total + delta
            if name in self.lora_variant:
                magnitude = self.lora_magnitude_vector[name].weight
                norm = torch.linalg.vector_norm(base + delta, dim=1).to(magnitude.dtype)
                ratio = magnitude.float() / norm.float()
                total = total * ratio.unsqueeze(1)
                if bias is not None:  # DoRA scales the bias that earlier adapters added, but not the base layer's bias
                    own = original.bias.float()  # type: ignore[union-attr]
                    bias = own + ratio * (bias - own)
            if self.lora_bias[name]:
                if bias is None:
                    raise ValueError(
                        f"merge: adapter {name!r}: expected a base layer with a bias for lora_bias, got one without"
                    )
                bias = bias + self.lora_B[name].bias.float() * self.scaling[name]
            check_finite(name, total, bias)
        merged = quantize_sum(total, original, names)
        if original.bias is None or bias is None:
            return merged
        rounded = bias.to(original.bias.dtype)
        check_finite(names[-1], rounded)
        return replace(merged, bias=rounded)


def check_config(config: LoraConfig) -> None:
    """Raises a ValueError for the first setting that `MarlinLoraLinear` does not support. The message names it."""
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
