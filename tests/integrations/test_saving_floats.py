"""A model or conversion without packed layers writes floats, which load with and without this package."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from tests.integrations.test_peft import dense_twin
from tests.integrations.test_saving import made
from tests.support.llama import FOLDERS, IDS, write_gguf
from tests.support.models import same
from torch_marlin_metal import MarlinLinear, convert, load_quantized, quantize_model
from torch_marlin_metal.checkpoints.errors import NotQuantized
from torch_marlin_metal.checkpoints.formats.gguf_blocks import DECODERS
from torch_marlin_metal.checkpoints.writer import TARGETS
from torch_marlin_metal.cli.app import app
from torch_marlin_metal.integrations.transformers import MarlinConfig, restored

(GPTQ,) = (folder for folder in FOLDERS if "gptq" in folder.name)


@pytest.fixture(scope="module")
def q8_0(tmp_path_factory) -> Iterator[Path]:
    """Yields a directory with the config and a GGUF file whose type the reader does not know."""
    folder = tmp_path_factory.mktemp("q8_0")
    write_gguf(folder / "model.gguf", GPTQ, "Q8_0")
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(DECODERS, "Q8_0")
        yield folder


def from_gguf(q8_0: Path, folder: Path):
    return AutoModelForCausalLM.from_pretrained(q8_0, gguf_file="model.gguf", dtype=torch.float32)


def from_gptq(q8_0: Path, folder: Path):
    settings = MarlinConfig(modules_to_not_convert="*")
    return AutoModelForCausalLM.from_pretrained(GPTQ, quantization_config=settings, dtype=torch.float32)


def from_settings_without_layers(q8_0: Path, folder: Path):
    """Loads a directory of an old version of this package, whose settings name no layer."""
    from_gptq(q8_0, folder).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "torch_marlin_metal", "format_version": 1, "load_in_4bit": True, "layers": {}}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return AutoModelForCausalLM.from_pretrained(folder)


def dequantized(q8_0: Path, folder: Path):
    model = AutoModelForCausalLM.from_pretrained(GPTQ)
    model.dequantize()
    return model


def unpacked_by_hand(q8_0: Path, folder: Path):
    """Returns a model whose packed layers the caller has replaced. Only its quantizer still shows that it had some."""
    return dense_twin(AutoModelForCausalLM.from_pretrained(GPTQ, dtype=torch.float32))


@pytest.mark.parametrize(
    "entry_point",
    [from_gguf, from_gptq, from_settings_without_layers, dequantized, unpacked_by_hand],
    ids=lambda f: f.__name__,
)
def test_a_model_without_a_packed_layer_is_saved_as_floats(entry_point, q8_0, tmp_path):
    model, saved = entry_point(q8_0, tmp_path / "old").eval(), tmp_path / "saved"
    assert not any(isinstance(module, MarlinLinear) for module in model.modules())
    model.save_pretrained(saved)
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    assert not (saved / "README.md").exists()
    with restored():
        alone = AutoModelForCausalLM.from_pretrained(saved)
    for loaded in (alone, AutoModelForCausalLM.from_pretrained(saved)):
        assert getattr(loaded, "hf_quantizer", None) is None
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("target", TARGETS)
def test_a_conversion_without_a_packed_layer_writes_floats(target, q8_0, tmp_path):
    out = tmp_path / "out"
    options = ["--on-unsupported", "dequantize", "--format", target, "--gguf-names", "hf", "--json"]
    done = CliRunner().invoke(app, ["convert", str(q8_0 / "model.gguf"), str(out), *options])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["layers"], told["is_packed"]) == (14, False)
    assert json.loads((out / "config.json").read_text()) == {}
    assert not (out / "README.md").exists()
    assert CliRunner().invoke(app, ["inspect", str(out)]).exit_code == 0
    with pytest.raises(NotQuantized):
        convert.open_reader(out)
    config = AutoConfig.from_pretrained(GPTQ)
    del config.quantization_config
    config.save_pretrained(out)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert same(loaded.state_dict(), from_gguf(q8_0, out).state_dict())


def test_settings_inside_a_section_of_the_config_are_replaced_too(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(GPTQ, source)
    config = json.loads((source / "config.json").read_text())
    nested = {"text_config": {"quantization_config": config.pop("quantization_config"), "hidden_size": 8}}
    (source / "config.json").write_text(json.dumps(config | nested))
    convert.write_checkpoint(convert.open_reader(source), out)
    written = json.loads((out / "config.json").read_text())
    assert written["text_config"] == {"hidden_size": 8}
    assert written["quantization_config"]["layers"]
    assert len(convert.open_reader(out)) == 14


def test_load_quantized_says_that_such_a_directory_holds_floats(tmp_path):
    model = from_settings_without_layers(tmp_path, tmp_path)
    with pytest.raises(NotQuantized, match="its quantization settings name no layer, and its tensors are floats"):
        load_quantized(model, tmp_path)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "bfloat16"),
        ("llama", "torch.bfloat16"),
        ("gpt2", None),
        ("mixtral", None),
        ("mixtral", torch.bfloat16),
    ],
)
def test_dequantize_after_saving_is_that_before(family, dtype, tmp_path):
    results = []
    for saves in (0, 2):
        model = made(family).bfloat16()
        quantize_model(model, "uint4", 32, progress=False)
        model.save_pretrained(tmp_path / f"packed {saves}")
        loaded = type(model).from_pretrained(tmp_path / f"packed {saves}")
        for index in range(saves):
            loaded.save_pretrained(tmp_path / f"again {index}")
        loaded.dequantize() if dtype is None else loaded.dequantize(dtype)
        results.append(loaded)
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert same(*(model.state_dict() for model in results))


def test_a_dtype_that_torch_lacks_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(GPTQ)
    with pytest.raises(ValueError, match="dequantize: dtype: expected a dtype of torch or its name, got 'int4ish'"):
        model.dequantize("int4ish")
    assert any(isinstance(module, MarlinLinear) for module in model.modules())


def test_what_programs_print_of_a_packed_model():
    model = AutoModelForCausalLM.from_pretrained(GPTQ)
    assert f"{model.quantization_method}" == str(model.config.quantization_config.quant_method) == "torch_marlin_metal"
    assert model.config.quantization_config.bits == 4
    assert "bits" not in model.config.quantization_config.to_dict()
