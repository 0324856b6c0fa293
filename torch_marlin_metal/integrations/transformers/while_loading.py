"""The operation with which transformers quantizes weights while it loads a float checkpoint."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from torch_marlin_metal.checkpoints.checkpoint import open_checkpoint
from torch_marlin_metal.checkpoints.float_layers import layers_by_module, read_matrix
from torch_marlin_metal.integrations.transformers.packed_checkpoint import OP
from torch_marlin_metal.layers.widths import SAMPLE_EXPERTS
from torch_marlin_metal.models.widths import Samples
from torch_marlin_metal.quantize.fit import sample


class QuantizeWhileLoading(ConversionOps):  # type: ignore[misc]
    """A transformers conversion that turns weights into packed layers instead of parameters of the model."""

    def __init__(self, quantize: Callable[[Any, str, Tensor], bool], chosen: set[str]) -> None:
        self._quantize = quantize
        self._chosen = chosen

    def convert(
        self,
        input_dict: dict[str, Any],
        *,
        full_layer_name: str,
        model: Any,
        missing_keys: set[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """Quantizes the selected weights. Returns the other tensors, which become parameters of the model.

        `input_dict` has several weights if transformers has split a tensor of the checkpoint, for example a joint q, k
        and v.
        """
        named = input_dict if len(input_dict) > 1 else dict.fromkeys([full_layer_name], *input_dict.values())
        weights = {name: held[0] if isinstance(held, list) else held for name, held in named.items()}
        misfits = {
            name: expected
            for name, weight in weights.items()
            # Stacked experts have three dimensions and are checked separately.
            if weight.dim() < 3 and weight.shape != (expected := model.get_parameter_or_buffer(name).shape)
        }
        self._chosen.difference_update(misfits)  # not quantized: transformers raises an error or initializes them
        others = {}
        for name, weight in weights.items():
            if name in misfits and not self._chosen.isdisjoint(weights):  # transformers does not compare these shapes
                shapes = f"expected {list(misfits[name])}, got {list(weight.shape)}"
                raise ValueError(f"from_pretrained: {name}: {shapes}")
            if name not in self._chosen:
                others[name] = weight
            elif self._quantize(model, name.removesuffix(".weight"), weight) and missing_keys is not None:
                missing_keys.discard(name)
        return others


def samples_of(model: Any, checkpoint_files: list[str] | None, allow_pickle: bool) -> Samples:
    """Returns a function that reads rows of the model's weights from the files that transformers found.

    Raises:
        ValueError: there are no files. The returned function raises it for a layer that has no tensor in the files.
    """
    if not checkpoint_files:
        raise ValueError(f"{OP}: memory: expected files, from which the weights are read twice, got a state_dict")
    checkpoint = open_checkpoint(Path(checkpoint_files[0]).parent, allow_pickle, quantized=False)
    layers = layers_by_module(model, checkpoint)

    def samples(name: str, module: nn.Module, kind: str) -> Iterable[Tensor]:
        is_down = kind == "down_proj"
        found = [one for one in layers.get(name, ()) if not one.experts or _is_down(one.name) == is_down]
        if not found:
            raise ValueError(
                f"{OP}: memory: layer {name!r} has no tensor in {checkpoint.path}: load the model, and call "
                "quantize_model"
            )
        for layer in found[:: -(-len(found) // SAMPLE_EXPERTS)]:
            yield sample(read_matrix(checkpoint, layer))

    return samples


def _is_down(name: str) -> bool:
    return any(part in ("down_proj", "w2") for part in name.split("."))
