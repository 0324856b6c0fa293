"""Loads a checkpoint with packed layers into any model. Layers stay packed, and other tensors are loaded unchanged."""

import os
import warnings
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_marlin_metal.checkpoints.directory import open_reader
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.layers.equivalence import check_module
from torch_marlin_metal.layers.fuse import fuse_projections
from torch_marlin_metal.load.caller import Caller, Split
from torch_marlin_metal.load.converted import open_converted
from torch_marlin_metal.load.loader import Loader
from torch_marlin_metal.load.names import Rename, namer
from torch_marlin_metal.models.linear_layers import shared_weights
from torch_marlin_metal.models.report import Report, module_bytes
from torch_marlin_metal.models.savers import let_it_save, round_as_diffusers
from torch_marlin_metal.patterns import Filter, NameFilter

OP = "load_quantized"


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

    Each packed layer becomes a `MarlinLinear`. Each other tensor is loaded under its name.

    The experts of a mixture, which transformers stacks in `gate_up_proj` and `down_proj`, become one `MarlinExperts`.
    Layers are read one at a time, so the model is never completely in floats. The model may be on the meta device. If
    an error occurs, the model does not change; therefore, the old tensors stay in memory until the end. A model of
    transformers, diffusers or sentence-transformers can be saved after loading, as after `quantize_model`.

    Args:
        model: a model whose Linear layers and other tensors have the checkpoint's names, changed in place. If all names
            in the checkpoint start with a prefix that the model lacks, for example "module.", the prefix is ignored.
        path: a checkpoint directory or a .gguf file, see `convert.read_layers`. For a diffusers model, also a file with
            the original names of the model's authors: without `rename`, diffusers' conversion supplies the model's
            names.
        options: the options for reading, see `convert.ReadOptions`. None means the defaults with `gguf_names="hf"`.
            `on_unsupported` determines the action for layers that cannot become a `MarlinLinear` or `MarlinEmbedding`
            without loss: "dequantize", the default, decodes them to floats, "error" raises an error, and "skip" leaves
            the model's layer unchanged. One warning states the kinds of these layers, their share of the file and their
            size in memory.
        device: device of all loaded tensors. None means the device of the replaced tensor, or the CPU if that tensor is
            on the meta device.
        dtype: dtype of floating-point tensors that are not packed. None means the dtype of the replaced tensor.
        rename: maps names in the checkpoint to names in the model: a function, which returns None for tensors that are
            not loaded, or a dictionary from prefixes to replacements, for example `{"model.": ""}`. None means equal
            names and, for a transformers model, also the names that `from_pretrained` accepts.
        exclude: layers that are decoded to the dtype of the replaced weight. They are selected by their names in the
            model, as in `quantize_model`. Modules that share a weight are decoded together. The name of a mixture's
            experts module selects all its experts.
        ignore: tensors and layers of the checkpoint that the model may lack: patterns, or a function of the name in the
            model. It also selects keys of a .gguf file, for example "llama.rope.*", that the config of a transformers
            model may contradict.
        keep: tensors of the model that the checkpoint may lack. Their values do not change. Same form as `ignore`.
        fuse: True to compute q, k and v projections in one call, and gate and up projections in another; see
            `fuse_projections`.
        split: a `torch_marlin_metal.parallel.SplitPlan`. This process then loads only its part of some layers.
        progress: True to show a progress bar.
        **fields: fields of `ReadOptions`; each overrides the field of `options`.

    Returns:
        A report, which prints as a table.

    Raises:
        CheckpointError: the checkpoint is damaged, or a layer is not supported (`UnsupportedFormat`).
        ModelMismatchError: a tensor is missing, is unexpected, or has another shape than in the model; a tensor of the
            model has no source; or a setting differs between a .gguf file and the config of a transformers model.

    Examples:
        >>> weight = tmm.quantize_weight(torch.randn(24, 64), "uint4", group_size=32, name="up")
        >>> _ = tmm.convert.export_checkpoint([weight], "checkpoint", "compressed-tensors")
        >>> model = nn.Module()
        >>> model.up = nn.Linear(64, 24, bias=False, device="meta")
        >>> report = tmm.load_quantized(model, "checkpoint", device="cpu")
        >>> model.up
        MarlinLinear(in_features=64, out_features=24, bias=False, weight_format=uint4, group_size=32, scales=float16)
    """
    check_module(OP, model)
    given = options or ReadOptions(gguf_names="hf")
    reader = open_converted(model, path, given, **fields) if rename is None else None
    reader = reader or open_reader(path, given, **fields)
    place = torch.device(device) if device is not None else None
    caller = Caller(
        op=OP,
        find=namer(model, rename),
        ties=shared_weights(model),
        exclude=exclude,
        ignore=ignore,
        keep=keep,
        parts=split is not None,
        device_of=lambda name: place,
        dtype=dtype,
        progress=progress,
    )
    report = load_all(model, reader, caller, split, fuse)
    let_it_save(OP, model)
    round_as_diffusers(model)
    return report


def load_all(
    model: nn.Module, reader: CheckpointReader, caller: Caller, split: Split | None = None, fuse: bool = False
) -> Report:
    """Loads a complete checkpoint into a model. If an error occurs, the model does not change.

    The arguments are those of `Loader`, `Loader.fill` and `load_quantized`.
    """
    report = Report("load packed layers", bytes_before=module_bytes(model))
    loader = Loader(model, reader, caller, partial(warnings.warn, stacklevel=3))
    try:
        loader.place()
        loader.fill_floats()
        report.layers = loader.fill(split)
        if fuse:
            fuse_projections(model)
    except BaseException:
        loader.changes.undo()
        raise
    report.bytes_after = module_bytes(model)
    return report
