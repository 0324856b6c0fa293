"""Reads packed Linear modules that another package has created in a loaded model.

The modules are recognized by their tensors, shapes and class names. The packages are not imported.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_marlin_metal.checkpoints.formats import awq, hqq
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.layers.float_experts import WEIGHTS
from torch_marlin_metal.layers.fuse import FusedLinear
from torch_marlin_metal.layers.packed_layer import PackedLayer
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.repack import ZerosRule
from torch_marlin_metal.replace.from_state_dict import gemv_kind, kind_of, read_state, words_kind
from torch_marlin_metal.replace.gguf import is_gguf_linear, read_blocks
from torch_marlin_metal.replace.gptq_awq import UnreadableError, attribute, find_version, read_words, tensor_of
from torch_marlin_metal.replace.gptq_awq import shape_of as _stated_shape

SIZES = ("in_features", "infeatures", "num_embeddings")
PACKED_DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2),
)
ADVICE = "; save the model, and load the checkpoint with load_quantized if `torch-marlin-metal inspect` reads it"


def is_packed_linear(module: nn.Module) -> bool:
    """Returns True for a packed Linear of a known package."""
    kind = kind_of(module)
    if kind is not None and kind.format is hqq.FORMAT:
        return True  # HQQ may keep the original float layer as a child
    if next(module.children(), None) is not None:
        return False  # an adapter may expose the tensors of the layer that it wraps, but is not a packed layer
    return _has_words(module) or is_gguf_linear(module) or kind is not None


def why_unread(module: nn.Module) -> str:
    """Returns the reason why a layer with a packed weight of an unknown kind is not read, or "" for other modules.

    Such a layer has the sizes of a Linear layer or an embedding. Its weight is a Tensor subclass that wraps other
    tensors (torchao, quanto), or a matrix of integers or 8-bit floats.
    """
    if isinstance(module, PackedLayer | FusedLinear) or is_packed_linear(module) or attribute(module, *SIZES) is None:
        return ""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is None:
            continue
        kind, package = type(tensor).__name__, _package(tensor)
        if is_traceable_wrapper_subclass(tensor) and package != "torch":  # torch's are distributed or nested tensors
            return f"its {name} is a {kind} of {package}, which is not read in memory{ADVICE}"
        if tensor.dim() >= 2 and tensor.dtype in PACKED_DTYPES:
            return f"its {name} is {tensor.dtype}, in a layout of {_package(module)} that is not read{ADVICE}"
    return ""


def is_packed_experts(module: nn.Module) -> bool:
    """Returns True if a module has a mixture's experts as packed integers, like transformers' Mxfp4GptOssExperts.

    The parameters need not be tensors: after transformers has read their values, it may replace them by other objects.
    """
    stacks = [getattr(module, name, None) for name in WEIGHTS]
    if any(stack is None or isinstance(stack, nn.Module) for stack in stacks):
        return False
    return not any(getattr(getattr(stack, "dtype", None), "is_floating_point", False) for stack in stacks)


def shape_of(module: nn.Module) -> tuple[int, int] | None:
    """Returns `(N, K)` from the module's attributes, or None if it has no such attributes."""
    meta = attribute(module, "meta")  # HQQ
    shape = meta.get("shape") if isinstance(meta, dict) else None
    return (shape[0], shape[1]) if shape is not None and len(shape) == 2 else _stated_shape(module)


def read_packed_linear(
    module: nn.Module, *, gptq_version: int | None, gptq_zeros_rule: ZerosRule, config: dict[str, Any]
) -> PackedWeight:
    """Reads a module's weight without its bias and without rounding. Does not change the module.

    Args:
        module: a module for which `is_packed_linear` is True.
        gptq_version: the representation of GPTQ zero points (1: minus one, 2: unchanged). None derives the version from
            the module.
        gptq_zeros_rule: the rule for version 1, see `gptq_unpack_zeros`.
        config: the model's quantization_config, or {}.

    Raises:
        UnreadableError: the layout is unknown, no format represents the codes, or tensors contradict each other.
    """
    if attribute(module, "adapter") is not None:
        raise UnreadableError("it has an adapter, which the new layer would lose")
    if attribute(module, "_hf_hook") is not None:
        raise UnreadableError("it has an accelerate hook (weights spread over devices)")
    if attribute(module, "q_handle") is not None:
        raise UnreadableError("its package has rearranged the words for its own kernel")
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise UnreadableError("its tensors are on the meta device")
    if is_gguf_linear(module):
        return read_blocks(module)
    if not _has_words(module):
        kind = kind_of(module)
        assert kind is not None
        return read_state(module, kind)
    bits = attribute(module, "bits", "w_bit", "wbits")
    if bits not in (None, 4):
        kind = words_kind(module, bits, config)
        version = None if kind.format is awq.FORMAT else gptq_version or find_version(module, config, bits)
        return read_state(module, kind, ReadOptions(gptq_version=version, gptq_zeros_rule=gptq_zeros_rule))
    packed = read_words(module, gptq_version=gptq_version, gptq_zeros_rule=gptq_zeros_rule, config=config)
    return packed if packed is not None else read_state(module, gemv_kind(module))


def dtype_of(module: nn.Module, packed: PackedWeight) -> torch.dtype | None:
    """Returns the dtype in which the module computes, for `layer.weight.dtype`, or None if it is unknown."""
    stated = attribute(module, "compute_dtype") or attribute(
        attribute(tensor_of(module, "weight"), "quant_state"), "dtype"
    )
    if isinstance(stated, torch.dtype):
        return stated
    bias = tensor_of(module, "bias")
    if bias is not None:
        return bias.dtype
    return packed.scales.dtype if packed.scales.is_floating_point() else None


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Returns the tensors of the module's weight."""
    held = [*module._parameters.items(), *module._buffers.items()]
    return [tensor for name, tensor in held if tensor is not None and name != "bias"]


def _package(instance: object) -> str:
    return type(instance).__module__.split(".")[0]


def _has_words(module: nn.Module) -> bool:
    return all(tensor_of(module, name) is not None for name in ("qweight", "scales"))
