"""transformers' `from_pretrained(dir, gguf_file=...)`: packed tensors stay packed, others are loaded as floats."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
from transformers.utils.quantization_config import GgufConfig, QuantizationMethod

from torch_marlin_metal.checkpoints.directory import open_reader
from torch_marlin_metal.checkpoints.errors import UnknownArchitecture
from torch_marlin_metal.checkpoints.files.gguf import read_gguf
from torch_marlin_metal.checkpoints.formats.gguf import unknown_architecture
from torch_marlin_metal.checkpoints.formats.gguf_keys import FileSettings
from torch_marlin_metal.checkpoints.formats.gguf_names import ARCHITECTURES
from torch_marlin_metal.integrations.transformers.config import MarlinConfig, Method, loading_defaults
from torch_marlin_metal.integrations.transformers.packed_checkpoint import PackedCheckpoint
from torch_marlin_metal.integrations.transformers.quantizer import MarlinQuantizer
from torch_marlin_metal.layers.float_experts import SPLIT, STACKED
from torch_marlin_metal.models.gguf_layers import model_type
from torch_marlin_metal.models.gguf_settings import corrected
from torch_marlin_metal.models.linear_layers import COMPUTED
from torch_marlin_metal.patterns import selects

# Architectures whose configs this module makes. transformers makes those of `GGUF_CONFIG_ARCHS` itself. Llama 4 is left
# out, because transformers has no table for its text model.
MODEL_TYPES = {
    name: known.model_type
    for name, known in ARCHITECTURES.items()
    if name != "llama4" and name not in GGUF_CONFIG_ARCHS
}


class MarlinGgufQuantizer(MarlinQuantizer):
    """`MarlinQuantizer` for a single GGUF file."""

    def __init__(self, quantization_config: "GgufConfig | MarlinConfig", **kwargs: Any) -> None:
        given = quantization_config if isinstance(quantization_config, MarlinConfig) else None
        config = MarlinConfig(**(loading_defaults() if given is None else given.get_loading_attributes()))
        if given is None and quantization_config.dequantize:
            config.modules_to_not_convert = ["*"]
        config.quant_method = QuantizationMethod.GGUF  # transformers compares the method with this one during loading
        super().__init__(config, **kwargs | {"pre_quantized": True})

    def read_header(self, gguf_file: str) -> None:
        """Opens the file. transformers calls this method after it has found the file."""
        reader = open_reader(gguf_file, self.quantization_config.read_options(), gguf_names="hf")
        self._packed = PackedCheckpoint(reader, self.quantization_config)

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Returns `dtype`, or torch's default dtype if it is None."""
        return torch.get_default_dtype() if dtype is None else dtype

    def get_state_dict(self, checkpoint_file: str, model: Any) -> dict[str, Tensor]:
        """Returns the tensors that transformers loads itself: all tensors outside the layers and experts."""
        assert self._packed is not None
        others = self._packed.reader.others()
        return {name: read() for name, read, _ in others if not (selects(COMPUTED, name) or _is_of_expert(name))}

    def _open(self, checkpoint_files: list[str] | None, has_parts: bool) -> None:
        """Does nothing, because `read_header` has already opened the file."""

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.quantization_config.quant_method = Method.NATIVE
        return super()._process_model_after_weight_loading(model, **kwargs)


def _is_of_expert(name: str) -> bool:
    layer = name.removesuffix(".weight").removesuffix(".bias")
    return any(kind.fullmatch(layer) for kind in (STACKED, SPLIT))


def reads_all_settings(original: Any, active: Callable[[], bool]) -> Any:
    """Wraps transformers' `load_gguf_checkpoint`, so that the config contains all settings of the file.

    The function `active` returns True while this package loads checkpoints.
    """

    @functools.wraps(original)
    def load_gguf_checkpoint(gguf_checkpoint_path: str, return_tensors: bool = False, **kwargs: Any) -> Any:
        settings = None if return_tensors or not active() else _settings(Path(gguf_checkpoint_path))
        if settings is not None:
            return {"config": settings}
        try:
            return original(gguf_checkpoint_path, return_tensors=return_tensors, **kwargs)
        except ValueError as error:
            architecture = str(read_gguf(Path(gguf_checkpoint_path))[0].get("general.architecture", ""))
            if architecture in ARCHITECTURES or not active():
                raise
            raise UnknownArchitecture(unknown_architecture(Path(gguf_checkpoint_path), architecture)) from error

    return load_gguf_checkpoint


def _settings(path: Path) -> dict[str, Any] | None:
    """Returns a file's settings in the form of transformers' config.json, or None for other architectures."""
    metadata, tensors = read_gguf(path)
    architecture = str(metadata.get("general.architecture", ""))
    kind = MODEL_TYPES.get(architecture)
    if kind is None:
        return None
    kind = model_type(architecture, kind, FileSettings(metadata, tensors))
    settings: dict[str, Any] = {"model_type": kind}
    for key, name in GGUF_CONFIG_MAPPING["tokenizer"].items():
        settings[name] = metadata.get(f"tokenizer.{key}")
    # Numbers come first, because the settings of layers and rotary embeddings depend on them.
    numbers = corrected(CONFIG_MAPPING[kind](), metadata, tensors)
    settings |= {name: value for name, value in numbers.items() if isinstance(value, bool | int | float)}
    return settings | corrected(CONFIG_MAPPING[kind](**settings), metadata, tensors)
