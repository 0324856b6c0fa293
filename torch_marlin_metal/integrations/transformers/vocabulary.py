"""Makes `tie_weights` and `resize_token_embeddings` of transformers models support packed vocabulary tables."""

import functools
import warnings
from typing import Any

from transformers import PreTrainedModel

from torch_marlin_metal.integrations.transformers.names import tied_modules
from torch_marlin_metal.integrations.transformers.stored import empty_model
from torch_marlin_metal.joined_weights import same_values
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.packed_weight import WEIGHT_TENSORS


def install() -> None:
    """Wraps the two methods of `PreTrainedModel`. A second call does nothing."""
    tie, resize = PreTrainedModel.tie_weights, PreTrainedModel.resize_token_embeddings
    if getattr(tie, "knows_packed_layers", False):
        return

    @functools.wraps(tie)
    def tie_weights(self: Any, missing_keys: set[str] | None = None, recompute_mapping: bool = True) -> Any:
        if missing_keys is not None or not any(isinstance(module, MarlinLinear) for module in self.modules()):
            return tie(self, missing_keys, recompute_mapping)
        keys = _tied_keys(self) if recompute_mapping else self.all_tied_weights_keys
        before, self.all_tied_weights_keys = self.all_tied_weights_keys, _tie_packed(self, keys)
        try:
            return tie(self, missing_keys, recompute_mapping=False)
        finally:
            self.all_tied_weights_keys = before

    @functools.wraps(resize)
    def resize_token_embeddings(
        self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        for what, module in (("input", self.get_input_embeddings()), ("output", self.get_output_embeddings())):
            if not isinstance(module, MarlinLinear):
                continue
            rows = module.out_features
            asked = rows if new_num_tokens is None else new_num_tokens
            if pad_to_multiple_of:
                asked = -(-asked // pad_to_multiple_of) * pad_to_multiple_of
            if asked != rows:
                raise ValueError(
                    f"resize_token_embeddings: {type(self).__name__}: expected float {what} embeddings or their "
                    f"{rows} rows, got a packed {type(module).__name__} and {asked} rows: resize before quantizing"
                )
        return resize(self, new_num_tokens, pad_to_multiple_of, *args, **kwargs)

    tie_weights.knows_packed_layers = True  # type: ignore[attr-defined]
    PreTrainedModel.tie_weights = tie_weights
    PreTrainedModel.resize_token_embeddings = resize_token_embeddings


def _tied_keys(model: Any) -> dict[str, str]:
    """Returns the keys of tied tensors according to the model's current config.

    For a head with a tied bias, transformers searches the model's tensors, and packed weights are not among them. In
    this case, the search uses a float model on the meta device.
    """
    try:
        keys: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=True)
    except ValueError:
        keys = empty_model(model).get_expanded_tied_weights_keys(all_submodels=True)
    return keys


def _tie_packed(model: Any, keys: dict[str, str]) -> dict[str, str]:
    """Makes tied packed layers share one set of tensors.

    Returns the keys of the tied layers that are not packed. Layers whose weights differ are not tied, as in
    transformers for float weights. Tying them would lose a weight, for example that of a merged adapter.
    """
    rest = dict(keys)
    for name, source in tied_modules(keys).items():
        one, other = model.get_submodule(name), model.get_submodule(source)
        if not isinstance(one, MarlinLinear) and not isinstance(other, MarlinLinear):
            continue
        if not (isinstance(one, MarlinLinear) and isinstance(other, MarlinLinear)):
            raise ValueError(
                f"tie_weights: {name!r} and {source!r}: expected two packed or two float layers, got a "
                f"{type(one).__name__} and a {type(other).__name__}"
            )
        if not same_values(one.to_packed(), other.to_packed()):
            warnings.warn(
                f"tie_weights: {name!r} and {source!r} have different packed weights, for example because an adapter "
                "was merged into one of them, and stay apart; config.tie_word_embeddings=False says so",
                stacklevel=3,
            )
        elif one.b_packed is not other.b_packed:
            for buffer in (*WEIGHT_TENSORS, "packed_format"):
                setattr(one, buffer, getattr(other, buffer))
            one.weight_format, one.group_size = other.weight_format, other.group_size
        del rest[f"{name}.weight"]
    return rest
