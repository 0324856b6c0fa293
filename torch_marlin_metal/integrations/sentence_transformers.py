"""Importing this module makes sentence-transformers load models whose layers were packed in memory and saved.

    import torch_marlin_metal.integrations.sentence_transformers
    model = SentenceTransformer("a directory that SentenceTransformer.save wrote")

`integrations.transformers` saves and loads the transformers model inside. The other modules, such as `Dense`, save and
load a plain state_dict; this module makes their loader recognise packed layers in it. `quantize_model` imports this
module for models of sentence-transformers.
"""

import functools
from typing import Any

from sentence_transformers.base.modules.module import Module

import torch_marlin_metal.integrations.transformers  # noqa: F401  for the model inside
from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.formats.native import packed_weights
from torch_marlin_metal.models.empty_model import fit_layer, fit_table, linear_shape, why_not_table

OP = "SentenceTransformer"


def install() -> None:
    """Wraps `Module.load_torch_weights`; a second call does nothing."""
    original = vars(Module)["load_torch_weights"].__func__
    if getattr(original, "loads_packed_layers", False):
        return

    @functools.wraps(original)
    def load_torch_weights(cls: Any, model_name_or_path: str, *args: Any, model: Any = None, **kwargs: Any) -> Any:
        if model is None:
            return original(cls, model_name_or_path, *args, **kwargs)
        state = original(cls, model_name_or_path, *args, **kwargs)
        if not any(key.endswith(".b_packed") for key in state):
            return original(cls, model_name_or_path, *args, model=model, **kwargs)
        for weight in packed_weights(state):
            try:
                old = model.get_submodule(weight.name)
            except AttributeError as error:
                raise CheckpointError(f"{OP}: {type(model).__name__} has no layer {weight.name!r}") from error
            shape = linear_shape(old)
            if shape is not None:
                model.set_submodule(weight.name, fit_layer(OP, weight.name, shape, weight))
            elif reason := why_not_table(old):
                raise CheckpointError(f"{OP}: {weight.name!r} is 4 bit in the file, but in the model: {reason}")
            else:
                model.set_submodule(weight.name, fit_table(OP, weight.name, old, weight))
        model.load_state_dict(state)
        return model

    load_torch_weights.loads_packed_layers = True  # type: ignore[attr-defined]
    method: Any = load_torch_weights
    setattr(Module, "load_torch_weights", classmethod(method))  # noqa: B010  mypy refuses to assign a method


install()
