"""from_pretrained loads checkpoints of other programs on each device; also saving, compiling, quantizing on load."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    CompileConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
)

from tests.support.checkpoint_writers import (
    LAYER,
    write_awq,
    write_compressed_tensors,
    write_gptq,
    write_hqq,
    write_intx,
    write_mxfp4,
    write_nvfp4,
)
from tests.support.llama import FOLDERS, IDS, MODELS, check_layers, check_logits, dense_model, write_gguf
from tests.support.models import packed_layers, same
from torch_marlin_metal import prepare, quantize_model
from torch_marlin_metal.convert import CheckpointError, UnsupportedFormat, export_checkpoint, open_reader
from torch_marlin_metal.integrations.transformers import (
    MarlinConfig,
    quantizer,
)
from torch_marlin_metal.layers.fuse import FusedLinear
from torch_marlin_metal.models.linear_layers import ModelMismatchError

os.environ["HF_HUB_OFFLINE"] = "1"
GPTQ = MODELS / "gptq-sym-g32-actorder"


def load(folder: Path, **options) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def greedy(model, count: int) -> list[int]:
    """Generates tokens by complete forward passes without a cache."""
    ids = IDS.to(model.device)
    for _ in range(count):
        ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    return ids[0].tolist()


def test_a_model_of_another_program_runs_within_the_bound(folder_and_device) -> None:
    folder, device = folder_and_device
    model = load(folder, device_map=device)
    assert {tensor.device.type for held in (model.parameters(), model.buffers()) for tensor in held} == {device}
    references, stored = load_file(folder / "reference.safetensors"), load_file(folder / "model.safetensors")
    weights = {name: layer.dequantize().cpu() for name, layer in packed_layers(model).items()}
    assert {f"{name}.weight" for name in weights} == references.keys()
    for name, weight in weights.items():
        assert torch.equal(weight.half(), references[f"{name}.weight"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    check_layers(model, device)
    check_logits(model, dense_model(folder, weights, stored), device)
    generated = model.generate(IDS.to(device), max_new_tokens=3, do_sample=False)
    assert generated.device.type == device
    assert generated[0, : IDS.shape[1]].tolist() == IDS[0].tolist()
    if device == "cpu":
        assert generated[0].tolist() == greedy(model, 3)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("fuse", [False, True])
def test_saved_and_loaded_again_it_is_the_same(folder, fuse, tmp_path) -> None:
    model = load(folder, quantization_config=MarlinConfig(fuse=fuse))
    assert sum(isinstance(module, FusedLinear) for module in model.modules()) == (10 if fuse else 0)
    model.save_pretrained(tmp_path)
    again, plain = load(tmp_path), load(folder)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["format_version"] == 1
    assert same(again.state_dict(), plain.state_dict())
    assert torch.equal(again(IDS).logits, plain(IDS).logits)
    assert (again.dtype, again.generation_config.eos_token_id) == (plain.dtype, plain.generation_config.eos_token_id)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_fused_layers_generate_the_same_tokens(folder, tmp_path) -> None:
    # In fp32, because the two largest logits of these random models may differ by less than a rounding of fp16.
    plain = load(folder, dtype=torch.float32)
    fused = load(folder, dtype=torch.float32, quantization_config=MarlinConfig(fuse="layers"))
    assert sum("forward" in vars(module) for module in fused.modules()) == 11  # 5 norms, 2 of attention, blocks, layers
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(fused.generate(IDS, **options), plain.generate(IDS, **options))
    fused.save_pretrained(tmp_path)
    assert same(load(tmp_path, dtype=torch.float32).state_dict(), plain.state_dict())


def test_ways_to_fuse_are_checked() -> None:
    with pytest.raises(ValueError, match="MarlinConfig: fuse: expected True, False or 'layers', got 'all'"):
        MarlinConfig(fuse="all")


def test_shards_and_a_base_model_without_its_head(tmp_path) -> None:
    model = load(GPTQ)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same(load(tmp_path).state_dict(), model.state_dict())
    base = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    assert torch.equal(load(tmp_path / "base")(IDS).logits, model(IDS).logits)


def test_dtypes() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        model = load(GPTQ, dtype=dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert {layer.weight.dtype for layer in packed_layers(model).values()} == {dtype}
        assert {layer.scales.dtype for layer in packed_layers(model).values()} == {torch.float16}
        assert model(IDS[:, :2]).logits.dtype == dtype


def test_device_maps(mps) -> None:
    assert load(GPTQ, device_map="auto").device.type == "mps"
    expected = load(GPTQ, dtype=torch.float32)(IDS).logits.argmax(-1)
    split = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": mps, "model.norm": mps}
    split |= {"model.rotary_emb": mps, "lm_head": "cpu"}
    model = load(GPTQ, dtype=torch.float32, device_map=split)
    check_layers(model, mps)
    assert {layer.b_packed.device.type for layer in packed_layers(model).values()} == {mps}
    assert torch.equal(model(IDS).logits.argmax(-1).cpu(), expected)


def test_prepare_compiles_while_loading(mps, monkeypatch) -> None:
    softmetal = pytest.importorskip("softmetal", reason="watches the software Metal device compile")
    prepared = []
    monkeypatch.setattr(quantizer, "prepare", lambda model, **options: prepared.append(prepare(model, **options)))
    ids = IDS[:1, :1].to(mps)
    model = load(GPTQ, device_map=mps, dtype=torch.float32, quantization_config=MarlinConfig(prepare=True))
    assert len(prepared) == 1 and prepared[0] > 0
    with softmetal.compiles() as seen:
        logits = model(ids).logits
        torch.mps.synchronize()
    assert [compiled for compiled in seen if "MARLIN_ONLY" in compiled.text] == []
    assert torch.equal(logits, load(GPTQ, device_map=mps, dtype=torch.float32)(ids).logits)
    assert len(prepared) == 1, "not without the option"


@pytest.mark.parametrize("place", ["disk", "cuda:0", "meta"])
def test_devices_without_kernels_are_refused(place) -> None:
    with pytest.raises(ValueError, match=f"from_pretrained: device_map: expected cpu or mps, got '{place}'"):
        load(GPTQ, device_map={"": place})


@pytest.mark.parametrize(
    ("fuse", "backend"),
    [
        (False, "aot_eager"),  # inductor's compile of the float operations takes half a minute
        pytest.param(False, "inductor", marks=pytest.mark.whole),
        pytest.param(True, "eager", marks=pytest.mark.whole),
    ],
)
def test_a_compiled_step_with_a_static_cache(fuse, backend) -> None:
    torch._dynamo.reset()
    model = load(GPTQ, dtype=torch.float32, quantization_config=MarlinConfig(fuse=fuse))
    expected = greedy(model, 4)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    cache = StaticCache(config=model.config, max_cache_len=32)
    ids = IDS
    with torch.no_grad():
        token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        ids = torch.cat((ids, token), dim=1)
        for position in range(IDS.shape[1], IDS.shape[1] + 3):
            step = compiled(token, past_key_values=cache, cache_position=torch.tensor([position]))
            token = step.logits[:, -1:].argmax(-1)
            ids = torch.cat((ids, token), dim=1)
    assert ids[0].tolist() == expected
    how = CompileConfig(fullgraph=True, backend=backend, mode=None)
    how._compile_all_devices = True  # by default, generate compiles only on CUDA
    counters["stats"].clear()
    static = model.generate(IDS, max_new_tokens=4, do_sample=False, cache_implementation="static", compile_config=how)
    assert static[0].tolist() == expected
    assert counters["stats"]["unique_graphs"] >= 1
    assert model.hf_quantizer.is_compileable


K, N = 128, 64
DOWN = "model.layers.1.mlp.down_proj"
WRITERS = {
    "gptq": lambda path, rng: write_gptq(path, rng, K, N, 32, act_order=True),
    "awq gemm": lambda path, rng: write_awq(path, rng, K, N, 32),
    "awq gemv_fast": lambda path, rng: write_awq(path, rng, K, N, 32, version="gemv_fast"),
    "compressed-tensors": lambda path, rng: write_compressed_tensors(path, rng, K, N, 32, sym=False),
    "compressed-tensors mxfp4": lambda path, rng: write_mxfp4(path, rng, K, N, container="compressed-tensors"),
    "modelopt": lambda path, rng: write_nvfp4(path, rng, K, N, container="modelopt"),
    "hqq": lambda path, rng: write_hqq(path, rng, K, N, 64),
    "torchao": lambda path, rng: write_intx(path, rng, K, N, 32, sym=False, own_names=True),
}


def one_packed_layer(path: Path, writer) -> np.ndarray:
    """Writes the tiny Llama with one 4-bit layer in another program's layout. Every other layer is fp16."""
    reference = writer(path, np.random.default_rng(0))
    packed, settings = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    with open(path / "model.safetensors", "rb") as file:
        metadata = json.loads(file.read(int.from_bytes(file.read(8), "little"))).get("__metadata__")
    stored = load_file(GPTQ / "model.safetensors")
    dense = load_file(GPTQ / "reference.safetensors")
    dense |= {name: tensor for name, tensor in stored.items() if "norm" in name or "embed" in name}
    del dense[f"{DOWN}.weight"]
    packed = {name.replace(LAYER, DOWN): tensor for name, tensor in packed.items()}
    metadata = (
        None
        if metadata is None
        else {key.replace(LAYER, DOWN): text.replace(LAYER, DOWN) for key, text in metadata.items()}
    )
    save_file(dense | packed, path / "model.safetensors", metadata)
    config = json.loads((GPTQ / "config.json").read_text()) | {"dtype": "float16"} | settings
    (path / "config.json").write_text(json.dumps(config))
    return reference


@pytest.mark.parametrize("name", WRITERS)
def test_every_method_puts_the_layer_in_place(name, tmp_path) -> None:
    reference = one_packed_layer(tmp_path, WRITERS[name])
    model = load(tmp_path)
    ((found, layer),) = packed_layers(model).items()
    assert found == DOWN
    np.testing.assert_array_equal(layer.dequantize().numpy(), reference)
    assert torch.equal(
        model.model.layers[0].mlp.up_proj.weight,
        load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.up_proj.weight"],
    )
    assert bool(model(IDS).logits.isfinite().all())


def test_layers_that_cannot_be_represented(tmp_path) -> None:
    reference = one_packed_layer(tmp_path, lambda path, rng: write_gptq(path, rng, K, N, 8))
    with pytest.raises(UnsupportedFormat, match=rf"layer '{DOWN}': no group size of the operators divides"):
        load(tmp_path, quantization_config=MarlinConfig(on_unsupported="error"))
    model = load(tmp_path)
    assert packed_layers(model) == {}
    assert torch.equal(model.get_submodule(DOWN).weight, torch.from_numpy(reference).half())


def copy_of(folder: Path, path: Path, change=lambda tensors: tensors, **settings) -> Path:
    shutil.copytree(folder, path)
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | settings))
    return path


def test_bad_checkpoints_are_named(tmp_path) -> None:
    def renamed(tensors):
        return {name.replace("layers.1.mlp.up_proj", "layers.1.mlp.upper"): value for name, value in tensors.items()}

    with pytest.raises(ModelMismatchError, match=r"LlamaForCausalLM has no place for model.layers.1.mlp.upper"):
        load(copy_of(GPTQ, tmp_path / "renamed", renamed))
    with pytest.raises(
        ModelMismatchError, match=r"down_proj': expected a weight of \[64, 96\].*checkpoint's is \[64, 128\]"
    ):
        load(copy_of(GPTQ, tmp_path / "sizes", intermediate_size=96))
    damaged = tmp_path / "damaged"
    shutil.copytree(GPTQ, damaged)
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="beyond the file"):
        load(damaged)
    variant = copy_of(GPTQ, tmp_path / "variant")
    shutil.copy(variant / "model.safetensors", variant / "model.other.safetensors")
    with pytest.raises(CheckpointError, match=r"the library asks for model\.other\.safetensors"):
        load(variant, variant="other")


def test_no_code_of_a_checkpoint_runs(tmp_path) -> None:
    path = copy_of(GPTQ, tmp_path / "code", auto_map={"AutoModelForCausalLM": "modeling_code.LlamaForCausalLM"})
    (path / "modeling_code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    load(path)
    assert not (tmp_path / "ran").exists()


def floats(path: Path) -> Path:
    model = load(GPTQ, dtype=torch.float32).dequantize()
    assert packed_layers(model) == {}
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("weight_format", ["uint4b8", "uint4", "nvfp4", "lut4"])
def test_an_unquantized_directory_is_quantized_while_it_loads(weight_format, tmp_path) -> None:
    path = floats(tmp_path / "floats")
    size = None if weight_format == "nvfp4" else 32
    model = load(path, quantization_config=MarlinConfig(weight_format, size, "mse"))
    expected = load(path)
    quantize_model(expected, weight_format, size, "mse", progress=False)
    assert len(packed_layers(model)) == 16
    assert same(model.state_dict(), expected.state_dict())
    model.save_pretrained(tmp_path / "saved")
    assert same(load(tmp_path / "saved").state_dict(), model.state_dict())


def test_biases_stay_with_their_layers(tmp_path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    source = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1))
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    source.save_pretrained(tmp_path / "floats")
    expected = load(tmp_path / "floats")
    quantize_model(expected, "uint4", 32, progress=False)
    config = MarlinConfig("uint4", 32, fuse=True)
    load(tmp_path / "floats", quantization_config=config).save_pretrained(tmp_path / "saved")
    reader = open_reader(tmp_path / "saved")
    export_checkpoint(
        reader, tmp_path / "gptq", "gptq", other_tensors=reader.other_tensors(), config=reader.config, version=2
    )
    for folder in ("saved", "gptq"):
        model = load(tmp_path / folder)
        assert torch.equal(model.model.layers[1].self_attn.k_proj.bias, source.model.layers[1].self_attn.k_proj.bias)
        assert torch.equal(model(IDS).logits, expected(IDS).logits)


def test_layers_to_leave_and_weights_that_cannot_be_quantized(tmp_path) -> None:
    path = floats(tmp_path / "floats")
    model = load(path, quantization_config=MarlinConfig("uint4b8", 32, modules_to_not_convert="*.o_proj"))
    assert len(packed_layers(model)) == 14  # of 16 layers, the two o_proj stay floats
    excluded = load(GPTQ, quantization_config=MarlinConfig(modules_to_not_convert=["re:.*o_proj"]))
    assert len(packed_layers(excluded)) == 12
    for folder, vocabulary in ((path, 2), (GPTQ, 0)):  # the embedding and the output layer are packed, too
        for names, count in ((["o_proj"], 12), (["o_proj", "layers.0"], 6), (["self_attn.q_proj", "mlp"], 6)):
            part = load(folder, quantization_config=MarlinConfig("uint4b8", 32, modules_to_not_convert=names))
            assert len(packed_layers(part)) == count + vocabulary
        with pytest.raises(ValueError, match=r"modules_to_not_convert: '_proj' matches none of"):
            load(folder, quantization_config=MarlinConfig("uint4b8", 32, modules_to_not_convert=["_proj"]))
    values = load_file(path / "model.safetensors")
    values["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(values, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"from_pretrained: layer 'model.layers.0.mlp.up_proj': .*finite"):
        load(path, quantization_config=MarlinConfig("uint4b8", 32))
    with pytest.raises(ValueError, match="group_size"):
        load(path, quantization_config=MarlinConfig("uint4b8", 48))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_format": "int3"}, "weight_format: expected one of"),
        ({"method": "best"}, "method: expected 'rtn' or 'mse', got 'best'"),
        ({"on_unsupported": "skip"}, "on_unsupported: expected 'error' or 'dequantize', got 'skip'"),
    ],
)
def test_bad_arguments(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        MarlinConfig(**arguments)


def test_a_gguf_file(tmp_path) -> None:
    folder = MODELS / "auto-round-asym-g32"
    _, weights = write_gguf(tmp_path / "tiny.gguf", folder, "Q4_0", embedding="Q4_0")
    model = load(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    layers = packed_layers(model)
    assert {layer.weight_format for layer in layers.values()} == {"uint4b8"}
    assert layers.pop("lm_head").b_packed is layers["model.embed_tokens"].b_packed
    assert layers.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(layers[name].dequantize(), torch.from_numpy(weight))
    assert greedy(model, 2) == model.generate(IDS, max_new_tokens=2, do_sample=False)[0].tolist()
    model.save_pretrained(tmp_path / "saved")
    assert same(load(tmp_path / "saved").state_dict(), model.state_dict())
