"""`torch-marlin-metal inspect`: describes a checkpoint layer by layer, and lists the layers that cannot be read."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from torch_marlin_metal.checkpoints.checkpoint import open_checkpoint
from torch_marlin_metal.checkpoints.float_layers import empty_model, matrices
from torch_marlin_metal.cli import arguments
from torch_marlin_metal.cli.output import ANSWER_IS_NO, DONE, Json, progress_bar, show
from torch_marlin_metal.convert import CheckpointReader, NotQuantized, UnsupportedFormat, open_reader
from torch_marlin_metal.load.caller import Caller
from torch_marlin_metal.load.names import namer
from torch_marlin_metal.load.plan import plan_load
from torch_marlin_metal.models.linear_layers import ModelMismatchError, shared_weights
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.printing import table
from torch_marlin_metal.sizes import human_size

Unsupported = Literal["error", "dequantize"]


def inspect(
    checkpoint: arguments.Checkpoint,
    layers: Annotated[bool, typer.Option(help="List every layer, not only the kinds of layers.")] = True,
    model: Annotated[Path | None, typer.Option(help="A config.json, or its directory: show what goes where.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="With --model: patterns of what the model may lack.")] = None,
    on_unsupported: Annotated[Unsupported, typer.Option(help="With --model: error, or dequantize.")] = "dequantize",
    allow_pickle: arguments.AllowPickle = False,
    gguf_names: arguments.Names = "gguf",
    gptq_version: arguments.GptqVersion = None,
    gptq_zeros_rule: arguments.GptqZerosRule = "word",
    as_json: Json = False,
) -> int:
    """Describes a checkpoint and its layers.

    Reads and checks every layer, and names the layers that cannot be read. With --model, reads only headers and shows
    the plan for loading the checkpoint into that transformers model. The exit code is 1 if a layer cannot be read or
    loaded.
    """
    if model is not None:
        reader = open_reader(checkpoint, allow_pickle=allow_pickle, gguf_names="hf", on_unsupported=on_unsupported)
        return _inspect_plan(reader, model, ignore or [], as_json)
    try:
        reader = open_reader(
            checkpoint,
            allow_pickle=allow_pickle,
            gptq_version=gptq_version,
            gptq_zeros_rule=gptq_zeros_rule,
            gguf_names=gguf_names,
        )
    except NotQuantized:
        return _inspect_floats(checkpoint, allow_pickle, as_json)
    found = []
    with progress_bar(len(reader), "layer", as_json) as bar:
        for index, name in enumerate(reader.layer_names):
            found.append(_describe(reader, index, name))
            bar.update()
    others = [(name, dtype) for name, _, dtype in reader.others()]
    value = {
        "path": str(checkpoint),
        "format": reader.format.name,
        "title": reader.format.title,
        "layers": found,
        "refused": sum("refused" in layer for layer in found),
        "other_tensors": len(others),
    }
    kinds = Counter(map(_kind, found)).items()
    numbers = ("N x K", "group", "bytes") if layers else ("layers",)
    shown = table(
        f"{reader.path}: {reader.format.title}",
        *(
            ("layer", "N x K", "format", "group", "scales", "bytes", "remarks")
            if layers
            else ("kind of layer", "layers")
        ),
        rows=map(_cells, found) if layers else ((kind, str(count)) for kind, count in kinds),
        right=numbers,
        caption=_summary(found, len(others)),
    )
    show(value, shown, as_json)
    return ANSWER_IS_NO if value["refused"] else DONE


def _inspect_plan(reader: CheckpointReader, config: Path, ignore: list[str], as_json: bool) -> int:
    file = config / "config.json" if config.is_dir() else config
    stated = json.loads(file.read_text()).get("architectures")
    model = empty_model(config, stated, "--model takes a directory of transformers")
    caller = Caller(op="inspect", find=namer(model, None), ties=shared_weights(model), ignore=ignore)
    try:
        plan = plan_load(model, reader, caller)
    except ModelMismatchError as error:
        show({"path": str(reader.path), "model": type(model).__name__, "error": str(error)}, str(error), as_json)
        return ANSWER_IS_NO
    rows = list(plan.rows())
    heads = ("in the checkpoint", "in the model", "what it becomes")
    shown = table(f"{reader.path} in {type(model).__name__}", *heads, rows=rows)
    value = {"path": str(reader.path), "model": type(model).__name__, "prefix": plan.prefix, "plan": rows}
    show(value, shown, as_json)
    return DONE


def _describe(reader: CheckpointReader, index: int, name: str) -> dict[str, Any]:
    try:
        weight = reader.read(index)
    except UnsupportedFormat as error:
        return {"name": name, "refused": str(error), "can_be_dequantized": error.dequantize is not None}
    assert isinstance(weight, PackedWeight)
    return {
        "name": name,
        "N": weight.N,
        "K": weight.K,
        "weight_format": weight.weight_format,
        "group_size": weight.group_size,
        "scales": " x ".join(
            str(held.dtype).removeprefix("torch.") for held in (weight.scales, weight.super_scales) if held is not None
        ),
        "act_order": weight.perm is not None,
        "bias": weight.bias is not None,
        "bytes": sum(tensor.nbytes for tensor in weight.tensors().values()),
        "source": weight.source,
    }


def _cells(layer: dict[str, Any]) -> tuple[str, ...]:
    if "refused" in layer:
        return layer["name"], "", "refused", "", "", "", layer["refused"]
    remarks = ", ".join(word for word, key in (("act-order", "act_order"), ("bias", "bias")) if layer[key])
    size, group = f"{layer['N']} x {layer['K']}", str(layer["group_size"])
    return layer["name"], size, layer["weight_format"], group, layer["scales"], human_size(layer["bytes"]), remarks


def _kind(layer: dict[str, Any]) -> str:
    if "refused" in layer:
        return f"refused: {layer['refused'].rpartition(': ')[2]}"
    return f"{layer['weight_format']} g{layer['group_size']}{', act-order' if layer['act_order'] else ''}"


def _summary(found: list[dict[str, Any]], others: int) -> str:
    refused = sum("refused" in layer for layer in found)
    size = sum(layer.get("bytes", 0) for layer in found)
    return f"{len(found) - refused} layers of {human_size(size)} are read, {refused} refused; {others} other tensors"


def _inspect_floats(path: Path, allow_pickle: bool, as_json: bool) -> int:
    opened = open_checkpoint(path, allow_pickle, quantized=False)
    size = sum(info.nbytes for info in opened.tensors.values())
    names = matrices(opened)
    value = {"path": str(path), "format": "floats", "tensors": len(opened.tensors), "bytes": size, "matrices": names}
    text = (
        f"{path}: not quantized: {len(opened.tensors)} tensors of {human_size(size)}, {len(names)} of them matrices "
        "whose rows the operators could hold (`torch-marlin-metal quantize` makes a 4-bit checkpoint)"
    )
    show(value, text, as_json)
    return DONE
