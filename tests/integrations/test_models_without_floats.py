"""A model whose matrices are all packed still answers the library's requests for its dtype and device."""

import copy

import pytest
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import OlmoConfig, OlmoForCausalLM, PreTrainedModel

from torch_marlin_metal import fuse_layers, load_quantized, quantize_model
from torch_marlin_metal.integrations.transformers import MarlinConfig

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def config() -> OlmoConfig:
    """Returns a new config, because saving a packed model writes its settings into its config."""
    return OlmoConfig(vocab_size=64, eos_token_id=1, **SIZES)


def floats() -> OlmoForCausalLM:
    torch.manual_seed(0)
    return OlmoForCausalLM(config()).bfloat16().eval()  # the norms of OLMo have no weights


def quantized() -> OlmoForCausalLM:
    model = floats()
    quantize_model(model, "uint4", 32, progress=False)
    return model


def loaded_by_name(folder) -> OlmoForCausalLM:
    with torch.device("meta"):
        model = OlmoForCausalLM(config()).bfloat16()
    load_quantized(model, folder, progress=False)
    return model


def check(model: PreTrainedModel, dtype: torch.dtype) -> None:
    assert not any(parameter.is_floating_point() for parameter in model.parameters())
    for part in (model, model.model):
        assert part.dtype == dtype
        assert part.device == torch.device("cpu")


def test_a_model_of_transformers_has_a_dtype_and_a_device(tmp_path) -> None:
    floats().save_pretrained(tmp_path / "floats")
    quantized().save_pretrained(tmp_path / "saved")
    while_loading = OlmoForCausalLM.from_pretrained(
        tmp_path / "floats", quantization_config=MarlinConfig("uint4", 32)
    ).eval()
    models = [
        quantized(),
        while_loading,
        OlmoForCausalLM.from_pretrained(tmp_path / "saved"),
        loaded_by_name(tmp_path / "saved"),
    ]
    ids = torch.arange(8)[None]
    for number, model in enumerate(models):
        check(model, torch.bfloat16)
        check(copy.deepcopy(model), torch.bfloat16)
        model.save_pretrained(tmp_path / str(number))
        again = OlmoForCausalLM.from_pretrained(tmp_path / str(number))
        check(again, torch.bfloat16)
        assert torch.equal(again(ids).logits, model(ids).logits)
        assert again.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 10)
        check(again.to(torch.float16), torch.float16)
    assert all(torch.equal(model(ids).logits, models[0](ids).logits) for model in models)
    assert fuse_layers(models[0]).fused


def test_peft_adds_adapters_to_a_model_without_parameters() -> None:
    model = get_peft_model(quantized(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    ids = torch.arange(8)[None]
    model(ids, labels=ids).loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 4 and any(parameter.grad.any() for parameter in trained)
    assert {parameter.device for parameter in trained} == {model.device}


def test_a_model_of_transformers_without_packed_layers_is_as_before() -> None:
    class Empty(PreTrainedModel):
        config_class = OlmoConfig
        _supports_sdpa = True

    for name in ("dtype", "device"):
        with pytest.raises(StopIteration):
            getattr(Empty(config()), name)


def test_load_quantized_lets_the_library_save(tmp_path, monkeypatch) -> None:
    quantized().save_pretrained(tmp_path)
    asked = []
    monkeypatch.setattr("torch_marlin_metal.load.quantized.let_it_save", lambda op, model: asked.append(type(model)))
    loaded_by_name(tmp_path)
    assert asked == [OlmoForCausalLM]


class Bare(ModelMixin, ConfigMixin):
    """A model of diffusers in which one parameter stays in fp32; its other parameters are two matrices."""

    _keep_in_fp32_modules = ("norm",)

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128, False), nn.Linear(128, 64, False)


@pytest.mark.parametrize("norm", [True, False])
def test_a_model_of_diffusers_has_the_dtype_of_its_layers(norm) -> None:
    model = Bare().bfloat16()
    if norm:
        model.norm.float()
    else:
        model.norm = nn.Identity()
    quantize_model(model, "uint4", 32, progress=False)
    assert model.up.scales.dtype == torch.float16
    assert model.dtype == copy.deepcopy(model).dtype == torch.bfloat16
    assert model.device == torch.device("cpu")
    assert model.to(torch.float16).dtype == torch.float16
