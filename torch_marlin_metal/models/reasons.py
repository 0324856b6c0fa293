"""Determines why quantizing a model, or replacing its packed layers, leaves some layers unchanged."""

from collections import defaultdict

import torch
from torch import nn
from torch.nn.utils import parametrize

from torch_marlin_metal.layers.embedding import why_not_embedding
from torch_marlin_metal.layers.float_experts import WEIGHTS, is_experts
from torch_marlin_metal.models.experts import why_not_experts
from torch_marlin_metal.models.linear_layers import is_linear, why_not_linear
from torch_marlin_metal.models.swap import Target
from torch_marlin_metal.packed_weight import FLOAT_DTYPES
from torch_marlin_metal.replace.detect import tensors_of

KEPT = 'it belongs to the vocabulary, and vocabulary_format is "none"'
# Class of a transformers module (5.23) -> its Linear layers that the class does not call. Instead, the forward of the
# class multiplies or rearranges the weights of these layers itself.
TAKEN = {
    "DisentangledSelfAttention": ("in_proj",),
    "FalconMambaMixer": ("dt_proj",),
    "JambaMambaMixer": ("dt_proj",),
    "LSHSelfAttention": ("query_key", "value"),
    "LayoutLMv2Encoder": ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"),
    "LayoutLMv3Encoder": ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"),
    "LongcatFlashTopkRouter": ("classifier",),
    "MambaMixer": ("dt_proj",),
    "MobileBertLMPredictionHead": ("decoder", "dense"),
    "RwkvFeedForward": ("value",),  # the model divides it by powers of two for inference
    "RwkvSelfAttention": ("output",),
    "WavLMAttention": ("k_proj", "out_proj", "q_proj", "v_proj"),
}


def why_not_quantized(model: nn.Module, targets: list[Target], staying: dict[int, str]) -> dict[int, str]:
    """Returns `{id(module): reason}` for modules that are not quantized. `staying` are those that stay by default."""
    taken = taken_weights(model)
    why = {
        id(target.module): taken.get(id(target.module))
        or (why_not_experts if is_experts(target.module) else _why_not)(target.module)
        for target in targets
    }
    for target in targets:
        if default := staying.get(id(target.module)):
            advice = "" if default == KEPT else "; name it in include to quantize it"
            why[id(target.module)] = f"{default}{advice}"
    reasons = {module: reason for module, reason in why.items() if reason}
    users: dict[int, list[tuple[str, nn.Module]]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users[id(parameter)].append((name, module))
    quantizable = {id(target.module) for target in targets} - reasons.keys()
    for target in targets:
        if id(target.module) not in quantizable:
            continue
        names = WEIGHTS if is_experts(target.module) else ("weight",)
        for weight in (getattr(target.module, name) for name in names):
            for name, module in users[id(weight)]:
                if id(module) not in quantizable:
                    advice = "" if id(module) in why or why_not_embedding(module) else "; vocabulary_format packs both"
                    reasons[id(target.module)] = (
                        f"its weight is also that of {name} ({type(module).__name__}), which stays{advice}"
                    )
    return reasons


def _why_not(linear: nn.Module) -> str:
    """Returns the reason why a Linear layer or an embedding cannot be quantized, or ""."""
    if parametrize.is_parametrized(linear):
        return "it is parametrized"
    is_table = isinstance(linear, nn.Embedding)
    if not is_table and not is_linear(linear):
        return why_not_linear(linear)
    if "forward" in linear.__dict__:
        return "its forward was replaced on the instance"
    if linear._parameters.keys() != ({"weight"} if is_table else {"weight", "bias"}):
        return f"its parameters are {', '.join(linear._parameters)} (weight_norm, spectral_norm?)"
    weight, bias = linear.weight, linear._parameters.get("bias")
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if weight.is_meta:
        return "its weight is on the meta device"
    if weight.dtype not in FLOAT_DTYPES or (bias is not None and bias.dtype not in FLOAT_DTYPES):
        return f"its weight is {weight.dtype}; expected float16, bfloat16 or float32"
    if reason := why_not_embedding(linear) if is_table else why_not_linear(linear):
        return reason
    if not all(bool(extreme.isfinite()) for extreme in torch.aminmax(weight.detach())):
        return "its weight is not finite"
    return ""


def shared_with_others(model: nn.Module, targets: list[Target]) -> dict[int, str]:
    """Returns `{id(module): reason}` for modules that stay in floats because other modules use their tensors."""
    taken = {id(target.module) for target in targets}
    users = {
        id(tensor): f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if id(module) not in taken
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    }
    return {
        id(target.module): f"a tensor of its weight is also that of {users[id(tensor)]}, which stays"
        for target in targets
        for tensor in tensors_of(target.module)
        if id(tensor) in users
    }


def taken_weights(model: nn.Module) -> dict[int, str]:
    """Returns `{id(layer): reason}` for layers that cannot be packed because their parent uses the weight directly."""
    return {
        id(child): f"{type(parent).__name__} computes with its weight, instead of calling it"
        for parent in model.modules()
        for name in TAKEN.get(type(parent).__name__, ())
        if (child := getattr(parent, name, None)) is not None
    }
