"""Damages the settings and tensors of a checkpoint, and checks the error that a reader then raises."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoint_writers import LAYER
from torch_marlin_metal import convert

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}


def fails(path: Path, match: str, kind: type = convert.CheckpointError, **options) -> None:
    with pytest.raises(kind, match=match) as caught:
        list(convert.read_layers(path, **options))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


def change(path: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces tensors of the layer. A tensor whose new value is None is removed."""
    held = load_file(path / "model.safetensors")
    for role, tensor in tensors.items():
        held.pop(f"{LAYER}.{role}", None)
        if tensor is not None:
            held[f"{LAYER}.{role}"] = tensor
    save_file(held, path / "model.safetensors")


def configure(path: Path, settings: Any) -> None:
    (path / "config.json").write_text(json.dumps({"quantization_config": settings}))
