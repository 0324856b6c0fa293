"""save_pretrained of models quantized in memory, and programs that load the saved directory without this package."""

import json
import os

import pytest
import torch
from accelerate import load_checkpoint_and_dispatch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from typer.testing import CliRunner

from tests.support.models import make_model, packed_layers, same
from tests.support.programs import run_python
from torch_marlin_metal import convert, load_quantized, quantize_model, quantize_weight
from torch_marlin_metal.checkpoints.card import CARD
from torch_marlin_metal.checkpoints.formats.native import ADVICE
from torch_marlin_metal.cli.app import app
from torch_marlin_metal.integrations.transformers import MarlinConfig, restore, restored, take_over

os.environ["HF_HUB_OFFLINE"] = "1"
IDS = torch.arange(8)[None]
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = SIZES | {"intermediate_size": 128, "num_key_value_heads": 2}


def made(name: str):
    torch.manual_seed(0)
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
        "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=4)),
        # The experts' down projection cannot be packed.
        "odd mixtral": lambda: MixtralForCausalLM(
            MixtralConfig(**LLAMA | {"intermediate_size": 100}, num_local_experts=4)
        ),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
        ),
        "falcon": lambda: FalconForCausalLM(FalconConfig(**SIZES)),
    }[name]()
    return model.eval()


def alone(code: str) -> str:
    """Runs a program that does not import this package and must fail. Returns its standard error."""
    done = run_python("-c", code)
    assert done.returncode == 1
    assert "torch_marlin_metal" not in done.stdout
    return done.stderr


@pytest.mark.parametrize(("name", "layers"), [("llama", 16), ("gpt2", 10), ("falcon", 10), ("mixtral", 10)])
def test_a_model_quantized_in_memory_is_saved_and_loaded(name, layers, tmp_path) -> None:
    model = made(name)
    quantize_model(model, "uint4", 32, progress=False)
    assert len(packed_layers(model)) == layers
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(again.state_dict(), model.state_dict())
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert (tmp_path / "README.md").read_text() == CARD
    # dequantize() restores floats and the original layer classes: GPT-2's layers hold transposed weights.
    again.dequantize().save_pretrained(tmp_path / "floats")
    floats = AutoModelForCausalLM.from_pretrained(tmp_path / "floats")
    torch.testing.assert_close(floats(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("name", ["gpt2", "falcon"])
def test_layers_of_other_classes_are_quantized_while_they_load(name, tmp_path) -> None:
    made(name).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MarlinConfig("uint4", 32))
    expected = made(name)
    quantize_model(expected, "uint4", 32, progress=False)
    assert same(model.state_dict(), expected.state_dict())


def test_a_model_inside_another_saves_its_own_part(tmp_path) -> None:
    model = made("llama")
    quantize_model(model, "uint4", 32, progress=False)
    model.model.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "whole")
    for folder in ("base", "whole"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert same(again.model.state_dict(), model.model.state_dict())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    model = made("llama")
    quantize_model(model, "uint4", 32, progress=False)
    model.save_pretrained(path)
    return path


def test_without_this_package_transformers_says_what_to_import(saved) -> None:
    load = f"from transformers import AutoModelForCausalLM as Auto\nAuto.from_pretrained({str(saved)!r})"
    assert ADVICE in alone(load).strip().splitlines()[-1]
    for word in ("install the package torch_marlin_metal", "'import torch_marlin_metal.integrations.transformers'"):
        assert word in ADVICE


def test_a_loader_that_does_not_read_the_settings_stops_at_the_sizes(saved) -> None:
    model, tensors = made("llama"), load_file(saved / "model.safetensors")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"size mismatch for lm_head.weight: .* torch.Size\(\[1\]\)"):
        model.load_state_dict(tensors, strict=False)
    config = model.config
    assert getattr(config, "quantization_config", None) is None
    with restored(), pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        LlamaForCausalLM.from_pretrained(saved, config=config)
    assert same(before, made("llama").state_dict())


def test_undone_the_import_still_loads_own_directories(saved) -> None:
    restore()
    try:
        assert len(packed_layers(AutoModelForCausalLM.from_pretrained(saved))) == 16
    finally:
        take_over()


def test_a_converted_directory_has_the_card_too(tmp_path) -> None:
    layer = quantize_weight(torch.randn(64, 128), "uint4", 32)
    layer.name = "down"
    convert.export_checkpoint([layer], tmp_path / "gptq", "gptq", version=2)
    (tmp_path / "gptq" / "README.md").write_text("# A model\n")
    path = convert.write_checkpoint(convert.open_reader(tmp_path / "gptq"), tmp_path / "own")
    assert (path / "README.md").read_text() == f"# A model\n\n{CARD}"
    again = convert.write_checkpoint(convert.open_reader(path), tmp_path / "again")
    assert (again / "README.md").read_text() == f"# A model\n\n{CARD}"
    model = nn.ModuleDict({"down": nn.Linear(128, 64, bias=False)})
    load_quantized(model, again, progress=False)
    assert torch.equal(model["down"].dequantize().T, layer.dequantize())
    assert json.loads((path / "config.json").read_text())["quantization_config"]["bnb_4bit_compute_dtype"] == ADVICE


def test_layers_of_two_packages_are_not_saved_together(tmp_path) -> None:
    model = made("llama")
    quantize_model(model, "uint4", 32, include="*.o_proj", progress=False)
    other = model.model.layers[0].mlp.up_proj
    other.register_buffer("qweight", torch.zeros(8, 128, dtype=torch.int32))
    other.register_buffer("scales", torch.ones(2, 128))
    with pytest.raises(
        ValueError, match=r"'model.layers.0.mlp.up_proj' and 0 more layers are packed layers of another"
    ):
        model.save_pretrained(tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()


def test_a_plain_state_dict_loads_where_the_same_layers_are_and_nowhere_else(tmp_path) -> None:
    model = make_model("cpu")
    quantize_model(model, "uint4", 32, progress=False)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    for tensors in (load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "model.pt")):
        again = make_model("cpu", seed=1)
        quantize_model(again, "uint4", 32, progress=False)
        again.load_state_dict(tensors)
        assert same(again.state_dict(), model.state_dict())
        with pytest.raises(RuntimeError, match=r"size mismatch for 0.up.weight: .* torch.Size\(\[1\]\)"):
            make_model("cpu").load_state_dict(tensors, strict=False)


def skeleton(quantized: bool, meta: bool = False) -> nn.Module:
    model = make_model("cpu", seed=1)
    if quantized:
        quantize_model(model, "uint4", 32, progress=False)
    return model.to("meta") if meta else model


@pytest.mark.parametrize(("device_map", "meta"), [(None, False), ({"": "cpu"}, False), ({"": "cpu"}, True)])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_accelerate_never_leaves_random_weights(name, device_map, meta, tmp_path) -> None:
    """accelerate refuses to load packed layers into a float model.

    accelerate ignores tensors that the model does not have, and would leave the model's weights at their initial
    values. Packed layers therefore store a guard of one byte under the name `weight`. A float layer has a tensor of
    this name, and accelerate detects that the sizes differ.
    """
    model = make_model("cpu")
    quantize_model(model, "uint4", 32, progress=False)
    save = save_file if name.endswith("safetensors") else torch.save
    save(model.state_dict(), tmp_path / name)
    with pytest.raises((RuntimeError, ValueError), match=r"(?s)torch.Size\(\[1\]\)"):
        load_checkpoint_and_dispatch(skeleton(False, meta), str(tmp_path / name), device_map)
    if meta:
        same_layers = skeleton(True, meta)
        loaded = load_checkpoint_and_dispatch(same_layers, str(tmp_path / name), device_map)
        assert same(loaded.state_dict(), model.state_dict())


def test_distributed_checkpoints_hold_packed_layers() -> None:
    model = skeleton(True)
    state = get_model_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    again = make_model("cpu", seed=2)
    quantize_model(again, "uint4", 32, progress=False)
    set_model_state_dict(again, state)
    assert same(again.state_dict(), model.state_dict())


def test_parameters_are_counted_whether_they_are_packed_or_not(saved) -> None:
    floats, model = made("llama"), AutoModelForCausalLM.from_pretrained(saved)
    assert model.num_parameters() == floats.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == floats.num_parameters(exclude_embeddings=True)
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert model.num_parameters(only_trainable=True) == trainable


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loaded_model_changes_its_dtype_and_keeps_its_packed_weights(saved, dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    scales = model.lm_head.scales.clone()
    model = model.half() if dtype == torch.float16 else model.to(dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert torch.equal(model.lm_head.scales, scales)
    assert model(IDS).logits.dtype == dtype


def test_the_command_line_says_what_stays_in_floats(tmp_path) -> None:
    made("odd mixtral").save_pretrained(tmp_path / "floats")
    done = CliRunner().invoke(
        app, ["quantize", str(tmp_path / "floats"), str(tmp_path / "packed"), "--group-size", "32"]
    )
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert "10 layers by rtn, 2 in uint8b128, 8 in uint4b8" in said
    assert "614 kB of matrices stay in floats (79%): model.layers." in said
    done = CliRunner().invoke(
        app, ["quantize", str(tmp_path / "floats"), str(tmp_path / "p2"), "--group-size", "32", "--json"]
    )
    left = json.loads(done.stdout)["left_in_floats"]
    assert left.keys().isdisjoint(("lm_head", "model.embed_tokens"))
    assert sum(left.values()) == 2 * 4 * 3 * 64 * 100 * 4


def test_little_or_nothing_quantized_is_said_when_loading(tmp_path) -> None:
    made("odd mixtral").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"only 21% of the matrix weights .*experts \(307 kB\): K = 100 of down_proj"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MarlinConfig("uint4", 32))
    only = MarlinConfig("uint4", 32, modules_to_not_convert=["*_proj"], vocabulary_format="none")
    message = r"from_pretrained: no layer was quantized; .*lm_head .*unless vocabulary_format names a format"
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=only)
