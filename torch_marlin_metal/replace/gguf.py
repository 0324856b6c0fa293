"""Reads diffusers' `GGUFLinear`, which stores the blocks of a GGUF file and decodes them at each call."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from torch_marlin_metal.checkpoints.files.safetensors import Slice
from torch_marlin_metal.checkpoints.formats.gguf_blocks import DECODERS, in_pieces
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.replace.gptq_awq import UnreadableError, attribute


def is_gguf_linear(module: nn.Module) -> bool:
    """Recognizes the layer by the name of its class and by the type of its weight."""
    classes = {cls.__name__ for cls in type(module).__mro__}
    return "GGUFLinear" in classes and attribute(module._parameters.get("weight"), "quant_type") is not None


def read_blocks(module: nn.Module) -> PackedWeight:
    """Reads a layer's weight, without its bias, on the layer's device.

    Raises:
        UnreadableError: the type is a float type or unknown, or it needs the package gguf, which is not installed.
    """
    weight: Any = module.weight
    name = str(weight.quant_type.name)
    if name not in DECODERS:
        raise UnreadableError(f"its weight is {name}; read are {', '.join(DECODERS)}")
    size, decode = DECODERS[name]
    blocks: Tensor = weight.as_tensor().detach().cpu()

    def read(part: Slice) -> Tensor:
        return blocks[part.start : part.stop].reshape(part.stop - part.start, -1, size)

    try:
        packed = in_pieces(decode, read, blocks.shape[0])
    except ImportError as error:
        raise UnreadableError(f"{name} needs the package gguf (pip install gguf)") from error
    tensors: dict[str, Any] = {key: tensor.contiguous() for key, tensor in packed.tensors().items()}
    return replace(packed, source=f"gguf {name}", **tensors).validate().to(weight.device)
