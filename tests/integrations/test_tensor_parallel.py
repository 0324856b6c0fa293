"""transformers' tensor parallelism on the CPU: each process reads its part of the packed layers, or raises."""

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from tests.support.mixtures import split_experts
from tests.support.models import IDS
from tests.support.processes import error_of, run
from tests.support.split_llama import count_bytes_read, divisible_llama
from torch_marlin_metal import MarlinExperts
from torch_marlin_metal.checkpoints.files.safetensors import read_header
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.layers.embedding import MarlinEmbedding
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.parallel.styles import ColumnPart, RowPart

WORLD = 2


def save(folder: Path) -> None:
    divisible_llama(1).save_pretrained(folder / "floats")
    for name, options in (("layers", {"vocabulary_format": "none"}), ("all", {"vocabulary_format": "uint4"})):
        options = MarlinConfig("uint4", 32, **options)
        model = AutoModelForCausalLM.from_pretrained(folder / "floats", quantization_config=options)
        model.save_pretrained(folder / name)
    shutil.copytree(folder / "layers", folder / "other")
    (file,) = (folder / "other").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def load(path: Path, plan: dict[str, str] | None = None, **options) -> torch.nn.Module:
    options = {"tp_size": WORLD} | options
    config = DistributedConfig(**options) if plan is None else DistributedConfig(tp_plan=plan, **options)
    return AutoModelForCausalLM.from_pretrained(path, distributed_config=config)


def tokens(model) -> torch.Tensor:
    return model.generate(IDS, max_new_tokens=8, do_sample=False)


def compare(rank: int, world: int, folder: Path) -> None:
    """Runs in each process."""
    read = count_bytes_read()
    alone = tokens(AutoModelForCausalLM.from_pretrained(folder / "layers"))
    headers = [read_header(file)[0] for file in (folder / "layers").glob("*.safetensors")]
    everything = {name: info.nbytes for header in headers for name, info in header.items()}
    read.clear()
    model = load(folder / "layers")
    assert {type(m) for m in model.modules() if isinstance(m, MarlinLinear)} == {ColumnPart, RowPart}
    split = [name for name in read if name.endswith((".b_packed", ".scales", ".zeros"))]
    assert len(split) == 7 * 3 and all(read[name] * world == everything[name] for name in split)
    assert torch.equal(tokens(model), alone)
    assert "expected a whole weight, got one process' part of it" in error_of(
        lambda: model.save_pretrained(folder / "x")
    )

    alone = tokens(AutoModelForCausalLM.from_pretrained(folder / "all"))
    assert "layer 'model.embed_tokens': expected replicate for this packed layer, got 'embedding_rowwise'" in error_of(
        lambda: load(folder / "all")
    )
    model = load(folder / "all", {"model.embed_tokens": "replicate"})
    assert (type(model.model.embed_tokens), type(model.lm_head)) == (MarlinEmbedding, ColumnPart), (
        model,
        model.tp_plan,
    )
    assert torch.equal(tokens(model), alone)

    up = "model.layers.*.mlp.up_proj"
    assert "tp_plan: layer 'model.layers.0.mlp.up_proj': expected colwise, " in error_of(
        lambda: load(folder / "layers", {up: "rowwise_split_input"})
    )
    assert "tp_plan: layer 'model.layers.0.mlp': expected a style for this module" in error_of(
        lambda: load(folder / "layers", {"model.layers.*.mlp": "all_reduce"})
    )
    model = load(
        folder / "layers", dict.fromkeys([up, up.replace("up", "gate"), up.replace("up", "down")], "replicate")
    )
    assert type(model.model.layers[0].mlp.up_proj) is MarlinLinear
    assert torch.equal(tokens(model), tokens(AutoModelForCausalLM.from_pretrained(folder / "layers")))
    assert "expected tp_size=1 for a checkpoint of floats" in error_of(
        lambda: AutoModelForCausalLM.from_pretrained(
            folder / "floats",
            quantization_config=MarlinConfig("uint4", 32),
            distributed_config=DistributedConfig(tp_size=WORLD),
        )
    )
    for option in ("fsdp_size", "pp_size"):
        said = error_of(lambda option=option: load(folder / "layers", tp_size=1, **{option: WORLD}))
        name = "dp_size" if option == "fsdp_size" else option
        assert (
            f"distributed_config: expected ep_size, dp_size, pp_size of 1 for a model with packed weights, got {name}=2"
            in said
        )
    assert "got another checkpoint in rank 1 of the group than in rank 0" in error_of(
        lambda: load(folder / ("other" if rank else "layers"))
    )
    dist.barrier()


def test_each_process_reads_its_part(tmp_path) -> None:
    save(tmp_path)
    run(compare, WORLD, tmp_path, tmp_path)


def compare_mixtures(rank: int, world: int, folder: Path) -> None:
    """Runs in each process."""
    alone = tokens(AutoModelForCausalLM.from_pretrained(folder / "mixture"))
    experts = "model.layers.*.mlp.experts"
    assert (
        "tp_plan: layer 'model.layers.0.mlp.experts': expected a style for this module, whose "
        "model.layers.0.mlp.experts."
    ) in error_of(lambda: load(folder / "mixture"))
    whole = [experts, f"{experts}.gate_up_proj", f"{experts}.down_proj"]
    model = load(folder / "mixture", dict.fromkeys(whole, "replicate"))
    assert isinstance(model.model.layers[0].mlp.experts, MarlinExperts)
    assert torch.equal(tokens(model), alone)
    dist.barrier()


def test_packed_experts_stay_whole_or_are_refused(tmp_path) -> None:
    split_experts(tmp_path / "mixture")
    run(compare_mixtures, WORLD, tmp_path, tmp_path)
