"""Quantizes the Linear layers of a model, or replaces packed layers of other packages."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

from torch import Tensor, nn

from torch_marlin_metal.checkpoints.options import check_choice
from torch_marlin_metal.layers.equivalence import check_module
from torch_marlin_metal.layers.float_experts import is_experts
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.layers.packed_layer import PackedLayer
from torch_marlin_metal.layers.stays import staying_layers
from torch_marlin_metal.layers.vocabulary import vocabulary_of
from torch_marlin_metal.layers.widths import check_widths
from torch_marlin_metal.models.coverage import check_coverage, left_matrices
from torch_marlin_metal.models.experts import pack_experts
from torch_marlin_metal.models.linear_layers import (
    is_candidate,
    is_transposed,
    linear_shape,
    matrix_of,
    packed_layer,
    shared_weights,
)
from torch_marlin_metal.models.reasons import KEPT, shared_with_others, why_not_quantized
from torch_marlin_metal.models.report import LayerReport, Report, module_bytes
from torch_marlin_metal.models.savers import let_it_save, round_as_diffusers
from torch_marlin_metal.models.swap import Target, find_targets, swap
from torch_marlin_metal.models.widths import fitted, liked, rows_of
from torch_marlin_metal.packed_weight import PackedWeight, PackedWeightError
from torch_marlin_metal.patterns import Filter, selects
from torch_marlin_metal.quantize.recipe import IN_FLOATS, Recipe
from torch_marlin_metal.repack import ZerosRule
from torch_marlin_metal.replace.detect import (
    dtype_of,
    is_packed_experts,
    is_packed_linear,
    read_packed_linear,
    shape_of,
    why_unread,
)
from torch_marlin_metal.replace.gptq_awq import UnreadableError

# The number of columns for which a weight's error is measured at a time.
ERROR_COLUMNS = 1024
# The reasons why `replace_linear_layers` does not replace the experts of a mixture.
FLOAT_EXPERTS = "its experts are in floats; quantize_model packs them"
OTHER_EXPERTS = (
    "another package packed its experts; load the checkpoint with load_quantized, or import "
    "torch_marlin_metal.integrations.transformers before from_pretrained"
)


def quantize_model(
    model: nn.Module,
    weight_format: str = "uint4b8",
    group_size: int | None = None,
    method: str = "rtn",
    *,
    include: Filter | None = None,
    exclude: Filter | None = None,
    vocabulary_format: str | None = None,
    memory: str | int | None = None,
    calibration: Tensor | None = None,
    like: str | None = None,
    progress: bool = True,
    atomic: bool = True,
    **options: Any,
) -> Report:
    """Replaces the Linear layers of a model by `MarlinLinear`, and its embeddings by `MarlinEmbedding`, in place.

    Layers that cannot be quantized stay unchanged, and the report gives the reason. The reasons are: K is not a
    multiple of 8; the weight is not fp16, bf16 or fp32, is not finite, or is parametrized; the layer's class is a
    subclass of `nn.Linear` with another forward; the parent never calls the layer (the output projection of
    `nn.MultiheadAttention`); or the weight is shared with a module that stays in floats (an embedding, an excluded
    layer). The report also lists matrices that are not part of a layer.

    The experts of a mixture in transformers become `MarlinExperts`, one expert at a time, if they are stacked in the
    parameters `gate_up_proj` and `down_proj`. An experts module is treated as one layer.

    transformers' `Conv1D` and `FalconLinear` are treated as Linear layers. Layers that share a weight are quantized
    once and share the result. Hooks are moved to the new layers. For a model of transformers, diffusers or
    sentence-transformers, the function imports the matching module of `torch_marlin_metal.integrations`, so that
    `save_pretrained` writes the packed layers.

    Args:
        model: changed in place.
        weight_format: see `quantize_weight`.
        group_size: see `quantize_weight`.
        method: "rtn" or "mse".
        include: layers to quantize. None means all layers except the head of a classifier and modules that transformers
            keeps in float32. The value is a pattern or a list of patterns for the layer's full name, or a function of
            (name, module). Patterns are shell-style (`fnmatch`: "encoder.*.query"). With the prefix "re:", they are
            regular expressions that must match the full name. A pattern that matches no layer is an error.
        exclude: layers to skip, in the same form. The report omits them.
        vocabulary_format: the weight format of the embeddings and of the output layer that a transformers model names
            (`get_input_embeddings`, `get_output_embeddings`), or "none" to keep them in floats. Layers that share a
            weight also share the packed weight. None means "uint8b128". In other models, a format applies to every
            `nn.Embedding`, and None means that no embedding is quantized.
        memory: the maximum bytes of the complete model, for example "9 GB" (10^9 bytes), "8 GiB" or a number. Each
            layer gets `weight_format`, `vocabulary_format` or one of `quantize.fit.CANDIDATES`. The formats are
            selected so that the model fits and the error is smallest. The error is the sum over the layers of the
            squared error relative to the weight. Projections that are computed together get the same format. `fit` of
            the report describes the selection. The cache of keys and values and the activations need additional memory.
        calibration: token ids of a text, int64 `[B, S]`, for a model that returns logits. The error that `memory`
            minimizes is then the KL divergence of the model's predictions, measured with one group of layers quantized
            at a time.
        like: a recipe of llama.cpp, for example "Q4_K_M". Each layer gets the weight format with the same structure as
            its type in the recipe. `weight_format`, `group_size` and `vocabulary_format` then have no effect.
        progress: True to show a progress bar.
        atomic: with True, an exception leaves the model unchanged, but old and new weights are in memory together until
            the end. With False, each old weight is freed before the next layer, and an exception leaves a partly
            quantized model.
        **options: `scale_dtype`, `lut`, `mx_rounding`, as in `quantize_weight`.

    Returns:
        A report with the error of each layer. It prints as a table.

    Raises:
        ValueError: an argument is invalid, the format cannot represent a layer (the message names the layer), or no
            layer can be quantized.

    Warns:
        UserWarning: less than half of the bytes in the report will be quantized. The message names the largest layers
            and matrices that will not. If warnings are errors, the model does not change.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
        >>> report = tmm.quantize_model(model, "uint4", group_size=64, exclude="2", progress=False)
        >>> model[0]
        MarlinLinear(in_features=256, out_features=512, bias=True, weight_format=uint4, group_size=64, scales=float16)
    """
    check_module("quantize_model", model)
    recipe = Recipe(weight_format, group_size, method, vocabulary_format, options)
    tables, heads = vocabulary_of(model, vocabulary_format)

    def is_wanted(module: nn.Module) -> bool:
        return is_candidate(module) or id(module) in tables or is_experts(module)

    targets = find_targets("quantize_model", model, is_wanted, include, exclude)
    left = left_matrices(model, _chosen(include, exclude), is_wanted, vocabulary_format not in (None, IN_FLOATS))
    staying = staying_layers(model) if include is None else {}
    if not recipe.packs_vocabulary:
        staying |= dict.fromkeys(heads, KEPT)
    reasons = why_not_quantized(model, targets, staying)
    words = {name for target in targets if id(target.module) in tables | heads for name in target.names}
    recipe = recipe.with_vocabulary(words)
    shared = _shared_weights(targets)
    check_widths("quantize_model", memory, like, calibration)
    fit = None
    if memory is not None or like is not None:
        modules = {target.name: target.module for target in targets if not reasons.get(id(target.module))}
        ties = shared_weights(model)
        if like is not None:
            outputs = {name for name, module in modules.items() if id(module) in heads}
            outputs |= {name for name, first in ties.items() if {name, first} & outputs} | {
                first for name, first in ties.items() if name in outputs
            }
            recipe = liked("quantize_model", model, modules, recipe, like, outputs)
        elif memory is not None:
            recipe, fit = fitted("quantize_model", model, modules, recipe, memory, rows_of, ties, calibration)
    done: dict[tuple[int, bool], tuple[PackedWeight, float]] = {}

    def quantized(name: str, weight: Tensor) -> PackedWeight:
        try:
            return recipe.quantize(name, weight)
        except ValueError as problem:
            raise ValueError(f"quantize_model: layer {name}: {problem}") from problem

    def convert_experts(target: Target) -> tuple[nn.Module, LayerReport] | LayerReport:
        entry = _entry(target, None)
        if reason := reasons.get(id(target.module)):
            return replace(entry, reason=reason)
        difference = size = 0.0

        def packed(name: str, weight: Tensor) -> PackedWeight:
            nonlocal difference, size
            result = quantized(f"{target.name}.{name}", weight)
            more = _error_and_size(result, weight)
            difference, size = difference + more[0], size + more[1]
            return result

        experts = pack_experts(target.module, packed)
        done = _converted(entry, experts.down, _relative_error(difference, size))
        return experts, replace(done, bytes_after=module_bytes(experts))

    def convert(target: Target) -> tuple[nn.Module, LayerReport] | LayerReport:
        linear = target.module
        if is_experts(linear):
            return convert_experts(target)
        shape = linear_shape(linear)
        entry = _entry(target, (shape.N, shape.K) if shape else tuple(linear.weight.shape))  # type: ignore[arg-type]
        if reason := reasons.get(id(linear)):
            return replace(entry, reason=reason)
        weight = matrix_of(linear)
        key = id(linear.weight), is_transposed(linear)
        packed, error = done.get(key, (None, 0.0))
        if packed is None:
            packed = quantized(target.name, weight)
            error = _relative_error(*_error_and_size(packed, weight))
            if id(linear.weight) in shared:
                done[key] = packed, error
        layer = packed_layer(linear, packed, weight.dtype)
        return layer, _converted(entry, layer, error)

    title = f"quantize to {weight_format if like is None else like}" if fit is None else f"quantize to {memory}"
    # Python may turn warnings into errors, so the model is changed only after the last warning.
    plan = [replace(_entry(target, None), reason=reasons.get(id(target.module), "")) for target in targets] + left
    if plan or (include is None and exclude is None):
        check_coverage("quantize_model", Report(title, plan))
    let_it_save("quantize_model", model)
    report = swap(model, targets, convert, title, atomic=atomic, progress=progress)
    round_as_diffusers(model)
    report.layers += left
    report.fit = fit
    return report


def replace_linear_layers(
    model: nn.Module,
    *,
    include: Filter | None = None,
    exclude: Filter | None = None,
    gptq_version: int | None = None,
    gptq_zeros_rule: ZerosRule = "word",
    progress: bool = True,
    atomic: bool = True,
    checkpoint_version: int | None = None,
    rule: ZerosRule | None = None,
) -> Report:
    """Replaces the packed layers of other packages in a loaded model, in place and without loss.

    Layers are recognized by their tensors, shapes and class names: GPTQ of 2 to 8 bits (GPTQModel, AutoGPTQ, optimum),
    AWQ gemm of 4 and 8 bits, gemv and gemv_fast (AutoAWQ, GPTQModel), compressed-tensors (integers, NVFP4, MXFP4),
    bitsandbytes Linear4bit, HQQLinear, transformers' MetalLinear, and diffusers' GGUFLinear. Integers whose zero points
    are all in the middle become uint4b8 or uint8b128, others uint4 or uint8. A layer is not replaced if it cannot be
    read, or if another module also uses its tensors. The report gives the reason.

    The report also lists packed layers of other kinds, for example of torchao and quanto, and the experts of mixtures.
    These are not replaced. `quantize_model` packs experts in floats, before or after this call. If another package has
    packed the experts, as transformers does for gpt-oss, load the checkpoint with `load_quantized`, or import
    `torch_marlin_metal.integrations.transformers` before `from_pretrained`.

    Args:
        model: changed in place.
        include: as in `quantize_model`.
        exclude: as in `quantize_model`.
        gptq_version: the representation of GPTQ's zero points in the modules: 1 (minus one) or 2 (unchanged). None
            derives the version from the class (GPTQModel's REQUIRES_FORMAT_V2), the module's `qzero_format()` and the
            model's quantization_config. A layer whose zero points contradict the version is not replaced, and the
            report says so.
        gptq_zeros_rule: for version 1, the `rule` of `gptq_unpack_zeros`.
        progress: True to show a progress bar.
        atomic: as in `quantize_model`. GPTQ words without act-order are never copied.
        checkpoint_version: the old name of `gptq_version`.
        rule: the old name of `gptq_zeros_rule`.

    Returns:
        A report. It prints as a table.

    Raises:
        ValueError: an argument is invalid.

    Examples:
        >>> model = nn.Sequential(nn.Linear(256, 512))  # stands for a model that another package loaded
        >>> report = tmm.convert.replace_linear_layers(model)
        >>> len(report.converted)
        0
    """
    gptq_version = gptq_version if checkpoint_version is None else checkpoint_version
    gptq_zeros_rule = gptq_zeros_rule if rule is None else rule
    check_choice("replace_linear_layers: gptq_version", gptq_version, (None, 1, 2))
    check_choice("replace_linear_layers: gptq_zeros_rule", gptq_zeros_rule, get_args(ZerosRule))
    check_module("replace_linear_layers", model)
    targets = find_targets("replace_linear_layers", model, is_packed_linear, include, exclude)
    config = _quantization_config(model)
    reasons = shared_with_others(model, targets)

    def convert(target: Target) -> tuple[nn.Module, LayerReport] | LayerReport:
        entry = _entry(target, shape_of(target.module))
        if reason := reasons.get(id(target.module)):
            return replace(entry, reason=reason)
        try:
            packed = read_packed_linear(
                target.module, gptq_version=gptq_version, gptq_zeros_rule=gptq_zeros_rule, config=config
            )
            bias = getattr(target.module, "bias", None)
            layer = MarlinLinear.from_packed(replace(packed, bias=bias), dtype=dtype_of(target.module, packed))
        except (UnreadableError, PackedWeightError) as problem:
            return replace(entry, reason=str(problem))
        return layer, _converted(replace(entry, shape=(packed.N, packed.K)), layer, None)

    chosen = _chosen(include, exclude)
    experts = [
        replace(_entry(Target([name], module), None), reason=FLOAT_EXPERTS if is_experts(module) else OTHER_EXPERTS)
        for name, module in model.named_modules()
        if (is_experts(module) or is_packed_experts(module)) and chosen(name, module)
    ]
    unread = [
        replace(_entry(Target([name], module), shape_of(module)), reason=reason)
        for name, module in model.named_modules()
        if chosen(name, module) and (reason := why_unread(module))
    ]
    let_it_save("replace_linear_layers", model)
    report = swap(model, targets, convert, "replace packed layers", atomic=atomic, progress=progress)
    round_as_diffusers(model)
    report.layers += experts + unread
    return report


def _chosen(include: Filter | None, exclude: Filter | None) -> Callable[[str, nn.Module], bool]:
    def chosen(name: str, module: nn.Module) -> bool:
        return (include is None or selects(include, name, module)) and not selects(exclude, name, module)

    return chosen


def _entry(target: Target, shape: tuple[int, int] | None) -> LayerReport:
    return LayerReport(target.name, type(target.module).__name__, shape, bytes_before=module_bytes(target.module))


def _converted(entry: LayerReport, layer: PackedLayer, error: float | None) -> LayerReport:
    return replace(
        entry,
        weight_format=layer.weight_format,
        group_size=layer.group_size,
        bytes_after=module_bytes(layer),
        error=error,
    )


def _shared_weights(targets: list[Target]) -> set[int]:
    seen: set[int] = set()
    shared: set[int] = set()
    for target in targets:
        weight = target.module._parameters.get("weight")
        (shared if id(weight) in seen else seen).add(id(weight))
    return shared


def _error_and_size(packed: PackedWeight, weight: Tensor) -> tuple[float, float]:
    """Returns two sums of squares: that of a packed weight's errors, and that of the weight."""
    difference = norm = 0.0
    for start in range(0, packed.N, ERROR_COLUMNS):
        n = slice(start, start + ERROR_COLUMNS)
        exact = weight.detach()[n].float()
        difference += float((packed.columns(n).dequantize().T - exact).square().sum())
        norm += float(exact.square().sum())
    return difference, norm


def _relative_error(difference: float, norm: float) -> float:
    return float((difference / norm) ** 0.5) if norm else 0.0


def _quantization_config(model: nn.Module) -> dict[str, Any]:
    found = getattr(getattr(model, "config", None), "quantization_config", None)
    if found is None:
        return {}
    return dict(found) if isinstance(found, dict) else dict(vars(found))
