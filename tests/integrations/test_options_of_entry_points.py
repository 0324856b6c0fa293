"""An error names an option of the entry point that was called, and the option works: Python, transformers, commands."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.quantization_config import GgufConfig, Mxfp4Config
from typer.testing import CliRunner

from tests.support.llama import MODELS, write_gguf
from tests.support.mixtures import stacked_experts
from tests.support.models import IDS, SIZES
from torch_marlin_metal import MarlinExperts, MarlinLinear, convert, load_quantized, quantize_weight
from torch_marlin_metal.checkpoints.formats.gguf_blocks import DECODERS
from torch_marlin_metal.cli.app import app
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.integrations.transformers.config import LOADING

GPTQ = MODELS / "gptq-sym-g32-actorder"


def of_python(path, **options):
    for _ in convert.read_layers(path, **options):
        pass


def of_load_quantized(path, **options):
    load_quantized(LlamaForCausalLM(LlamaConfig(**SIZES)), path, progress=False, **options)


def of_from_pretrained(path, **options):
    config = {"quantization_config": MarlinConfig(**options)} if options else {}
    return AutoModelForCausalLM.from_pretrained(path, **config)


def of_command(path, *options):
    done = CliRunner().invoke(app, ["convert", str(path), str(path / "out"), *options])
    shutil.rmtree(path / "out.partial", ignore_errors=True)
    if done.exit_code:
        raise convert.CheckpointError(done.stderr)


@pytest.fixture
def pickled(tmp_path):
    """Returns a GPTQ directory of pickles, in old AutoGPTQ's layout."""
    return made(tmp_path, lambda path, state: torch.save(state, path / "pytorch_model.bin"))


def made(path, save, version: int = 1, **settings):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    layers, others = [], []
    for name, value in model.state_dict().items():
        if "_proj" in name:
            layers.append(quantize_weight(value, "uint4b8", 32))
            layers[-1].name = name.removesuffix(".weight")
        else:
            others.append((name, value))
    config = json.loads(model.config.to_json_string()) | {"architectures": ["LlamaForCausalLM"]}
    convert.export_checkpoint(layers, path / "x", "gptq", other_tensors=others, config=config, version=version)
    (file,) = (path / "x").glob("*.safetensors")
    state = load_file(file)
    config = json.loads((path / "x" / "config.json").read_text())
    shutil.rmtree(path / "x")
    config["quantization_config"] |= settings
    (path / "config.json").write_text(json.dumps(config))
    save(path, state)
    return path


@pytest.fixture
def mislabelled(tmp_path):
    """Returns a symmetric GPTQ directory of version 2 whose settings state version 1."""
    save = lambda path, state: save_file(state, path / "model.safetensors", {"format": "pt"})  # noqa: E731
    return made(tmp_path, save, 2, checkpoint_format="gptq", format="gptq")


PYTHON = {"gptq_version=2": {"gptq_version": 2}, "allow_pickle=True": {"allow_pickle": True}}
WAYS = {
    of_python: PYTHON,
    of_load_quantized: PYTHON,
    of_from_pretrained: {f"quantization_config=MarlinConfig({text})": value for text, value in PYTHON.items()},
    of_command: {"--gptq-version 2": ("--gptq-version", "2"), "--allow-pickle": ("--allow-pickle",)},
}


@pytest.mark.parametrize("entry_point", WAYS)
@pytest.mark.parametrize("kind", ["mislabelled", "pickled"])
def test_the_error_names_what_works_at_its_entry_point(kind, entry_point, request) -> None:
    path = request.getfixturevalue(kind)
    with pytest.raises(convert.CheckpointError) as caught:
        entry_point(path)
    (way,) = (text for text in WAYS[entry_point] if text in str(caught.value))
    options = WAYS[entry_point][way]
    model = entry_point(path, *options) if isinstance(options, tuple) else entry_point(path, **options)
    if entry_point is of_from_pretrained:
        assert sum(isinstance(layer, MarlinLinear) for layer in model.modules()) == 7


def test_a_layer_that_can_be_decoded_says_how(tmp_path) -> None:
    """Loads E5M2 with each entry point."""
    from tests.integrations.test_beside_transformers import E5M2, write

    write(tmp_path, *E5M2)
    python = "on_unsupported='dequantize'"
    asked = {"on_unsupported": "error"}
    ways = {of_python: (python, {}), of_command: ("--on-unsupported dequantize", {})}
    ways |= {of_load_quantized: (python, asked), of_from_pretrained: (f"MarlinConfig({python})", asked)}
    for entry_point, (way, options) in ways.items():
        with pytest.raises(convert.CheckpointError, match=re.escape(f"{way}") + r"\)? decodes it to floats"):
            entry_point(tmp_path, **options)
    of_python(tmp_path, on_unsupported="dequantize")
    of_command(tmp_path, "--on-unsupported", "dequantize")
    model = of_from_pretrained(tmp_path)
    assert not any(isinstance(layer, MarlinLinear) for layer in model.modules())


def test_further_layers_can_be_left_out(tmp_path) -> None:
    """The checkpoint has one block more than the model, as with multi-token prediction."""
    config = json.loads((GPTQ / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    shutil.copy(GPTQ / "model.safetensors", tmp_path)
    with pytest.raises(ValueError, match=r"has no place for model\.layers\.1.*MarlinConfig\(ignore="):
        of_from_pretrained(tmp_path)
    model = of_from_pretrained(tmp_path, ignore="model.layers.1.*")
    assert sum(isinstance(layer, MarlinLinear) for layer in model.modules()) == 7


def test_a_gguf_file_takes_the_same_config(tmp_path, monkeypatch) -> None:
    monkeypatch.delitem(DECODERS, "Q8_0")  # this type then stands for a future type
    write_gguf(tmp_path / "tiny.gguf", MODELS / "auto-round-asym-g32", "Q4_0", embedding="Q8_0")

    def load(**options):
        config = {"quantization_config": MarlinConfig(**options)} if options else {}
        return AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", **config)

    with pytest.raises(convert.UnsupportedFormat, match="Q8_0 is not a type"):
        load(on_unsupported="error")
    model = load(modules_to_not_convert="*.up_proj")
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert isinstance(model.model.layers[0].mlp.down_proj, MarlinLinear)
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", quantization_config=config)
    assert not any(isinstance(layer, MarlinLinear) for layer in model.modules())


def test_mxfp4_config_decodes_gpt_oss(tmp_path) -> None:
    floats = stacked_experts(tmp_path / "gpt-oss")
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt-oss", quantization_config=Mxfp4Config())
    assert any(isinstance(module, MarlinExperts) for module in packed.modules())
    config = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt-oss", quantization_config=config, dtype=torch.float32)
    assert not any(isinstance(module, MarlinExperts) for module in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, floats(IDS).logits, rtol=1e-4, atol=1e-4)


def test_every_reading_option_has_a_field_and_a_command() -> None:
    text = CliRunner().invoke(app, ["convert", "--help"]).stdout
    for option in convert.ReadOptions.__dataclass_fields__:
        assert f"--{option.replace('_', '-')}" in text
        assert option in LOADING or option == "gguf_names"
