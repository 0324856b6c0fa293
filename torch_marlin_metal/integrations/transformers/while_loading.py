"""The operation by which transformers quantizes weights while it loads a checkpoint of floats."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.core_model_loading import ConversionOps


class QuantizeWhileLoading(ConversionOps):  # type: ignore[misc]
    """A transformers conversion that turns weights into 4-bit layers of the model instead of parameters."""

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
        """Quantizes the chosen weights. Returns the other tensors, which transformers makes parameters of the model.

        `input_dict` has several weights if transformers has split a tensor of the checkpoint, for example one that
        joins q, k and v.
        """
        named = input_dict if len(input_dict) > 1 else dict.fromkeys([full_layer_name], *input_dict.values())
        weights = {name: held[0] if isinstance(held, list) else held for name, held in named.items()}
        misfits = {
            name: expected
            for name, weight in weights.items()
            # Stacked experts have three dimensions, and a separate check.
            if weight.dim() < 3 and weight.shape != (expected := model.get_parameter_or_buffer(name).shape)
        }
        self._chosen.difference_update(misfits)  # transformers refuses or initializes what may not be quantized
        others = {}
        for name, weight in weights.items():
            if name in misfits and not self._chosen.isdisjoint(weights):  # then transformers compares no shapes
                shapes = f"expected {list(misfits[name])}, got {list(weight.shape)}"
                raise ValueError(f"from_pretrained: {name}: {shapes}")
            if name not in self._chosen:
                others[name] = weight
            elif self._quantize(model, name.removesuffix(".weight"), weight) and missing_keys is not None:
                missing_keys.discard(name)
        return others
