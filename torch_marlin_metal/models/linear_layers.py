"""Recognizes the Linear layers of a model, and makes the packed layers that replace them or embeddings."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from torch_marlin_metal.layers.embedding import MarlinEmbedding, why_not_embedding
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.packed_weight import FLOAT_DTYPES, PackedWeight

# Rotary frequencies. Models compute them, but llama.cpp and old transformers versions also store them in files.
COMPUTED = ("*rotary_emb.inv_freq", "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Subclasses of nn.Linear in transformers that differ only in rounding: they round after the product and again after the
# addition of the bias.
PLAIN_SUBCLASSES = ("FalconLinear",)


class ModelMismatchError(ValueError):
    """A checkpoint and a model do not match. The message names the layer or the tensor."""


@dataclass(frozen=True)
class LinearShape:
    """Sizes, dtype, device and bias of a Linear layer. The model may be on the meta device.

    `transposed` is True if the layer stores its weight as `[K, N]`.
    """

    N: int
    K: int
    dtype: torch.dtype
    device: torch.device
    bias: Tensor | None
    transposed: bool = False


def is_transposed(module: nn.Module) -> bool:
    """Returns True for transformers' `Conv1D`, a Linear layer with a weight `[K, N]`. Recognizes it by name."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Returns True if a module computes only `a @ w.T + bias`.

    Such modules are `nn.Linear`, subclasses with an unchanged `forward`, `PLAIN_SUBCLASSES`, and `Conv1D`. The result
    is False for the output projection of `nn.MultiheadAttention`, because the attention multiplies by the projection's
    weight and never calls the projection.
    """
    kind = type(module)
    if not isinstance(module, nn.Linear):
        return is_transposed(module)
    known = kind.__name__ in PLAIN_SUBCLASSES and kind.__module__.startswith("transformers.")
    return known or (kind.forward is nn.Linear.forward and kind is not NonDynamicallyQuantizableLinear)


def is_candidate(module: nn.Module) -> bool:
    """Returns True if a module looks like a Linear layer. If it cannot be packed, reports list it with the reason."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def why_not_linear(module: nn.Module) -> str:
    """Returns the reason why a layer cannot become a packed layer, or "".

    The result depends only on the layer's class and the size of its weight.
    """
    if not is_linear(module):
        own = type(module).forward is not nn.Linear.forward
        return f"{type(module).__name__} {'has a forward of its own' if own else 'is never called'}"
    weight = module._parameters.get("weight")
    if weight is None:
        return f"its parameters are {', '.join(module._parameters)} (weight_norm, spectral_norm?)"
    K = weight.shape[0 if is_transposed(module) else 1]
    return f"K = {K} is not a positive multiple of 8" if K % 8 or not weight.numel() else ""


def matrix_of(module: nn.Module) -> Tensor:
    """Returns the weight of a Linear layer as `[N, K]`, for both orientations of the stored weight."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.detach().T if is_transposed(module) else weight


def linear_shape(module: nn.Module) -> LinearShape | None:
    """Returns sizes, dtype, device and bias of a linear layer, or None for other modules.

    Linear layers are `MarlinLinear` and modules for which `is_linear` is True.
    """
    if isinstance(module, MarlinEmbedding):
        return None
    if isinstance(module, MarlinLinear):
        return LinearShape(module.out_features, module.in_features, module.dtype, module.b_packed.device, module.bias)
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not is_linear(module):
        return None
    transposed = is_transposed(module)
    N, K = reversed(weight.shape) if transposed else weight.shape
    return LinearShape(N, K, weight.dtype, weight.device, module._parameters.get("bias"), transposed)


def shared_weights(model: nn.Module) -> dict[str, str]:
    """Returns the modules with a shared weight: name -> name of the first module with this weight."""
    first: dict[int, str] = {}
    ties = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and (owner := first.setdefault(id(weight), name)) != name:
            ties[name] = owner
    return ties


def packed_layer(old: nn.Module, packed: PackedWeight, dtype: torch.dtype) -> MarlinLinear:
    """Makes the packed layer that replaces an embedding or a Linear layer. It takes the bias of the Linear layer."""
    if isinstance(old, nn.Embedding):
        return MarlinEmbedding.like(old, packed, dtype)
    return MarlinLinear.from_packed(replace(packed, bias=old._parameters.get("bias")), dtype=dtype)


def why_not_table(module: nn.Module) -> str:
    """Returns the reason why a packed weight cannot become the table of a module, or ""."""
    return "" if isinstance(module, MarlinEmbedding) else why_not_embedding(module)


def real_device(device: torch.device) -> torch.device:
    """Returns the device for a tensor that replaces one on `device`: the CPU for the meta device, else `device`."""
    return torch.device("cpu") if device.type == "meta" else device


def misfit(name: str, expected: list[int], found: list[int]) -> str:
    """Returns an error message if a weight's size differs between checkpoint and model, else ""."""
    if found == expected:
        return ""
    return f"layer {name!r}: expected a weight of {expected} as in the model, the checkpoint's is {found}"


def fit_weight(
    op: str,
    name: str,
    shape: LinearShape,
    weight: PackedWeight,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> PackedWeight:
    """Moves a checkpoint's weight to the device of the Linear layer that it replaces, and adapts its bias.

    Args:
        op: the caller's name for error messages.
        name: the layer's name in the model.
        shape: the replaced layer.
        weight: a weight that was validated. The checkpoint readers do this.
        device: device of the result. None means the device of the replaced layer, or the CPU if that layer is on the
            meta device.
        dtype: dtype of the bias. None means the dtype of the replaced layer.

    Raises:
        ModelMismatchError: the sizes of weight and layer differ, or only one of the two has a nonzero bias.
    """
    if reason := misfit(name, [shape.N, shape.K], [weight.N, weight.K]):
        raise ModelMismatchError(f"{op}: {reason}")
    bias = fit_bias(op, name, shape.bias, weight.bias)
    dtype = _float_dtype(shape, dtype)
    if bias is not None and dtype is not None:
        bias = bias.to(dtype)
    place = real_device(shape.device) if device is None else torch.device(device)
    weight = weight if bias is weight.bias else replace(weight, bias=bias)
    return weight if all(tensor.device == place for tensor in weight.tensors().values()) else weight.to(place)


def fit_layer(
    op: str,
    name: str,
    shape: LinearShape,
    weight: PackedWeight,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> MarlinLinear:
    """Makes a packed layer for the model's Linear layer.

    The arguments and errors are those of `fit_weight`. `dtype` is also the value of `.weight.dtype`.
    """
    packed = fit_weight(op, name, shape, weight, device=device, dtype=dtype)
    return MarlinLinear.from_valid(packed, dtype=_float_dtype(shape, dtype))


def _float_dtype(shape: LinearShape, dtype: torch.dtype | None) -> torch.dtype | None:
    return dtype or (shape.dtype if shape.dtype in FLOAT_DTYPES else None)


def fit_table(
    op: str,
    name: str,
    module: nn.Module,
    weight: PackedWeight,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> MarlinEmbedding:
    """Makes a packed embedding for the model's module. The arguments are those of `fit_layer`."""
    held: Any = module
    old = held.weight
    fit_bias(op, name, None, weight.bias)
    device = real_device(old.device) if device is None else device
    packed = replace(weight, bias=None).to(device)
    return MarlinEmbedding.like(held, packed, dtype or old.dtype)


def fit_bias(op: str, name: str, expected: Tensor | None, found: Tensor | None) -> Tensor | None:
    """Returns the bias of a layer. If the model's layer has none, drops a bias of zeros, which GPTQ packages write."""
    if expected is not None and found is None:
        raise ModelMismatchError(f"{op}: layer {name!r}: the model's layer has a bias, the checkpoint's has none")
    if expected is None and found is not None:
        if bool(found.any()):
            raise ModelMismatchError(f"{op}: layer {name!r}: the checkpoint's layer has a bias, the model's has none")
        return None
    return found


def listing(names: Iterable[str]) -> str:
    """Formats names for an error message, at most eight."""
    names = sorted(names)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
