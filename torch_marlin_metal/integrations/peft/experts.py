"""peft's LoRA on packed experts of a mixture. `target_parameters` names them like float experts."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.integrations import init_empty_weights
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

from torch_marlin_metal.integrations.peft.layer import check_config
from torch_marlin_metal.integrations.peft.merging import PackedMerging, check_finite, quantize_sum
from torch_marlin_metal.layers.experts import ExpertWeights, MarlinExperts
from torch_marlin_metal.models.experts import ExpertsOfEachToken
from torch_marlin_metal.packed_weight import PackedWeight

# Names of the stacks in transformers' experts -> names in MarlinExperts. peft wraps the first stack first.
STACKS = {"gate_up_proj": "gate_up", "down_proj": "down"}
# Settings of LoraConfig that peft does not support for stacked parameters -> the only allowed value.
UNSUPPORTED = {"lora_dropout": 0.0, "fan_in_fan_out": False, "lora_bias": False, "use_dora": False}


class MarlinLoraExperts(PackedMerging[ExpertWeights], ParamWrapper):  # type: ignore[misc]
    """peft's `ParamWrapper` for one of the two stacks of `MarlinExperts`.

    The adapter's tensors have peft's shapes and names for float experts. An adapter of packed experts therefore loads
    onto float experts, and the reverse. The wrappers are nested: the base layer of the `down_proj` wrapper is the
    `gate_up_proj` wrapper. The outermost wrapper computes the experts with all adapters and does not call the inner
    wrappers.

    Each row is multiplied by the A and B of all experts. The products of experts that the row does not use are set to
    zero. The host therefore need not know which experts are used, and never waits for the device.
    """

    def get_param(self) -> Tensor:
        """Returns a tensor with the stack's shape `[E, N, K]`, device and dtype, but with the memory of one element."""
        stack = self._weight()
        hollow = torch.empty((), device=stack.place, dtype=stack.dtype)
        return hollow.expand(stack.experts, sum(stack.sizes), stack.in_features)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **kwargs: Any) -> Tensor:
        """Computes `MarlinExperts.forward` with the active adapters of both stacks.

        Raises:
            ValueError: the batch mixes adapters.
        """
        self._check_forward_args(hidden_states, **kwargs)
        experts: MarlinExperts = self.get_base_layer()
        layers = {layer.parameter_name: layer for layer in wrappers(self)}
        active = {name: layer._active() for name, layer in layers.items()}
        if not any(active.values()):
            plain: Tensor = experts(hidden_states, top_k_index, top_k_weights)
            return plain
        gate_up = experts.gate_up(hidden_states, top_k_index)
        for adapter in active.get("gate_up_proj", ()):
            gate_up = gate_up + layers["gate_up_proj"]._rows(adapter, hidden_states, top_k_index).to(gate_up.dtype)
        inner = experts.activate(gate_up)
        result: Tensor = experts.down(inner, top_k_index, top_k_weights, reduce=True)
        for adapter in active.get("down_proj", ()):
            rows = layers["down_proj"]._rows(adapter, inner, top_k_index)
            result = result + (rows * top_k_weights.unsqueeze(-1).to(rows.dtype)).sum(1).to(result.dtype)
        return result

    def _active(self) -> list[str]:
        """Returns the adapters to compute. Unmerges if the adapters are disabled."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        if self.disable_adapters or self.merged:
            return []
        return [name for name in self.active_adapters if name in self.lora_A]

    def _rows(self, name: str, x: Tensor, ids: Tensor) -> Tensor:
        """Returns an adapter's update of the product of each row with its experts, `[T, top_k, N]`."""
        A, B = self.lora_A[name], self.lora_B[name]
        inner = A(self._cast_input_dtype(x, A.weight.dtype)).unflatten(-1, (self.num_experts, -1))
        inner = inner.unsqueeze(1) if x.dim() == 2 else inner  # [T, 1 or top_k, E, r]
        used = ids.unsqueeze(-1) == torch.arange(self.num_experts, device=ids.device)  # [T, top_k, E]
        inner = torch.where(used.unsqueeze(-1), inner, 0)
        rows = B(inner.transpose(-1, -2).flatten(-2))  # the columns of B are ordered [r, E]
        scaled: Tensor = rows * self.scaling[name]
        return scaled

    def _weight(self) -> ExpertWeights:
        stack = getattr(self.get_base_layer(), STACKS[self.parameter_name])
        if not isinstance(stack, ExpertWeights):
            raise ValueError(
                f"{self.parameter_name}: expected one packed stack for an adapter, got {type(stack).__name__}"
            )
        return stack

    def _set_weight(self, weight: ExpertWeights) -> None:
        device = self._weight().b_packed.device
        setattr(self.get_base_layer(), STACKS[self.parameter_name], weight.to(device))

    def _quantized_sum(self, original: ExpertWeights, names: list[str]) -> ExpertWeights:
        device = self._weight().b_packed.device
        original = original.to(device)
        factors = [(*self._factors(name), self.scaling[name]) for name in names]

        def merged(index: int) -> Iterator[PackedWeight]:
            start = 0
            for part, size in enumerate(original.sizes):
                own = original.to_packed(index, part)
                total = own.dequantize().T  # [N, K]
                rows = slice(start, start + size)
                for name, (A, B, scaling) in zip(names, factors, strict=True):
                    total = total + (B[index, rows] @ A[index]).to(device) * scaling
                    check_finite(name, total)
                try:
                    packed = quantize_sum(total, own, names)
                except ValueError as error:
                    raise ValueError(f"{error} (expert {index})") from error
                yield packed
                start += size

        return ExpertWeights.from_packed(
            (list(merged(index)) for index in range(original.experts)), experts=original.experts, dtype=original.dtype
        )

    def _factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Returns an adapter's A `[E, r, K]` and B `[E, N, r]` in fp32."""
        A, B = self.lora_A[name].weight.float(), self.lora_B[name].weight.float()
        return A.unflatten(0, (self.num_experts, -1)), B.unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)


def wrappers(module: nn.Module) -> Iterator[MarlinLoraExperts]:
    """Yields the wrappers of an experts module from the outermost to the innermost."""
    while isinstance(module, MarlinLoraExperts):
        yield module
        module = module.base_layer


def targeted(name: str, targets: Sequence[str]) -> list[str]:
    """Returns the parameters of an experts module in transformers that peft's rule selects as targets."""
    names = [f"{stack}{suffix}" for stack in STACKS for suffix in ("", "_bias")]
    keys = {parameter: f".{name}.{parameter}" for parameter in names}
    return [parameter for parameter, key in keys.items() if any(key.endswith(f".{target}") for target in targets)]


def check_experts(name: str, experts: MarlinExperts, config: LoraConfig) -> None:
    """Raises a ValueError if packed experts do not support a config's `target_parameters`."""
    where = f"MarlinLoraExperts: layer {name!r}: "
    if isinstance(experts, ExpertsOfEachToken):
        raise ValueError(
            f"{where}expected experts that get the router's choice, got {type(experts).__name__}, which "
            f"run on all tokens: quantize the model with exclude={name!r} to train them as floats"
        )
    if type(experts).forward is not MarlinExperts.forward:
        raise ValueError(
            f"{where}expected all experts in one process, got {type(experts).__name__}: add adapters before the model "
            "is split"
        )
    for parameter in targeted(name, config.target_parameters):
        if parameter not in STACKS:
            raise ValueError(f"{where}target_parameters: expected {' or '.join(STACKS)}, got {parameter}")
    check_config(config)
    for setting, value in UNSUPPORTED.items():
        if getattr(config, setting) != value:
            raise ValueError(
                f"{where}LoraConfig: {setting}: expected {value!r} with target_parameters of experts, "
                f"got {getattr(config, setting)!r}"
            )


def add_to_experts(
    tuner: Any, config: LoraConfig, model: nn.Module, adapter_name: str, low_cpu_mem_usage: bool
) -> list[str]:
    """Adds an adapter to all packed experts that are targets. Returns the names of the adapted parameters."""
    added = []
    names = [name for name, module in model.named_modules() if isinstance(module, MarlinExperts)]
    for name in (name.replace(".base_layer", "") for name in names):
        for parameter in targeted(name, config.target_parameters or ()):
            key = f"{name}.{parameter}"
            r = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), key), config.r)
            alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), key), config.lora_alpha)
            outer = model.get_submodule(name)
            found = {layer.parameter_name: layer for layer in wrappers(outer)}.get(parameter)
            with init_empty_weights() if low_cpu_mem_usage else contextlib.nullcontext():
                if found is not None:
                    found.update_layer(adapter_name, r, alpha, config)
                else:
                    made = MarlinLoraExperts(outer, adapter_name, parameter, config, r=r, lora_alpha=alpha)
                    if adapter_name not in tuner.active_adapters:  # an adapter is not trained before it is active
                        made.lora_A.requires_grad_(False)
                        made.lora_B.requires_grad_(False)
                    model.set_submodule(name, made)
            added.append(key)
    return added
