"""from_pretrained loads directories of mlx-lm: settings without a method, packed embeddings, tied output layers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.support.models import IDS, SIZES
from torch_marlin_metal import MarlinEmbedding, MarlinLinear, convert, quantize_weight
from torch_marlin_metal.integrations.transformers import MarlinConfig, restored

SETTINGS = {"group_size": 32, "bits": 4}


def write_mlx(folder, keys: tuple[str, ...], **config) -> dict[str, torch.Tensor]:
    """Writes a directory like mlx-lm 0.32, and returns the decoded weights by layer."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True, **config)).eval()
    tensors, exact = {}, {}
    for name, value in model.state_dict().items():
        if "norm" in name:
            tensors[name] = value
        elif name != "lm_head.weight":
            packed = quantize_weight(value, "uint4_bias", 32)
            base = name.removesuffix(".weight")
            tensors[name] = packed.b_packed.T.contiguous().view(torch.uint32)
            tensors[f"{base}.scales"], tensors[f"{base}.biases"] = (
                packed.scales.T.contiguous(),
                packed.zeros.T.contiguous(),
            )
            exact[base] = packed.dequantize().T
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "mlx"})
    settings = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]} | dict.fromkeys(keys, SETTINGS)
    (folder / "config.json").write_text(json.dumps(settings))
    return exact


@pytest.mark.parametrize("keys", [("quantization", "quantization_config"), ("quantization",)], ids=" and ".join)
def test_a_directory_of_mlx_lm(keys, tmp_path) -> None:
    exact = write_mlx(tmp_path / "mlx", keys)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "mlx", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    for name, weight in exact.items():
        assert torch.equal(model.get_submodule(name).dequantize(), weight)
    assert type(model.model.embed_tokens) is MarlinEmbedding and type(model.lm_head) is MarlinLinear
    assert model.lm_head.b_packed is model.model.embed_tokens.b_packed
    logits = model(IDS).logits
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(IDS).logits, logits)
    config = MarlinConfig(modules_to_not_convert="*")
    floats = AutoModelForCausalLM.from_pretrained(tmp_path / "mlx", quantization_config=config, dtype=torch.float32)
    assert floats.lm_head.weight is floats.model.embed_tokens.weight
    torch.testing.assert_close(floats(IDS).logits, logits, rtol=1e-4, atol=1e-4)


def test_transformers_itself_still_refuses_it(tmp_path) -> None:
    write_mlx(tmp_path, ("quantization", "quantization_config"))
    with restored(), pytest.raises(ValueError, match="no `quant_method` attribute"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_float_model_is_loaded_as_before(tmp_path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any(isinstance(module, MarlinLinear) for module in again.modules())
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_bits_and_a_group_size_alone_are_not_those_of_mlx(tmp_path) -> None:
    """Settings of other methods also contain bits and a group size. Only metadata in a file shows that it is MLX."""
    exact = write_mlx(tmp_path, ("quantization_config",))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(model.get_submodule(name).dequantize(), weight) for name, weight in exact.items())
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        convert.UnsupportedFormat, match=r"(?s)name no quant_method.*itself.*no `quant_method` attribute"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)
