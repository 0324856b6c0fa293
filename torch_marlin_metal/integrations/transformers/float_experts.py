"""Packs the experts of an unquantized checkpoint while transformers loads it, one expert at a time.

During loading, transformers merges the tensors of single experts into stacked parameters. `MergedOneByOne` replaces
this step, so the floats of all experts of a layer are never in memory at the same time.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.layers.experts import ExpertWeights
from torch_marlin_metal.layers.float_experts import WEIGHTS, stores_transposed
from torch_marlin_metal.load.model_tensors import initialized
from torch_marlin_metal.models.experts import ExpertLayers
from torch_marlin_metal.models.swap import inherit
from torch_marlin_metal.packed_weight import PackedWeight

Quantize = Callable[[str, Tensor], PackedWeight]


class FloatExperts:
    """The experts modules of a model that are packed during loading.

    The function `quantize` packs the weight `[N, K]` of the layer with the given name.
    """

    def __init__(self, op: str, model: nn.Module, names: Iterable[str], quantize: Quantize) -> None:
        self._op, self._quantize = op, quantize
        self._layers = {name: ExpertLayers.of(model.get_submodule(name)) for name in names}
        self._stacks: dict[str, ExpertWeights] = {}

    def parameters(self) -> set[str]:
        """Returns the names of the parameters that are packed."""
        return {f"{name}.{kind}" for name in self._layers for kind in WEIGHTS}

    def pack(self, model: nn.Module, parameter: str, experts: Iterable[Tensor]) -> None:
        """Packs one of the stacked parameters.

        The argument `experts` yields the slice of the parameter for each expert. Until loading ends, an empty parameter
        replaces the packed parameter in the model.

        Raises:
            CheckpointError: the model has another number or shape of experts.
            ValueError: the format cannot represent an expert.
        """
        owner, _, kind = parameter.rpartition(".")
        layers, module = self._layers[owner], model.get_submodule(owner)
        number, held = WEIGHTS.index(kind), module.get_parameter(kind)
        transposed, bias = stores_transposed(module), layers.shapes[number].bias

        def packed() -> Iterator[list[PackedWeight]]:
            count = 0
            for count, expert in enumerate(experts, 1):
                if count > layers.count or expert.shape != held.shape[1:]:
                    break
                matrix = expert.T.contiguous() if transposed else expert
                weight = self._quantize(f"{parameter}.{count - 1}", matrix)
                # transformers loads the biases separately. `install` writes them.
                empty = None if bias is None else bias.new_zeros(bias.shape, device=matrix.device)
                yield [replace(weight, bias=empty)]
            else:
                if count == layers.count:
                    return
                raise self._misfit(parameter, held, f"{count} experts")
            raise self._misfit(parameter, held, f"at least {count} experts, the last of {list(expert.shape)}")

        self._stacks[parameter] = layers.stack(number, packed())
        empty = nn.Parameter(held.new_empty((0, *held.shape[1:]), device="cpu"), requires_grad=False)
        setattr(module, kind, initialized(empty))

    def _misfit(self, parameter: str, held: Tensor, got: str) -> CheckpointError:
        return CheckpointError(
            f"{self._op}: {parameter}: expected {held.shape[0]} experts of {list(held.shape[1:])} as in the model, "
            f"got {got}"
        )

    def install(self, model: nn.Module) -> None:
        """Puts the packed experts into the loaded model. Experts that are not in the checkpoint stay in floats.

        Raises:
            CheckpointError: the checkpoint has only one of the two parameters of an experts module.
        """
        for name in self._layers:
            lost = [kind for kind in WEIGHTS if f"{name}.{kind}" not in self._stacks]
            if len(lost) == 1:
                raise CheckpointError(
                    f"{self._op}: experts {name!r}: expected gate_up_proj and down_proj in the checkpoint, "
                    f"it lacks {lost[0]}"
                )
        for name, layers in self._layers.items():
            gate_up, down = (self._stacks.pop(f"{name}.{kind}", None) for kind in WEIGHTS)
            if gate_up is None or down is None:
                continue
            old = model.get_submodule(name)
            for kind, stack in zip(WEIGHTS, (gate_up, down), strict=True):
                if stack.bias is not None:
                    stack.bias.data.copy_(old.get_parameter(f"{kind}_bias").detach())
            experts = layers.module(gate_up, down)
            inherit(experts, old)
            model.set_submodule(name, experts)


class MergedOneByOne(WeightConverter):  # type: ignore[misc]
    """Replaces a conversion of transformers that merges the tensors of experts.

    If the quantizer packs the merged parameter, the replacement does not merge the tensors but quantizes them, one
    expert at a time. During quantization, transformers passes functions that read the tensors instead of the tensors,
    so only one tensor is in memory at a time.
    """

    __slots__ = ()

    @classmethod
    def instead_of(cls, conversion: Any) -> Any:
        """Returns the replacement for a conversion that merges experts. Returns any other conversion unchanged."""
        if type(conversion) is not WeightConverter or len(conversion.target_patterns) != 1:
            return conversion
        merge, *join = conversion.operations
        single = len(conversion.source_patterns) == 1
        if type(merge) is not MergeModulelist or merge.dim != 0 or single != (not join):
            return conversion
        if join and (len(join) > 1 or type(join[0]) is not Concatenate or join[0].dim != 1):
            return conversion
        made = cls(
            list(conversion._original_source_patterns),
            list(conversion._original_target_patterns),
            conversion.operations,
            conversion.force_cpu,
        )
        made.scope_prefix, made.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
        return made

    def convert(self, layer_name: str, model: Any = None, hf_quantizer: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        """Merges the tensors, or packs them and returns an empty dict."""
        experts = getattr(hf_quantizer, "float_experts", None)
        if experts is None or layer_name not in experts.parameters():
            merged: dict[str, Tensor] = super().convert(layer_name, model=model, hf_quantizer=hf_quantizer, **kwargs)
            return merged
        parts = [self.collected_tensors.pop(pattern, []) for pattern in self.source_patterns]
        counts = [len(part) for part in parts]
        if len(set(counts)) > 1:
            named = ", ".join(f"{count} of {name}" for name, count in zip(self.source_patterns, counts, strict=True))
            raise CheckpointError(f"from_pretrained: {layer_name}: expected all parts of each expert, got {named}")
        experts.pack(model, layer_name, (torch.cat([read() for read in group]) for group in zip(*parts, strict=True)))
        info = kwargs.get("loading_info")
        if info is not None:
            info.missing_keys.discard(layer_name)
        return {}
