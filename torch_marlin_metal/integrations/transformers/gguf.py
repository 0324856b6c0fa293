"""transformers' `from_pretrained(dir, gguf_file=...)`: 4-bit tensors stay packed, the others are loaded as floats."""

from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging
from transformers.utils.quantization_config import GgufConfig, QuantizationMethod

from torch_marlin_metal.checkpoints.directory import open_reader
from torch_marlin_metal.integrations.transformers.config import MarlinConfig, Method, loading_defaults
from torch_marlin_metal.integrations.transformers.packed_checkpoint import PackedCheckpoint
from torch_marlin_metal.integrations.transformers.quantizer import MarlinQuantizer
from torch_marlin_metal.models.empty_model import COMPUTED
from torch_marlin_metal.patterns import selects

logger = logging.get_logger(__name__)


class MarlinGgufQuantizer(MarlinQuantizer):
    """`MarlinQuantizer` for one GGUF file. Matrices that are not 4 bit become floats, unless a default says "error"."""

    def __init__(self, quantization_config: "GgufConfig | MarlinConfig", **kwargs: Any) -> None:
        given = quantization_config if isinstance(quantization_config, MarlinConfig) else None
        config = MarlinConfig(**(loading_defaults() if given is None else given.get_loading_attributes()))
        if config.on_unsupported is None:
            config.on_unsupported = "dequantize"  # most files are mixed
        if given is None and quantization_config.dequantize:
            config.modules_to_not_convert = ["*"]
        config.quant_method = QuantizationMethod.GGUF  # transformers checks for it until the model is loaded
        super().__init__(config, **kwargs | {"pre_quantized": True})

    def read_header(self, gguf_file: str) -> None:
        """Opens the file; transformers calls this once it has found it."""
        reader = open_reader(gguf_file, self.quantization_config.read_options(), gguf_names="hf")
        if told := reader.mixture():
            logger.warning(told)
        self._packed = PackedCheckpoint(reader, self.quantization_config)

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Returns `dtype`, or torch's default dtype if it is None."""
        return torch.get_default_dtype() if dtype is None else dtype

    def get_state_dict(self, checkpoint_file: str, model: Any) -> dict[str, Tensor]:
        """Returns the tensors that transformers loads itself: all except those of layers that stay packed."""
        assert self._packed is not None
        return {name: tensor for name, tensor in self._packed.reader.other_tensors() if not selects(COMPUTED, name)}

    def _open(self, checkpoint_files: list[str] | None) -> None:
        """Does nothing, because `read_header` has already opened the file."""

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.quantization_config.quant_method = Method.NATIVE
        return super()._process_model_after_weight_loading(model, **kwargs)
