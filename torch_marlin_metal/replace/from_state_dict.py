"""Reads modules through their state_dict, with the checkpoint reader for the package that created them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.checkpoints.checkpoint import DTYPE_NAMES, Checkpoint
from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.files.safetensors import DTYPES, TensorInfo
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat
from torch_marlin_metal.checkpoints.formats import awq, bitsandbytes, compressed_tensors, gptq, hqq, mlx
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.settings import Settings
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.replace.gptq_awq import UnreadableError, attribute, tensor_of

# The names of these dtypes in safetensors files. Readers store such tensors in integer dtypes of the same width.
CODED_DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}
LAYER = "layer"  # the layer's name in the temporary checkpoint; it is removed from error messages


@dataclass(frozen=True)
class Kind:
    """A kind of module, and the checkpoint format of its state_dict."""

    format: DirectoryFormat
    settings: dict[str, Any]


def kind_of(module: nn.Module) -> Kind | None:
    """Recognizes a module by the names of its classes and its tensors. Returns None for other modules."""
    classes = {cls.__name__ for cls in type(module).__mro__}
    own = {
        name for held in (module._parameters, module._buffers) for name, tensor in held.items() if tensor is not None
    }
    if "weight_packed" in own:
        return Kind(compressed_tensors.FORMAT, _compressed_tensors_settings(module))
    if "Linear4bit" in classes and "weight" in own:
        return Kind(bitsandbytes.FORMAT, {})
    if "HQQLinear" in classes:
        return Kind(hqq.FORMAT, {})
    if "scales" in own and ("qbiases" in own or "MetalLinear" in classes):
        stated = {"bits": attribute(module, "bits"), "group_size": attribute(module, "group_size")}
        return Kind(mlx.FORMAT, stated | {"mode": attribute(module, "mode") or "affine"})
    return None


def gemv_kind(module: nn.Module) -> Kind:
    """Returns the AWQ layout, gemv or gemv_fast, of a module with `[N, ...]` words."""
    qweight, K = tensor_of(module, "qweight"), attribute(module, "in_features", "infeatures")
    assert qweight is not None
    stated = attribute(module, "group_size", "q_group_size")
    version = "gemv_fast" if qweight.dtype == torch.int16 else "gemv"
    return Kind(awq.FORMAT, {"version": version, "group_size": -1 if stated in (None, K) else stated})


def words_kind(module: nn.Module, bits: int, config: dict[str, Any]) -> Kind:
    """Returns the kind of a module with codes of another width than 4 bits: GPTQ packs along K, AWQ along N."""
    qweight, scales = tensor_of(module, "qweight"), tensor_of(module, "scales")
    assert qweight is not None
    assert scales is not None
    stated = attribute(module, "group_size", "q_group_size")
    settings = {"bits": bits, "group_size": -1 if stated is None else stated}
    if qweight.shape[-1] != scales.shape[-1]:
        return Kind(awq.FORMAT, settings)
    layout = config.get("checkpoint_format") or config.get("format")
    planes = {"checkpoint_format": layout} if layout == gptq.PLANAR else {}
    return Kind(gptq.FORMAT, settings | planes)


def read_state(module: nn.Module, kind: Kind, options: ReadOptions | None = None) -> PackedWeight:
    """Reads a module's weight on the CPU, without its bias, and moves it to the module's device.

    Raises:
        UnreadableError: the reader does not support the layer. The message contains the reader's reason.
    """
    if kind.format is hqq.FORMAT and attribute(module, "W_q", "meta") is None:
        raise UnreadableError("it is not initialized")
    if kind.format is bitsandbytes.FORMAT and attribute(module.weight, "quant_state") is None:
        raise UnreadableError("its weight is not quantized yet: bitsandbytes does that when the layer is moved")
    # HQQ and bitsandbytes store most of a layer outside its parameters and buffers.
    own = {hqq.FORMAT.name: _hqq_state, bitsandbytes.FORMAT.name: _bitsandbytes_state}.get(kind.format.name)
    state = module.state_dict() if own is None else own(module)
    checkpoint = _as_checkpoint(state, kind)
    layers = list(kind.format.layers(checkpoint))
    if len(layers) != 1:
        raise UnreadableError(f"its state_dict holds {', '.join(state)}, which is no layer of {kind.format.title}")
    try:
        weight = kind.format.read(layers[0], checkpoint.settings, options or ReadOptions())
    except CheckpointError as error:
        raise UnreadableError(
            str(error).replace(f"{LAYER}.", "").replace(f"state_dict: layer {LAYER!r}: ", "")
        ) from error
    weight.bias = None
    return weight.validate().to(next(iter(state.values())).device)


def _as_checkpoint(state: dict[str, Tensor], kind: Kind) -> Checkpoint:
    file = Path("state_dict")
    checkpoint = Checkpoint(file, {}, Settings(file, kind.settings), {}, {}, {})
    for name, tensor in state.items():
        dtype = CODED_DTYPES.get(tensor.dtype) or DTYPE_NAMES.get(tensor.dtype)
        if dtype is None or tensor.is_meta:
            raise UnreadableError(f"{name} is {tensor.dtype} on {tensor.device}")
        held = tensor.detach().cpu().contiguous()
        # Convert a subclass (bitsandbytes' Params4bit) to a plain tensor, because operations would preserve the
        # subclass.
        held = held.as_subclass(Tensor).view(DTYPES[dtype][1])
        full = f"{LAYER}.{name}"
        checkpoint.loaded[full] = held
        checkpoint.tensors[full] = TensorInfo(full, file, dtype, tuple(held.shape), 0, held.nbytes)
    return checkpoint


def _compressed_tensors_settings(module: nn.Module) -> dict[str, Any]:
    """Returns the reader's settings from the module's scheme, or from the shapes if the module has no scheme."""
    weights = attribute(attribute(module, "quantization_scheme"), "weights")
    if weights is not None:
        scheme = {"num_bits": weights.num_bits, "group_size": weights.group_size}
    else:
        scales, K = tensor_of(module, "weight_scale"), attribute(module, "in_features")
        groups = scales.shape[-1] if scales is not None else 1
        scheme = {"num_bits": 4, "group_size": -1 if K is None or groups < 2 else K // groups}
    return {"config_groups": {"group_0": {"weights": scheme}}}


def _bitsandbytes_state(module: nn.Module) -> dict[str, Tensor]:
    """Returns a layer's tensors in the form of a checkpoint.

    `Linear4bit.state_dict()` would change a layer whose words bitsandbytes has rearranged, so the tensors are read
    directly.
    """
    weight: Any = module.weight
    state = weight.quant_state
    described = {"shape": list(state.shape), "blocksize": state.blocksize, "quant_type": state.quant_type}
    words, absmax, tensors = weight.data, state.absmax, {"weight.quant_map": state.code}
    if getattr(state, "packing_format_for_cpu", False):
        words, absmax = _from_cpu_packing(words), absmax.t().reshape(-1).float()
    elif state.nested:
        described |= {"nested_offset": float(state.offset), "nested_blocksize": state.state2.blocksize}
        tensors |= {"weight.nested_absmax": state.state2.absmax, "weight.nested_quant_map": state.state2.code}
    text = torch.tensor(list(json.dumps(described).encode()), dtype=torch.uint8, device="cpu")
    key = f"weight.quant_state.bitsandbytes__{state.quant_type}"
    return {"weight": words, "weight.absmax": absmax, key: text, **tensors}


def _from_cpu_packing(words: Tensor) -> Tensor:
    """Reverts the rearrangement that bitsandbytes makes in a layer's first forward on CPUs with AVX-512 BF16.

    In the rearranged bytes `[N/32, K/2, 32]`, the last dimension contains two adjacent k of 32 rows. The low nibbles
    are rows 0..15, the high nibbles rows 16..31 (bitsandbytes 0.50, functional.py).
    """
    N, half = words.shape
    blocks = words.reshape(N // 32, half, 16, 2)
    rows = torch.cat((blocks & 15, blocks >> 4), dim=2)  # [N/32, K/2, 32, 2]
    even, odd = rows[..., 0].transpose(1, 2), rows[..., 1].transpose(1, 2)
    return ((even << 4) | odd).reshape(-1, 1)


def _hqq_state(module: nn.Module) -> dict[str, Tensor]:
    meta: Any = module.meta
    assert isinstance(meta, dict)
    state = {name: value for name, value in meta.items() if isinstance(value, Tensor)}
    numbers = {name: meta[name] for name in ("nbits", "axis", "quant_scale", "quant_zero") if name in meta}
    state |= {name: torch.tensor(int(value), dtype=torch.int32, device="cpu") for name, value in numbers.items()}
    state["shape"] = torch.tensor(list(meta["shape"]), device="cpu")
    if isinstance(meta.get("packing"), str):
        state["packing"] = torch.tensor(list(meta["packing"].encode()), dtype=torch.uint8, device="cpu")
    W_q = tensor_of(module, "W_q")
    assert W_q is not None
    return {"W_q": W_q, **state}
