"""Maps the names of a checkpoint's layers and tensors to the names in a transformers model."""

from collections.abc import Callable
from typing import Any

from torch import nn

from torch_marlin_metal.layers.float_experts import ExpertFinder, is_experts


class ModelNames:
    """Maps checkpoint names to a model's names with the same rules as transformers' loader.

    Args:
        model: a transformers model before loading. Names are looked up among its current modules.
        conversions: transformers' rules for renaming. None means the rules of the model's class.
        fits: the function that tells an experts module from other modules.

    Attributes:
        experts: finds the experts modules of the model.
    """

    def __init__(
        self,
        model: Any,
        conversions: list[Any] | None = None,
        fits: Callable[[nn.Module | None], bool] = is_experts,
    ) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        found = get_model_conversion_mapping(model) if conversions is None else conversions
        self._model, self._state = model, model.state_dict()
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self.experts = ExpertFinder(self._modules, fits)
        self._renamings = [entry for entry in found if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in found if isinstance(entry, WeightConverter)]

    def tensor(self, name: str) -> str:
        """Returns the model's name for a tensor that transformers neither merges nor splits."""
        from transformers.core_model_loading import rename_source_key

        renamed, _ = rename_source_key(name, self._renamings, [], self._model.base_model_prefix, self._state)
        return name if renamed not in self._state and name in self._state else str(renamed)

    def layer(self, name: str) -> str:
        """Returns the model's name for a layer. If the model lacks the layer, returns the renamed checkpoint name."""
        prefix = f"{self._model.base_model_prefix}."
        key = self.tensor(f"{name}.weight").removesuffix(".weight")
        for candidate in (key, key.removeprefix(prefix), prefix + key, name):
            if self._has(candidate):
                return candidate
        return key

    def find(self, name: str) -> str:
        """Returns the model's name for a layer or a tensor, even if the model has no such layer or tensor."""
        layer = self.layer(name)
        if self._has(layer):
            return layer
        tensor = self.tensor(name)
        return tensor if tensor in self._state else layer

    def _has(self, layer: str) -> bool:
        return self.has_module(layer) or self.experts.find(layer) is not None

    def has_module(self, name: str) -> bool:
        return name in self._modules

    def is_converted(self, name: str) -> bool:
        """Returns True if transformers changes the tensor's values or merges the tensor with others while loading."""
        from transformers.core_model_loading import apply_converters, apply_renamings

        return apply_converters(apply_renamings(name, self._renamings), self._converters)[1] is not None
