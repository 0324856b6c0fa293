"""Two processes run examples/pipeline.py. They generate the tokens of one process, and each reads only its layers."""
# ruff: noqa: E402

from tests.support.mps import load_mps

load_mps()  # in each process, before transformers asks torch for the device; the fixture `mps` reports missing parts

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from examples import pipeline
from tests.support.llama import IDS, MODELS
from tests.support.processes import error_of, run
from torch_marlin_metal import load_quantized
from torch_marlin_metal.checkpoints import checkpoint

TOKENS = 6
CASES = (("cpu", "gptq-sym-g32-actorder"), ("cpu", "compressed-tensors-nvfp4"), ("mps", "gptq-sym-g32-actorder"))


def one_process(name: str, device: str) -> torch.Tensor:
    config = AutoConfig.from_pretrained(MODELS / name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    load_quantized(model, MODELS / name, device=device, progress=False)
    return model.eval().generate(IDS.to(device), max_new_tokens=TOKENS, do_sample=False).cpu()


def stage(rank: int, world: int, cases, wanted) -> None:
    """Runs in each process."""
    read, read_tensor = set(), checkpoint.read_tensor

    def recorded(info, *part):
        read.add(info.name)
        return read_tensor(info, *part)

    checkpoint.read_tensor = recorded
    for (device, name), tokens in zip(cases, wanted, strict=True):
        read.clear()
        model = pipeline.load_stage(str(MODELS / name), device)
        assert f"model.layers.{rank}.mlp.up_proj" in {n.rpartition(".")[0] for n in read}
        ends = ("model.embed_tokens.",)  # the last process reads the embedding for the tied output layer
        ends += ("model.norm.", "lm_head.") if rank == world - 1 else ()
        assert not (others := [n for n in read if not n.startswith((f"model.layers.{rank}.", *ends))]), others
        assert len(model.model.layers) == 1 and sum(p.numel() for p in model.parameters()) < 64 * 300
        assert torch.equal(pipeline.generate(model, IDS.to(device), TOKENS).cpu(), tokens)
    config = AutoConfig.from_pretrained(MODELS / name)
    config.num_hidden_layers = 1
    pipeline.AutoConfig.from_pretrained = lambda path: config
    assert "expected a model of at least 2 layers, got 1" in error_of(lambda: pipeline.load_stage("", "cpu"))


def test_two_processes_generate_the_tokens_of_one(mps: str, tmp_path) -> None:
    wanted = [one_process(name, device) for device, name in CASES]
    run(stage, 2, tmp_path, CASES, wanted)


def test_a_tied_output_layer_reads_the_embedding_on_the_last_process() -> None:
    own = pipeline.own_name
    embedding = "model.embed_tokens.weight"
    assert own(embedding, range(2), first=True, last=False, tied=True) == embedding
    assert own(embedding, range(2, 4), first=False, last=True, tied=True) == "lm_head.weight"
    assert own(embedding, range(2, 4), first=False, last=True, tied=False) is None
    assert own("model.layers.3.mlp.up_proj", range(2, 4), first=False, last=True, tied=True) == (
        "model.layers.1.mlp.up_proj"
    )
