"""Processes that load a checkpoint read and store only their parts, and generate the tokens of one process."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.llama import MODELS
from tests.support.models import IDS
from tests.support.processes import error_of, meshes, run
from tests.support.split_llama import count_bytes_read, divisible_llama, llama_plan
from torch_marlin_metal import convert, load_quantized
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.parallel import MarlinColwiseParallel, SplitPlan, split_columns, split_rows
from torch_marlin_metal.parallel.styles import ColumnPart, RowPart

FORMATS = ("native", "gptq", "awq")  # awq has no table of axes: its layers are read completely and then cut
# a process reads these tensors of a split layer completely, or not at all
SHARED = (".packed_format", ".g_idx", ".weight", ".bias")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """Saves a Llama in each format, and a Llama that differs in one word."""
    folder = tmp_path_factory.mktemp("checkpoints")
    divisible_llama(bias=True).save_pretrained(folder / "floats")
    options = MarlinConfig("uint4", 32, vocabulary_format="none")  # AWQ has codes of 4 bits only
    model = AutoModelForCausalLM.from_pretrained(folder / "floats", quantization_config=options)
    model.save_pretrained(folder / "native")
    config = json.loads((folder / "floats/config.json").read_text())
    reader = convert.open_reader(folder / "native")
    for target in ("gptq", "awq"):
        convert.export_checkpoint(
            list(reader), folder / target, target, other_tensors=list(reader.other_tensors()), config=config
        )
    shutil.copytree(folder / "native", folder / "other")
    file = folder / "other/model.safetensors"
    info = reader.checkpoint.tensors["model.layers.1.mlp.down_proj.b_packed"]
    data = bytearray(file.read_bytes())
    data[info.offset] ^= 1
    file.write_bytes(data)
    return folder


def empty(path: Path) -> nn.Module:
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).eval()


def load(path: Path, **options) -> nn.Module:
    model = empty(path)
    load_quantized(model, path, progress=False, **options)
    return model


def compare(rank: int, world: int, folder: Path) -> None:
    """Runs in each process."""
    read = count_bytes_read()
    for name in FORMATS:
        read.clear()
        whole = load(folder / name)
        everything = dict(read)
        alone = whole.generate(IDS, max_new_tokens=8, do_sample=False)
        for mesh in meshes(world):
            if rank >= mesh.size():
                continue
            read.clear()
            model = load(folder / name, split=SplitPlan(mesh, llama_plan()))
            check_parts(model, whole, mesh, rank)
            if name != "awq":
                check_bytes(read, everything, mesh.size())
            assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), alone)
    mesh = meshes(world)[1]
    if rank < 2:
        check_errors(rank, mesh, folder)


def check_parts(model: nn.Module, whole: nn.Module, mesh: DeviceMesh, rank: int) -> None:
    kinds = {ColumnPart: split_columns, RowPart: split_rows}
    checked = 0
    for name, layer in model.named_modules():
        if type(layer) in kinds:
            wanted = kinds[type(layer)](whole.get_submodule(name).to_packed(), mesh.size())[rank].tensors()
            own = layer.to_packed().tensors()
            assert own.keys() == wanted.keys() and all(torch.equal(own[key], wanted[key]) for key in own)
            # a tensor must not be a view of the complete tensor
            assert all(t.untyped_storage().nbytes() == t.nbytes for t in own.values())
            # only rank 0 has the bias, so that the sum contains it once
            assert (layer.bias is None) == (type(layer) is RowPart and rank > 0)
            checked += 1
    assert checked == 14


def check_bytes(read: dict[str, int], everything: dict[str, int], count: int) -> None:
    """Compares the bytes that were read for split layers with the expected share of all bytes."""
    layers = {name for name in everything if "_proj" in name and not name.endswith(SHARED)}
    assert len(layers) == 14 * 3
    for name in layers:
        assert read[name] * count == everything[name], name


def check_errors(rank: int, mesh: DeviceMesh, folder: Path) -> None:
    def error(path: Path, plan) -> str:
        model = empty(path)
        kinds = [type(module) for module in model.modules()]
        said = error_of(lambda: load_quantized(model, path, split=SplitPlan(mesh, plan), progress=False))
        assert [type(module) for module in model.modules()] == kinds and all(p.is_meta for p in model.parameters())
        return said

    native, columns = folder / "native", MarlinColwiseParallel()
    assert "expected the same package and checkpoint in every process, got another checkpoint in rank 1" in error(
        folder / ("other" if rank == 1 else "native"), llama_plan()
    )
    assert "split: layer 'lm_head': expected a packed Linear layer, got a Linear" in error(native, {"lm_head": columns})
    assert "expected MarlinColwiseParallel or MarlinRowwiseParallel, got ColwiseParallel" in error(
        native, {"model.layers.*.mlp.up_proj": ColwiseParallel()}
    )
    assert "expected names of modules, got model.layers.*.mlp.up, which the model lacks" in error(
        native, {"model.layers.*.mlp.up": columns}
    )
    act_order = MODELS / "gptq-sym-g32-actorder"
    assert "split_rows: perm: expected an order that keeps each feature in its part" in error(act_order, llama_plan())


def test_processes_read_their_parts_of_a_checkpoint(checkpoints, tmp_path) -> None:
    run(compare, 4, tmp_path, checkpoints)
