"""Complete models that other programs quantized to 8 bits, loaded by each entry point (tests/data/models/README.md)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from torch_marlin_metal import MarlinLinear, convert, load_quantized
from torch_marlin_metal.checkpoints.settings import CONFIG_FILES
from torch_marlin_metal.integrations.transformers import MarlinConfig

DATA = Path(__file__).parents[1] / "data/models/eight_bits"
EMBEDDING = "model.embed_tokens.weight"
# The weight formats of self_attn and of mlp.
MODELS = {
    "modelopt-mixed": ("float8_e4m3", "nvfp4"),
    "quanto-qint8": ("uint8b128", "uint8b128"),
    "torchao-float8": ("float8_e4m3", "float8_e4m3"),
}


def by_read_layers(path: Path) -> tuple[dict[str, MarlinLinear], Tensor]:
    reader = convert.open_reader(path)
    embedding = dict(reader.other_tensors())[EMBEDDING]
    return {weight.name: MarlinLinear.from_packed(weight) for weight in reader}, embedding


def by_load_quantized(path: Path) -> tuple[dict[str, MarlinLinear], Tensor]:
    config = AutoConfig.from_pretrained(path)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    load_quantized(model, path, progress=False)
    return parts(model)


def by_from_pretrained(path: Path) -> tuple[dict[str, MarlinLinear], Tensor]:
    options = {"quantization_config": MarlinConfig(), "dtype": torch.float32, "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(path, **options)
    assert not any(info.values()), info
    return parts(model)


def parts(model: nn.Module) -> tuple[dict[str, MarlinLinear], Tensor]:
    embedding = model.get_parameter(EMBEDDING)
    assert model.get_parameter("lm_head.weight") is embedding
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, MarlinLinear)}, embedding.data


@pytest.mark.parametrize("converted", [False, True], ids=["stored", "converted"])
@pytest.mark.parametrize("entry_point", [by_read_layers, by_load_quantized, by_from_pretrained])
@pytest.mark.parametrize("name", MODELS)
def test_each_layer_is_the_producers_own(tmp_path: Path, name: str, entry_point, converted: bool) -> None:
    path, references = DATA / name, load_file(DATA / name / "reference.safetensors")
    if converted:
        path = convert.write_checkpoint(convert.open_reader(path), tmp_path / "out")
        assert {file.name for file in path.iterdir()}.isdisjoint(CONFIG_FILES)  # they describe the source
    layers, embedding = entry_point(path)
    assert torch.equal(embedding.float(), load_file(DATA / name / "model.safetensors")[EMBEDDING].float())
    assert {f"{layer}.weight" for layer in layers} == set(references)
    for layer, module in layers.items():
        reference = references[f"{layer}.weight"]
        assert module.weight_format == MODELS[name]["mlp" in layer]
        decoded = module.dequantize().to(reference.dtype)  # producers round once to bf16
        torch.testing.assert_close(decoded, reference, rtol=0, atol=0, equal_nan=True)


def test_every_model_is_tried() -> None:
    assert sorted(path.name for path in DATA.iterdir()) == sorted(MODELS)
