"""Loads a checkpoint of 4-bit layers into any model. Packed layers stay packed; other tensors are loaded unchanged."""

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.checkpoints.directory import open_reader
from torch_marlin_metal.checkpoints.files.safetensors import keep_file_open
from torch_marlin_metal.checkpoints.formats.gguf import GgufReader
from torch_marlin_metal.checkpoints.model_names import ModelNames
from torch_marlin_metal.checkpoints.options import OnUnsupported, ReadOptions
from torch_marlin_metal.checkpoints.reader import CheckpointReader, DenseWeight
from torch_marlin_metal.layers.embedding import MarlinEmbedding
from torch_marlin_metal.layers.experts import StackError
from torch_marlin_metal.layers.fuse import fuse_projections
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.models.decode_experts import decode_experts
from torch_marlin_metal.models.empty_model import (
    ModelMismatchError,
    Rename,
    Slots,
    fit_bias,
    fit_layer,
    fit_table,
    fit_weight,
    is_transposed,
    linear_shape,
    listing,
    real_device,
    renamer,
    why_not_table,
)
from torch_marlin_metal.models.gguf_settings import check_settings, unknown_keys
from torch_marlin_metal.models.load_plan import OP, LoadPlan, PlannedExperts, plan_load
from torch_marlin_metal.models.report import LayerReport, Report, module_bytes
from torch_marlin_metal.models.split import Split
from torch_marlin_metal.models.swap import Target, swap
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.patterns import Filter, NameFilter, check_patterns, selects


def load_quantized(
    model: nn.Module,
    path: str | os.PathLike[str],
    options: ReadOptions | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    exclude: Filter = (),
    ignore: NameFilter = (),
    keep: NameFilter = (),
    fuse: bool = False,
    split: Split | None = None,
    progress: bool = True,
    **fields: Any,
) -> Report:
    """Loads a checkpoint into a model.

    Every 4-bit layer becomes a `MarlinLinear`; every other tensor is loaded under its name.

    The experts of a mixture, which transformers stacks in `gate_up_proj` and `down_proj`, become one `MarlinExperts`.
    Layers are read one at a time, so the whole model never exists in floats. The model may be on the meta device. If an
    error occurs, the model is not changed; for this, the former tensors are kept until the end.

    Args:
        model: a model whose Linear layers and other tensors have the checkpoint's names, changed in place.
        path: a checkpoint directory or a .gguf file, see `convert.read_layers`.
        options: how to read, see `convert.ReadOptions`; None means the defaults, with `gguf_names="hf"`.
            `on_unsupported` decides about layers that cannot be a `MarlinLinear` or `MarlinEmbedding` without loss:
            "error" raises an error, "dequantize" decodes them to floats, and "skip" leaves the model's layer unchanged.
            Most .gguf files also hold matrices that are not 4 bit, so the default for them is "dequantize". Before such
            matrices are read, a warning states their share.
        device: device of every loaded tensor. None means the device of the replaced tensor, or the CPU if that tensor
            is on the meta device.
        dtype: dtype of floating tensors that are not packed; None means the dtype of the replaced tensor.
        rename: maps names in the checkpoint to names in the model: a function (None leaves a tensor out), or a
            dictionary of prefixes and replacements, for example `{"model.": ""}`. None means the same names, and for a
            model of transformers also the names that its `from_pretrained` accepts.
        exclude: layers that become floats: their weight is decoded to the dtype of the replaced weight. They are chosen
            by their names in the model, as in `quantize_model`. Experts of mixtures cannot be excluded.
        ignore: tensors and layers of the checkpoint that the model may lack: patterns, or a function of the name in the
            model. Also keys of a .gguf file, for example "llama.rope.*", that a model of transformers may contradict.
        keep: tensors of the model that the checkpoint may lack; they keep their values. Chosen like `ignore`.
        fuse: compute q, k and v projections in one call, and gate and up projections in another; see
            `fuse_projections`.
        split: a `torch_marlin_metal.parallel.SplitPlan`: this process reads and holds only its part of some layers.
        progress: show a progress bar.
        **fields: fields of `ReadOptions`, which override those of `options`.

    Returns:
        A report, which prints as a table.

    Raises:
        CheckpointError: the checkpoint is damaged, or a layer is not supported (`UnsupportedFormat`).
        ModelMismatchError: a tensor is missing, is unexpected, or has another shape than in the model; or a .gguf file
            says another setting than the config of a model of transformers.
    """
    mixed: OnUnsupported = "dequantize" if str(os.fspath(path)).endswith(".gguf") else "error"
    reader = open_reader(path, options or ReadOptions(gguf_names="hf", on_unsupported=mixed), **fields)
    if reader.options.on_unsupported == "dequantize" and (told := reader.mixture()):
        warnings.warn(f"{OP}: {told}", stacklevel=2)
    if isinstance(reader, GgufReader):
        unknown_settings = check_settings(OP, path, model, reader.metadata, reader.tensors, ignore)
        if unknown_settings:
            warnings.warn(f"{OP}: {unknown_keys(path, unknown_settings)}", stacklevel=2)
    slots = Slots(model)
    plan = plan_load(model, reader, slots, _namer(model, rename), ignore, keep)
    targets = plan.filled() + [user for user, _ in plan.tied.values()]
    check_patterns(OP, (name for target in targets for name in target.names), exclude=exclude)
    unknown = [experts.layers for experts in plan.experts.values() if experts.layers.why_unknown]
    if unknown and reader.options.on_unsupported == "dequantize":
        warnings.warn(
            f"{OP}: the experts of {len(unknown)} layers are decoded to floats: {unknown[0].why_unknown}", stacklevel=2
        )
    for experts in plan.experts.values():
        if any(selects(exclude, name, experts.target.module) for name in experts.target.names):
            raise ModelMismatchError(f"{OP}: exclude: experts cannot be decoded to floats, got {experts.target.name!r}")
    if split is not None:
        whole = {name for target in targets for name in target.names if selects(exclude, name, target.module)}
        linear = [target for _, target in plan.layers if linear_shape(target.module)]
        split.begin(OP, model, {name for target in linear for name in target.names} - whole, reader)
    place = torch.device(device) if device is not None else None
    positions = {id(target): index for index, target in plan.layers}

    tables: dict[int, MarlinEmbedding] = {}

    def convert_tied(target: Target, source: Target) -> tuple[nn.Module, LayerReport] | LayerReport:
        """Makes a layer that the checkpoint lacks because it shares its weight with the embedding `source`."""
        entry = LayerReport(target.name, type(target.module).__name__, bytes_before=module_bytes(target.module))
        table = tables.get(id(source))
        if table is None:
            return replace(entry, reason=f"its weight is that of {source.name}", bytes_after=entry.bytes_before)
        if any(selects(exclude, name, target.module) for name in target.names):
            _set_dense(slots, target, table.to_packed(), place, dtype)
            return replace(entry, reason="excluded: decoded to floats", bytes_after=module_bytes(target.module))
        layer: MarlinLinear
        if linear_shape(target.module) is None:
            layer = fit_table(OP, target.name, target.module, table.to_packed(), device=place, dtype=dtype)
        else:
            layer = table.tied_linear(target.module._parameters.get("bias"))
        entry = replace(entry, shape=(layer.out_features, layer.in_features), weight_format=layer.weight_format)
        return layer, replace(entry, group_size=layer.group_size, bytes_after=module_bytes(layer))

    def convert_experts(experts: PlannedExperts) -> tuple[nn.Module, LayerReport] | LayerReport:
        target = experts.target
        entry = LayerReport(target.name, type(target.module).__name__, bytes_before=module_bytes(target.module))

        def read(name: str) -> PackedWeight:
            weight = reader.read(experts.indexes[name])
            if not isinstance(weight, PackedWeight):
                raise StackError(f"{name}: {weight.reason if weight is not None else 'it is skipped'}")
            shape = experts.shapes[name]
            return fit_weight(OP, f"{target.name}.{name}", shape, weight, device=place, dtype=dtype)

        try:
            with keep_file_open():
                stack = experts.layers.pack(read, dtype)
        except StackError as error:
            if reader.options.on_unsupported == "dequantize":
                _set_dense_experts(slots, experts, reader, place, dtype)
                reason = f"decoded to floats: {error.reason}"
                return replace(entry, reason=reason, bytes_after=module_bytes(target.module))
            raise ModelMismatchError(f"{OP}: {reader.path}: experts {target.name!r}: {error.reason}") from error
        entry = replace(entry, weight_format=stack.down.weight_format, group_size=stack.down.group_size)
        return stack, replace(entry, bytes_after=module_bytes(stack))

    def convert(target: Target) -> tuple[nn.Module, LayerReport] | LayerReport:
        if id(target) in plan.tied:
            return convert_tied(*plan.tied[id(target)])
        if id(target) in plan.experts:
            return convert_experts(plan.experts[id(target)])
        shape = linear_shape(target.module)
        entry = LayerReport(
            target.name,
            type(target.module).__name__,
            (shape.N, shape.K) if shape else None,
            bytes_before=module_bytes(target.module),
        )
        if split is not None and shape is not None:
            part = split.load(OP, target.names, shape, reader, positions[id(target)], device=place, dtype=dtype)
            if isinstance(part, MarlinLinear):
                entry = replace(entry, weight_format=part.weight_format, group_size=part.group_size)
                return part, replace(entry, bytes_after=module_bytes(part))
        weight = reader.read(positions[id(target)])
        if weight is None:
            return replace(entry, reason="not read (on_unsupported='skip')")
        reason = weight.reason if isinstance(weight, DenseWeight) else ""
        if any(selects(exclude, name, target.module) for name in target.names):
            reason = reason or "excluded: decoded to floats"
        if isinstance(weight, PackedWeight) and shape is None and not reason:
            reason = why_not_table(target.module) or _tied_to_others(target, plan)
        if reason:
            _set_dense(slots, target, weight, place, dtype)
            return replace(entry, reason=reason, bytes_after=module_bytes(target.module))
        assert isinstance(weight, PackedWeight)
        layer: MarlinLinear
        if shape is None:
            layer = fit_table(OP, target.name, target.module, weight, device=place, dtype=dtype)
            tables[id(target)] = layer
        else:
            layer = fit_layer(OP, target.name, shape, weight, device=place, dtype=dtype)
        converted = replace(entry, weight_format=layer.weight_format, group_size=layer.group_size)
        return layer, replace(converted, bytes_after=module_bytes(layer))

    try:
        _fill_buffers(model, slots, plan, place)
        for names, read in plan.others:
            old = slots.get(names[0])
            target_device = place or real_device(old.device)
            slots.set(names, read().to(target_device, (dtype if old.is_floating_point() else None) or old.dtype))
        report = swap(model, list(targets), convert, "load 4-bit layers", atomic=True, progress=progress)
        if fuse:
            fuse_projections(model)
        return report
    except BaseException:
        for target in targets:
            for name in target.names:
                model.set_submodule(name, target.module)
        slots.undo()
        raise


def _tied_to_others(target: Target, plan: LoadPlan) -> str:
    """Returns why an embedding stays in floats, or "": another module that stays in floats may share its table."""
    for user, source in plan.tied.values():
        if source is target and linear_shape(user.module) is None and why_not_table(user.module):
            return f"its weight is also that of {user.name} ({type(user.module).__name__}), which stays"
    return ""


def _namer(model: nn.Module, rename: Rename | None) -> Callable[[str], str | None]:
    """Returns the function that maps names in the checkpoint to names in the model."""
    library = sys.modules.get("transformers")
    if rename is None and library is not None and isinstance(model, library.PreTrainedModel):
        return ModelNames(model).find
    return renamer(rename)


def _set_dense(
    slots: Slots,
    target: Target,
    weight: PackedWeight | DenseWeight,
    device: torch.device | None,
    dtype: torch.dtype | None,
) -> None:
    """Decodes one weight into a Linear layer or an embedding."""
    if f"{target.name}.weight" not in slots:
        raise ModelMismatchError(
            f"{OP}: layer {target.name!r}: expected a layer with a weight to decode into, got "
            f"{type(target.module).__name__}"
        )
    old = slots.get(f"{target.name}.weight")
    rows = weight.dequantize(dtype or old.dtype)
    decoded = rows if is_transposed(target.module) else rows.T.contiguous()
    if decoded.shape != old.shape:
        raise ModelMismatchError(
            f"{OP}: layer {target.name!r}: expected a weight of {list(old.shape)} as in the model, the checkpoint's is "
            f"{list(decoded.shape)}"
        )
    place = device or real_device(old.device)
    slots.set(slots.names_of(f"{target.name}.weight"), decoded.to(place))
    held = target.module._parameters.get("bias")
    bias = fit_bias(OP, target.name, held, weight.bias)
    if bias is not None and held is not None:
        slots.set(slots.names_of(f"{target.name}.bias"), bias.to(place, dtype or held.dtype))


def _set_dense_experts(
    slots: Slots,
    experts: PlannedExperts,
    reader: CheckpointReader,
    device: torch.device | None,
    dtype: torch.dtype | None,
) -> None:
    """Decodes the weights of a mixture's experts into the stacked parameters of the model's own module."""
    prefix, held = experts.target.name, experts.target.module._parameters
    dtypes = {name: dtype or tensor.dtype for name, tensor in held.items() if tensor is not None}

    def read(name: str) -> PackedWeight | DenseWeight:
        weight = reader.read(experts.indexes[name])
        assert weight is not None  # on_unsupported is not "skip"
        return weight

    try:
        for name, values in decode_experts(experts.layers, read, dtypes):
            names = slots.names_of(f"{prefix}.{name}")
            old = slots.get(names[0])
            if values.shape != old.shape:
                raise StackError(
                    f"expected {name} of {list(old.shape)} as in the model, the checkpoint's is {list(values.shape)}"
                )
            slots.set(names, values.to(device or real_device(old.device)))
    except StackError as error:
        raise ModelMismatchError(f"{OP}: {reader.path}: experts {prefix!r}: {error.reason}") from error


def _fill_buffers(model: nn.Module, slots: Slots, plan: LoadPlan, device: torch.device | None) -> None:
    """Computes buffers that no checkpoint holds, such as rotary frequencies, if they are on the meta device.

    transformers computes them in `_init_weights`, which it also calls for its own empty models.
    """
    replaced = {id(target.module) for target in plan.filled()}
    initialize = getattr(model, "_init_weights", None)
    empty: list[str] = []
    for prefix, module in model.named_modules():
        keys = [key for key in module._non_persistent_buffers_set if _is_meta(module._buffers.get(key))]
        names = [f"{prefix}.{key}" if prefix else key for key in keys]
        if not names or id(module) in replaced:
            continue
        for name in names:
            slots.set([name], _unset(slots.get(name), device or torch.device("cpu")))
        if initialize is not None:
            with torch.no_grad():
                initialize(module)
        empty += [name for name in names if torch.equal(value := slots.get(name), _unset(value, value.device))]
    if empty:
        raise ModelMismatchError(
            f"{OP}: the model's buffers {listing(empty)} are on the meta device and in no checkpoint: build the "
            "model with real buffers (accelerate.init_empty_weights does)"
        )


def _unset(like: Tensor, device: torch.device) -> Tensor:
    """Returns a buffer with values that no model computes. A buffer that keeps these values was not filled."""
    value = torch.finfo(like.dtype).max if like.is_floating_point() else 113
    return torch.full_like(like, value, device=device)


def _is_meta(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta
