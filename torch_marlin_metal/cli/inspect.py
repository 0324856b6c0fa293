"""`torch-marlin-metal inspect`: describes a checkpoint layer by layer, and lists the layers that would be refused."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from torch_marlin_metal.checkpoints.checkpoint import open_checkpoint
from torch_marlin_metal.checkpoints.float_layers import matrices
from torch_marlin_metal.cli import arguments
from torch_marlin_metal.cli.output import ANSWER_IS_NO, DONE, Json, human_bytes, progress_bar, show, table
from torch_marlin_metal.convert import CheckpointReader, NotQuantized, PackedWeight, UnsupportedFormat, open_reader


def inspect(
    checkpoint: arguments.Checkpoint,
    layers: Annotated[bool, typer.Option(help="List every layer, not only the kinds of layers.")] = True,
    allow_pickle: arguments.AllowPickle = False,
    gguf_names: arguments.Names = "gguf",
    gptq_version: arguments.GptqVersion = None,
    gptq_zeros_rule: arguments.GptqZerosRule = "word",
    as_json: Json = False,
) -> int:
    """Describes a checkpoint: its format, its layers and their sizes, and the layers that cannot be read.

    Every layer is read and checked, one at a time. For a layer that cannot be read, the reason is shown, and the exit
    code is 1.
    """
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
    text = _kinds(reader, found, len(others)) if not layers else _every_layer(reader, found, len(others))
    show(value, text, as_json)
    return ANSWER_IS_NO if value["refused"] else DONE


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
        "scales": str(weight.scales.dtype).removeprefix("torch."),
        "act_order": weight.perm is not None,
        "bias": weight.bias is not None,
        "bytes": sum(tensor.nbytes for tensor in weight.tensors().values()),
        "source": weight.source,
    }


def _every_layer(reader: CheckpointReader, found: list[dict[str, Any]], others: int) -> Any:
    shown = table(
        f"{reader.path}: {reader.format.title}",
        "layer", "N x K", "format", "group", "scales", "bytes", "remarks",
        right=("N x K", "group", "bytes"),
    )  # fmt: skip
    for layer in found:
        if "refused" in layer:
            shown.add_row(layer["name"], "", "refused", "", "", "", layer["refused"])
            continue
        remarks = [word for word, present in (("act-order", layer["act_order"]), ("bias", layer["bias"])) if present]
        shown.add_row(
            layer["name"],
            f"{layer['N']} x {layer['K']}",
            layer["weight_format"],
            str(layer["group_size"]),
            layer["scales"],
            human_bytes(layer["bytes"]),
            ", ".join(remarks),
        )
    shown.caption = _summary(found, others)
    return shown


def _kinds(reader: CheckpointReader, found: list[dict[str, Any]], others: int) -> Any:
    shown = table(f"{reader.path}: {reader.format.title}", "kind of layer", "layers", right=("layers",))
    for kind, count in Counter(_kind(layer) for layer in found).items():
        shown.add_row(kind, str(count))
    shown.caption = _summary(found, others)
    return shown


def _kind(layer: dict[str, Any]) -> str:
    if "refused" in layer:
        return f"refused: {layer['refused'].rpartition(': ')[2]}"
    return f"{layer['weight_format']} g{layer['group_size']}{', act-order' if layer['act_order'] else ''}"


def _summary(found: list[dict[str, Any]], others: int) -> str:
    refused = sum("refused" in layer for layer in found)
    size = sum(layer.get("bytes", 0) for layer in found)
    return f"{len(found) - refused} layers of {human_bytes(size)} are read, {refused} refused; {others} other tensors"


def _inspect_floats(path: Path, allow_pickle: bool, as_json: bool) -> int:
    opened = open_checkpoint(path, allow_pickle, quantized=False)
    size = sum(info.nbytes for info in opened.tensors.values())
    names = matrices(opened)
    value = {"path": str(path), "format": "floats", "tensors": len(opened.tensors), "bytes": size, "matrices": names}
    text = (
        f"{path}: not quantized: {len(opened.tensors)} tensors of {human_bytes(size)}, {len(names)} of them matrices "
        "whose rows the operators could hold (`torch-marlin-metal quantize` makes a 4-bit checkpoint)"
    )
    show(value, text, as_json)
    return DONE
