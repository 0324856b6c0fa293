"""Makes a small random model that runs the operations of a large model.

It has the config's sizes, but few layers and tokens.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.layers.float_experts import is_experts
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.models.experts import pack_experts, why_never_experts
from torch_marlin_metal.models.linear_layers import is_candidate, linear_shape, why_not_linear
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.quantize.weight import quantize_weight

VOCABULARY = 504  # Size of the sample's vocabulary. No weight of a layer has as few columns by accident.
TILE = 8  # columns of a random weight that are quantized; the other columns repeat them
_COLUMNS = ("b_packed", "scales", "zeros")  # tensors of a packed weight with N as the last dimension


@dataclass
class Sample:
    """A model with the first few layers of a config.

    Attributes:
        model: the model, on the CPU, with packed 4-bit layers and random weights.
        layers: the decoder layers of `model`.
        kinds: for each layer of the full model, the index of the sample's layer that has the same kind.
        config: the config of the whole model's decoder.
        windows: for each layer of the sample, how many tokens its attention can see, or None for all tokens.
    """

    model: Any
    layers: nn.ModuleList
    kinds: list[int]
    config: Any
    windows: list[int | None]


def config_of(source: Any) -> Any:
    """Returns the config for a directory, a config.json, or a config of transformers.

    Raises:
        ValueError: transformers is not installed, or the argument is none of the three.
        FileNotFoundError: there is no such file or directory.
        CheckpointError: transformers cannot make a config of the file.
    """
    try:
        import transformers
    except ImportError as error:
        raise ValueError("trace_token: needs transformers: pip install transformers") from error
    if isinstance(source, transformers.PreTrainedConfig):
        return copy.deepcopy(source)
    if not isinstance(source, str | Path):
        raise ValueError(f"trace_token: source: expected a path or a config, got {type(source).__name__}")
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; trace needs a directory with a config.json, or the file")
    try:
        settings = json.loads(file.read_text())
        return transformers.AutoConfig.for_model(**settings)
    except Exception as error:  # wrong settings can raise any exception in the config's own code
        raise CheckpointError(f"{file}: transformers cannot make a config of it: {error}") from error


def sample_of(
    config: Any, *, weight_format: str = "uint4b8", group_size: int | None = None, dtype: torch.dtype = torch.float16
) -> Sample:
    """Makes a model of a config's first layers, as many as are needed to contain each kind of layer.

    Two layers are of the same kind if their modules have the same classes, names and shapes and their attention has the
    same type. The embedding and the output layer get a vocabulary of only a few tokens.

    Args:
        config: a config of a causal language model; it is not changed.
        weight_format: the format of Linear layers and experts.
        group_size: as in `quantize_weight`.
        dtype: dtype of the activations and of the parameters that stay in floats.

    Raises:
        ValueError: the weight format does not fit a layer.
        CheckpointError: transformers has no causal language model for the config, or cannot build it.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    try:
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
        signatures = _signatures(whole)
        first = {signature: index for index, signature in reversed(list(enumerate(signatures)))}
        small = _with_layers(config, max(first.values()) + 1)
        with (
            no_init_weights(),
            torch.device("cpu"),  # nothing writes to the weights of full size, so the system allocates no memory
        ):
            model = AutoModelForCausalLM.from_config(small, dtype=dtype).eval()
        model.tie_weights()
    except Exception as error:  # wrong settings can raise any exception in the model's own code
        raise CheckpointError(f"trace_token: no model can be made of the config: {error}") from error
    _pack(model, lambda weight: _repeated(weight, weight_format, group_size, dtype))
    layers = decoder_layers(model)
    decoder = config.get_text_config(decoder=True)
    windows = [_window(decoder, index) for index in range(len(layers))]
    return Sample(model, layers, [first[signature] for signature in signatures], decoder, windows)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Returns the decoder layers of a model: its longest ModuleList that is not inside another ModuleList."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(part) for one in lists for part in one.modules() if part is not one}
    outer = [one for one in lists if id(one) not in inner]
    if not outer:
        raise ValueError("the model has no list of decoder layers")
    return max(outer, key=len)


def _signatures(model: Any) -> list[Any]:
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    found = []
    for index, layer in enumerate(decoder_layers(model)):
        parts = tuple((name, type(module).__name__) for name, module in layer.named_modules())
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in layer.state_dict().items())
        found.append((types[index] if types else None, parts, shapes))
    return found


def _with_layers(config: Any, layers: int) -> Any:
    small = copy.deepcopy(config)
    decoder = small.get_text_config(decoder=True)
    before = decoder.num_hidden_layers
    decoder.num_hidden_layers = layers
    for name, value in list(vars(decoder).items()):
        if isinstance(value, list) and len(value) == before:  # one entry for each layer
            with contextlib.suppress(AttributeError):  # computed by some configs
                setattr(decoder, name, value[:layers])
    decoder.vocab_size = VOCABULARY
    for one in {id(small): small, id(decoder): decoder}.values():
        one.pad_token_id = None
        if hasattr(one, "quantization_config"):
            del one.quantization_config
    return small


def _window(config: Any, layer: int) -> int | None:
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is not None and "sliding" not in types[layer]:
        return None
    return int(window) if window and getattr(config, "use_sliding_window", True) else None


def _random(shape: tuple[int, ...], scale: float, seed: int = 0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")


def _repeated(weight: Tensor, weight_format: str, group_size: int | None, dtype: torch.dtype) -> PackedWeight:
    """Returns a random packed weight of the size `[N, K]` of `weight`. The values of `weight` are not read."""
    N, K = weight.shape
    packed = quantize_weight(_random((TILE, K), K**-0.5), weight_format, group_size, scale_dtype=dtype)
    wide: dict[str, Any] = {
        name: tensor.repeat(1, -(-N // TILE))[:, :N].contiguous()
        for name, tensor in packed.tensors().items()
        if name in _COLUMNS
    }
    return replace(packed, **wide)


def _pack(model: nn.Module, pack: Callable[[Tensor], PackedWeight]) -> None:
    """Fills a model with random values. Layers that `quantize_model` packs get packed weights, the others floats."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for tensor in module._parameters.values():
            holders[id(tensor)] = holders.get(id(tensor), 0) + 1
    with torch.no_grad():
        for _, parent in list(model.named_modules()):
            for name, child in list(parent.named_children()):
                weight = child._parameters.get("weight")
                if is_candidate(child) and not why_not_linear(child) and holders[id(weight)] == 1:
                    shape = linear_shape(child)
                    assert shape is not None
                    bias = None if shape.bias is None else _random((shape.N,), 0.02).to(shape.dtype)
                    packed = pack(torch.empty(shape.N, shape.K, device="meta"))
                    parent._modules[name] = MarlinLinear.from_packed(replace(packed, bias=bias), dtype=shape.dtype)
                elif is_experts(child) and not why_never_experts(child):
                    for key, tensor in child._parameters.items():
                        if key.endswith("_bias") and tensor is not None:
                            tensor.copy_(_random(tuple(tensor.shape), 0.02))
                    parent._modules[name] = pack_experts(child, lambda _, weight: pack(weight))
        for seed, tensor in enumerate(model.parameters()):
            if tensor.is_floating_point():
                scale = 0.1 if tensor.dim() < 2 else tensor.shape[-1] ** -0.5
                tensor.copy_(_random(tuple(tensor.shape), scale, seed) + (tensor.dim() < 2))
