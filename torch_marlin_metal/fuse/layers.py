"""Finds the parts of a transformers model that the operators in `ops/decoder.py` can compute, and replaces them."""

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.extension import require
from torch_marlin_metal.fuse import caches, forwards, gated, masks, norms, residual, rotary, sinks
from torch_marlin_metal.layers.equivalence import TOLERANCE, check_module, difference, has_forward_of_its_own
from torch_marlin_metal.layers.packed_layer import model_device

TOKENS = 6  # tokens of the run that records the arguments of the layers


@dataclass
class FusedLayersReport:
    """The result of `fuse_layers`.

    Attributes:
        fused: the module's name and the fused operations of each replacement.
        left: the module's name and the reason, for each candidate that was not replaced.
        difference: the largest change of the model's results on random tokens, relative to the largest result.
    """

    fused: list[tuple[str, str]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    difference: float = 0.0
    _modules: list[nn.Module] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Restores the original forward of every module."""
        for module in self._modules:
            module.__dict__.pop("forward", None)
        self._modules.clear()
        self.fused.clear()

    def __str__(self) -> str:
        """Returns the number of replacements of each kind, and the number of candidates left for each reason."""
        lines = [f"{count} x {kind}" for kind, count in Counter(kind for _, kind in self.fused).items()]
        lines += [f"left: {count} x {reason}" for reason, count in Counter(reason for _, reason in self.left).items()]
        return "\n".join(lines) or "nothing found"


def fuse_layers(model: nn.Module) -> FusedLayersReport:
    """Replaces the operations between the products of decoder layers by fused operators, in place.

    The function finds norms, rotary embeddings, gated activations, attention with sinks, masks, static caches and
    residual additions by their structure. It compares each replacement with the original module on random input, and
    does not replace a module if the results differ. At the end, it compares the complete model on random tokens:
    without a cache, with a growing cache and with a static cache. Parameters and their names do not change, so saved
    models do not change. A fused module looks up its children at each call, so adapters can be added before or after.

    The model must be a transformers model with the argument `input_ids`. Its layers may be quantized or not. Call
    `fuse_projections` first, so that fewer operations remain. The comparison runs the model a few times, in its dtype
    and on its device.

    Args:
        model: changed in place: fused modules get a new `forward`.

    Returns:
        The report: the fused modules, and the reasons for the others. `undo` of the report restores the model.

    Raises:
        TypeError: `model` is not a module.
        RuntimeError: the results of the fused model differ by more than rounding errors. The model is restored.
        ExtensionError: the compiled extension cannot be used.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 1}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128)).eval()
        >>> report = tmm.fuse_layers(model)
        >>> report.fused[0]
        ('model.layers.0.input_layernorm', 'rms_norm')
        >>> report.undo()
    """
    check_module("fuse_layers", model)
    require("fuse_layers")  # the comparisons below would treat an operator's error as a module that cannot be fused
    report = FusedLayersReport()
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            watched = forwards.Watched()
            with watched.watching(model):
                before, reason = _results(model)
            known = _fuse_norms(model, report)
            _fuse_attention(model, watched, report)
            _fuse_blocks(model, report)
            if reason:
                report.left.append(("", f"residual additions and the comparison of the whole model: {reason}"))
            else:
                _fuse_residuals(model, known, report)
            if before and report.fused:
                after, _ = _results(model)
                pairs = zip_longest(after, before)  # a missing result counts as an infinite difference
                report.difference = max(difference(*pair) for pair in pairs)
                # Rounding errors of all layers together are below this limit. A wrong replacement is far above it.
                if not report.difference <= 4 * TOLERANCE.get(before[0].dtype, 0.0):
                    found = report.difference
                    report.undo()
                    raise RuntimeError(
                        f"fuse_layers: model: expected the same results after fusing, got a difference of {found:.2g}"
                    )
    except BaseException:
        report.undo()
        raise
    finally:
        for module in was_training:
            module.training = True
    return report


def _replace(report: FusedLayersReport, module: nn.Module, name: str, *kinds: str, forward: Callable[..., Any]) -> None:
    module.__dict__["forward"] = MethodType(forward, module)
    report._modules.append(module)
    report.fused += [(name, kind) for kind in kinds]


def _random_tokens(model: nn.Module, seed: int) -> Tensor | None:
    """Returns ids `[1, TOKENS]`, or None for a model without an embedding of tokens or without values."""
    embedding: Any = next((m for m in model.modules() if hasattr(m, "num_embeddings")), None)
    device = model_device(model) or torch.device("cpu")
    if embedding is None or device.type == "meta":
        return None
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(int(embedding.num_embeddings), (1, TOKENS), generator=generator, device="cpu").to(device)


def _results(model: nn.Module) -> tuple[list[Tensor], str]:
    """Runs the model on random tokens: once without a cache, and then with caches, on the last tokens after a prompt.

    Returns the results. If the model cannot run, returns an empty list and the reason.
    """
    ids = _random_tokens(model, seed=0)
    if ids is None:
        return [], "the model has no embedding of tokens, or no values"
    try:
        first = model(input_ids=ids, use_cache=False)[0]
    except Exception as error:  # the model needs other arguments
        return [], f"the model does not run on tokens alone: {type(error).__name__}: {error}"
    results, name = [first], caches.cache_name(model)
    # With a growing cache, transformers makes a mask for two tokens after a prompt, but no mask for a single token.
    for is_static, last in ((False, 1), (False, 2), (True, 1), (True, 2)):
        try:
            cache = {name: caches.static_cache(model, TOKENS + 1)} if is_static else {}
            cache = {name: getattr(model(input_ids=ids[:, :-last], use_cache=True, **cache), name)}
            results.append(model(input_ids=ids[:, -last:], use_cache=True, **cache)[0])
        except Exception:  # the model's state is not a cache of keys and values
            continue
    return results, ""


def _fuse_norms(model: nn.Module, report: FusedLayersReport) -> dict[nn.Module, norms.Norm]:
    known: dict[nn.Module, norms.Norm] = {}
    for name, module in model.named_modules():
        if not norms.is_candidate(module):
            continue
        if has_forward_of_its_own(module):
            report.left.append((name, "a norm: its forward is replaced or has hooks"))
            continue
        norm = norms.settings_of(module)
        if norm is None:
            report.left.append((name, "a norm: neither an RMS norm nor a LayerNorm"))
            continue
        if not norm.has_mean:
            known[module] = norm
        kind = "layer_norm" if norm.has_mean else "rms_norm"
        _replace(report, module, name, kind, forward=norms.fused_norm(type(module).forward, norm))
    return known


def _fuse_attention(model: nn.Module, watched: forwards.Watched, report: FusedLayersReport) -> None:
    variants: dict[FunctionType, Any] = {}  # function -> its rotary variant, or None
    unknown: set[str] = set()
    for name, module in model.named_modules():
        original: Any = type(module).forward
        rotation, attention = rotary.rotation_of(module), sinks.attention_of(module)
        argument, functions = caches.argument_of(original), masks.functions_of(original)
        caching = module in watched.caches
        # Only attention receives a cache. Decoder layers without a cache may receive rotary tables but not use them.
        rotates = caching and module in watched.rotations
        if rotation is None and attention is None and not rotates:
            if caching and argument is not None:
                report.left.append((name, "attention: neither a rotary embedding nor sinks were found"))
            continue
        if has_forward_of_its_own(module):
            report.left.append((name, "a rotary embedding: the forward around it is replaced or has hooks"))
            continue
        missing = []  # operations that this module has in an unknown form
        calls: dict[str, tuple[str, Any]] = {}  # kind -> name and value of the replacement function
        if rotation is not None:
            function = rotation[1]
            if function not in variants:
                variants[function] = rotary.variant_of(function)
            if variants[function] is None:
                report.left.append((name, f"a rotary embedding: {function.__name__} rotates in another way"))
            else:
                calls["rotary"] = rotation[0], rotary.fused_rotation(function, variants[function])
        elif rotates:
            missing.append("a rotary embedding: no function (q, k, cos, sin, ...) is called")
        if attention is not None:
            if sinks.is_proved(module, attention[1]):
                calls["attention"] = attention[0], sinks.fused_attention(attention[1])
            else:
                report.left.append((name, f"attention with sinks: {attention[1].__name__} computes something else"))
        if functions is not None and masks.is_proved(functions[1]):
            calls["mask"] = functions[0], masks.AttentionFunctions(functions[1])
        else:
            missing.append("a mask: no table of attention functions is used, or its sdpa gives other results")
        copied = forwards.forward_with(original, dict(calls.values())) if calls else original
        if copied is None:
            missing.append(f"{', '.join(calls)}: a decorator hides the forward")
        kinds, forward = ([], original) if copied is None else (list(calls), copied)
        if argument is not None and caches.is_proved():
            kinds.append("write_cache")
            forward = caches.with_writer(forward, argument)
        elif caching:
            missing.append("a static cache: no argument's update is called, or it writes in another way")
        if kinds:
            _replace(report, module, name, *kinds, forward=forward)
        report.left += [(name, reason) for reason in missing]
        unknown |= {f"{type(module).__name__}: {reason}" for reason in missing}
    if unknown:
        version, parts = getattr(sys.modules.get("transformers"), "__version__", "unknown"), "; ".join(sorted(unknown))
        warnings.warn(f"fuse_layers: with transformers {version}, these parts are not fused: {parts}", stacklevel=3)


def _fuse_blocks(model: nn.Module, report: FusedLayersReport) -> None:
    for name, module in model.named_modules():
        if not gated.is_candidate(module):
            continue
        if has_forward_of_its_own(module):
            report.left.append((name, "a gated block: its forward is replaced or has hooks"))
            continue
        block = gated.fused_block(module)
        if block is None:
            report.left.append((name, "a block of projections: not a gated one"))
        else:
            _replace(report, module, name, "gated_activation", forward=gated.with_original(block, type(module).forward))


def _fuse_residuals(model: nn.Module, known: dict[nn.Module, norms.Norm], report: FusedLayersReport) -> None:
    layers = {
        name: module
        for name, module in model.named_modules()
        if sum(child in known for child in module.children()) in (2, 4) and module not in report._modules
    }
    for name, layer in list(layers.items()):
        if has_forward_of_its_own(layer):
            report.left.append((name, "residual additions: its forward is replaced or has hooks"))
            del layers[name]
    ids = _random_tokens(model, seed=1)
    seen = residual.record(layers, lambda: model(input_ids=ids, use_cache=False))
    for name, layer in layers.items():
        if name not in seen:
            report.left.append((name, "residual additions: the layer did not run"))
            continue
        forward, reason = residual.fused_layer(layer, seen[name], known, type(layer).forward)
        if forward is None:
            report.left.append((name, f"residual additions: {reason}"))
        else:
            _replace(report, layer, name, "add_rms_norm", forward=forward)
