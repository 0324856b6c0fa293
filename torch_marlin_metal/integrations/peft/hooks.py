"""Wraps peft's methods for adding and merging adapters, so that they support packed layers."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import peft.tuners.lora.model
from peft import LoraConfig, PeftMixedModel, PeftModel, PeftType
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, _maybe_include_all_linear_layers, onload_layer
from torch import nn
from tqdm.auto import tqdm

import torch_marlin_metal.integrations.peft.whole_model as whole_model
from torch_marlin_metal.integrations.peft.experts import add_to_experts, check_experts, targeted
from torch_marlin_metal.integrations.peft.layer import MarlinLoraLinear, check_config
from torch_marlin_metal.integrations.peft.merging import PackedMerging
from torch_marlin_metal.layers.embedding import MarlinEmbedding
from torch_marlin_metal.layers.experts import ExpertWeights, MarlinExperts
from torch_marlin_metal.layers.fuse import FusedLinear
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.layers.packed_layer import model_device

PACKED = (MarlinLinear, FusedLinear, MarlinEmbedding, MarlinExperts, ExpertWeights)


def check_targets(tuner: BaseTuner, model: nn.Module, config: Any) -> None:
    """Raises a ValueError if an adapter or a trainable copy targets a packed layer that does not support it."""
    saved = getattr(config, "modules_to_save", None) or ()
    parameters = [f".{name}".rpartition(".")[0] for name in getattr(config, "target_parameters", None) or ()]
    tokens = getattr(config, "trainable_token_indices", None) or ()
    ask: Any = getattr(model, "get_input_embeddings", None)
    table = ask() if tokens and not isinstance(tokens, dict) and callable(ask) else None  # some models lack the method
    for name, module in model.named_modules():
        layer = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        if not isinstance(layer, PACKED):
            continue
        if isinstance(layer, MarlinExperts):
            if targeted(name, getattr(config, "target_parameters", None) or ()):
                _check_tuner(tuner, config, name, layer)
                check_experts(name, layer, config)
        elif any(part and f".{name}".endswith(part) for part in parameters):
            raise ValueError(
                f"MarlinLoraLinear: layer {name!r}: expected a float layer for target_parameters, got a packed "
                f"{type(layer).__name__}: name it in target_modules"
            )
        named = any(f".{name}".endswith(f".{part}") for part in tokens) if isinstance(tokens, dict) else layer is table
        if tokens and named:
            raise ValueError(
                f"MarlinLoraLinear: layer {name!r}: expected a float layer for trainable_token_indices, got a "
                f"{type(layer).__name__}, whose rows cannot be trained: exclude the layer from quantization"
            )
        if any(f".{part}." in f".{name}." for part in saved):
            raise ValueError(
                f"MarlinLoraLinear: layer {name!r}: expected a float layer for modules_to_save, got a "
                f"{type(layer).__name__}, whose weight cannot be trained: exclude the layer from quantization"
            )
        if not name or not tuner._check_target_module_exists(config, name):
            continue
        _check_tuner(tuner, config, name, layer)
        if isinstance(layer, MarlinLinear) and layer.is_split:
            raise ValueError(
                f"MarlinLoraLinear: layer {name!r}: expected a MarlinLinear with a whole weight, got a "
                f"{type(layer).__name__} with one process' part of it: add adapters before the model is split"
            )
        if isinstance(layer, MarlinExperts | ExpertWeights):
            raise ValueError(
                f"MarlinLoraLinear: layer {name!r}: expected a MarlinLinear, got packed experts of a mixture "
                f"({type(layer).__name__}): name 'experts.gate_up_proj' and 'experts.down_proj' in target_parameters"
            )
        if isinstance(layer, FusedLinear):
            raise ValueError(
                f"MarlinLoraLinear: layer {name!r}: expected a MarlinLinear, got one of several fused projections: "
                "load the model with fuse=False"
            )
        if isinstance(layer, MarlinEmbedding):
            raise ValueError(
                f"MarlinLoraLinear: layer {name!r}: expected a MarlinLinear, got a MarlinEmbedding, which passes no "
                "gradients"
            )
        check_config(config)


def _check_tuner(tuner: BaseTuner, config: Any, name: str, layer: nn.Module) -> None:
    if config.peft_type != PeftType.LORA:
        raise ValueError(
            f"{type(tuner).__name__}: layer {name!r}: expected a float layer for peft_type "
            f"{getattr(config.peft_type, 'value', config.peft_type)}, got a packed {type(layer).__name__}, "
            "which takes LoRA and DoRA adapters (LoraConfig) only"
        )


def install() -> None:
    """Makes peft use `MarlinLoraLinear`. The import of the package calls this function. A second call does nothing."""
    for owner, name, make in WRAPPERS:
        original = getattr(owner, name)
        if not hasattr(original, "without_marlin"):
            wrapper = functools.wraps(original)(make(original))
            wrapper.without_marlin = original  # type: ignore[attr-defined]
            setattr(owner, name, wrapper)
    whole_model.install()


def restore() -> None:
    """Undoes `install`. Models keep the adapters that they have."""
    for owner, name, _ in WRAPPERS:
        method = getattr(owner, name)
        setattr(owner, name, getattr(method, "without_marlin", method))
    whole_model.restore()


def _init(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps a tuner's constructor: checks the targets first, because some constructors search for a float layer."""

    def init(self: Any, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config = peft_config[adapter_name] if isinstance(peft_config, dict) else peft_config
        if type(self)._pre_injection_hook is not BaseTuner._pre_injection_hook:
            _plan_targets(self, model, config)
        original(self, model, peft_config, adapter_name, *args, **kwargs)

    return init


def _inject_adapter(original: Callable[..., None]) -> Callable[..., None]:
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config = self.peft_config[adapter_name]
        targets = _plan_targets(self, model, config)
        if isinstance(getattr(config, "target_modules", None), str):
            config.target_modules = targets
        if isinstance(config, LoraConfig):
            config._register_custom_module({MarlinLinear: MarlinLoraLinear})
        original(self, model, adapter_name, *args, **kwargs)

    return inject_adapter


def _inject_parameters(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def inject_parameters(
        self: Any, peft_config: Any, model: nn.Module, adapter_name: str, low_cpu_mem_usage: bool
    ) -> list[str]:
        added = original(self, peft_config, model, adapter_name, low_cpu_mem_usage)
        return added + add_to_experts(self, peft_config, model, adapter_name, low_cpu_mem_usage)

    return inject_parameters


def _merge_adapter(original: Callable[..., None]) -> Callable[..., None]:
    def merge_adapter(
        self: Any, adapter_names: list[str] | None = None, safe_merge: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        with _planned_merges(self.model, adapter_names):
            original(self, adapter_names, safe_merge, *args, **kwargs)

    return merge_adapter


def _merge_and_unload(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def merge_and_unload(
        self: Any,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> nn.Module:
        with _planned_merges(self.model, adapter_names, progressbar):
            return original(self, progressbar, safe_merge, adapter_names, *args, **kwargs)

    return merge_and_unload


def _get_device_map(original: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Wraps a function that needs the device of the first parameter. A packed model may have no parameters."""

    def get_device_map(model: Any) -> dict[str, Any]:
        if hasattr(model, "hf_device_map") or next(model.parameters(), None) is not None:
            return original(model)
        return {"": model_device(model)}

    return get_device_map


WRAPPERS: tuple[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]], ...] = (
    (peft.tuners.lora.model, "get_device_map", _get_device_map),
    (BaseTuner, "__init__", _init),
    (BaseTuner, "inject_adapter", _inject_adapter),
    (BaseTuner, "_inject_parameters", _inject_parameters),
    (BaseTuner, "merge_adapter", _merge_adapter),
    (BaseTuner, "merge_and_unload", _merge_and_unload),
    (PeftModel, "get_nb_trainable_parameters", whole_model.get_nb_trainable_parameters),
    (PeftMixedModel, "get_nb_trainable_parameters", whole_model.get_nb_trainable_parameters),
    (PeftModel, "_setup_prompt_encoder", whole_model.setup_prompt_encoder),
)


def _plan_targets(tuner: Any, model: nn.Module, config: Any) -> Any:
    """Checks the targets of a config and returns them, with "all-linear" as names. The config does not change."""
    planned = copy.copy(config)
    if any(isinstance(module, PACKED) for module in model.modules()):
        _include_all_linear(model, planned)
        if getattr(planned, "target_modules", None) is None:  # peft sets the default of the model family
            planned = tuner._prepare_adapter_config(planned, tuner.get_model_config(model))
        check_targets(tuner, model, planned)
    return getattr(planned, "target_modules", None)


def _include_all_linear(model: Any, config: Any) -> None:
    """Replaces the target "all-linear" by names: peft's own selection and all packed layers except the output layer."""
    targets = getattr(config, "target_modules", None)
    if not (isinstance(targets, str) and targets.lower() == "all-linear"):
        return
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    inside = tuple(f"{n}." for n, module in model.named_modules() if isinstance(module, BaseTunerLayer | FusedLinear))
    packed = {  # includes fused projections, so that check_targets refuses them
        name
        for name, module in model.named_modules()
        if isinstance(module, MarlinLinear | FusedLinear) and not isinstance(module, MarlinEmbedding)
        if module is not head and not name.startswith(inside)
    }
    config.target_modules = packed | set(_maybe_include_all_linear_layers(config, model).target_modules)


@contextlib.contextmanager
def _planned_merges(model: nn.Module, adapter_names: list[str] | None, progressbar: bool = False) -> Iterator[None]:
    """Computes the merged weights of all packed layers first. If a layer cannot merge, peft then changes no layer."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, PackedMerging)]
    try:
        for name, layer in tqdm(layers, desc="Quantizing merged layers", unit="layer", disable=not progressbar):
            try:
                with onload_layer(layer):
                    layer.plan_merge(adapter_names)
            except ValueError as error:
                raise ValueError(f"merge: layer {name!r}: {str(error).removeprefix('merge: ')}") from error
        yield
    finally:
        for _, layer in layers:
            layer.planned = None
