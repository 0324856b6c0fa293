"""Importing this module makes sentence-transformers load saved models with packed layers.

    import torch_marlin_metal.integrations.sentence_transformers
    model = SentenceTransformer("a directory that SentenceTransformer.save wrote")

Such a model contains a transformers model, which `integrations.transformers` saves and loads. The other modules, such
as `Dense`, save and load a plain state_dict. This file makes their loader recognize packed layers in the state_dict.
`quantize_model` imports this file for sentence-transformers models.
"""

import functools
from pathlib import Path
from typing import Any

from sentence_transformers.base.modules.module import Module

import torch_marlin_metal.integrations.transformers  # noqa: F401  for the model inside
from torch_marlin_metal.checkpoints.formats.native import StateReader
from torch_marlin_metal.checkpoints.options import spelled
from torch_marlin_metal.load.caller import Caller
from torch_marlin_metal.load.quantized import load_all
from torch_marlin_metal.models.linear_layers import shared_weights

OP = "SentenceTransformer"


def install() -> None:
    """Wraps `Module.load_torch_weights`. A second call does nothing."""
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
        caller = Caller(op=OP, find=lambda name: name, ties=shared_weights(model), progress=False)
        with spelled(lambda option, value: f"load_quantized(model, path, {option}={value!r})"):
            load_all(model, StateReader(Path(model_name_or_path), state), caller)
        return model

    load_torch_weights.loads_packed_layers = True  # type: ignore[attr-defined]
    method: Any = load_torch_weights
    setattr(Module, "load_torch_weights", classmethod(method))  # noqa: B010  mypy refuses to assign a method


install()
