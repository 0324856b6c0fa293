"""Loads models of mlx-lm with each entry point, and compares with mlx-lm's own logits (tests/data/models/README.md)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from torch_marlin_metal import MarlinExperts, MarlinLinear, load_quantized
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.models.linear_layers import ModelMismatchError

DATA = Path(__file__).parents[1] / "data/models/mlx"
IDS = torch.tensor([[3, 9, 27, 5, 44, 12, 60, 33]])
# The number of layers whose experts become a MarlinExperts, and the largest allowed difference of logits, which are at
# most about 1.3. gpt-oss' YaRN rounds its frequencies differently.
MODELS = {
    "mixtral-affine4": (1, 1e-5),
    "qwen3_moe-mixed_4_6": (1, 1e-5),
    "qwen3-affine6": (0, 1e-5),
    "gpt_oss-mxfp4-q8": (2, 2e-4),
    "qwen3_next-affine4": (2, 1e-5),
    "qwen3_5_moe-affine4": (2, 1e-5),
    "olmoe-nvfp4": (1, 1e-5),
    "glm4_moe-mxfp8": (1, 1e-5),
    "gemma4-affine4": (2, 1e-5),
    "deepseek_v2-affine4": (1, 1e-5),
    "deepseek_v3-affine4": (1, 1e-5),
    "llama4-affine4": (2, 1e-4),
    "granitemoe-affine4": (2, 2e-5),
    "granitemoehybrid-affine4": (2, 1e-5),
    "laguna-affine4": (1, 1e-5),
    "lfm2_moe-affine4": (1, 1e-5),
}
# transformers renames nothing in these models, so both entry points read the same names.
ONE_ENTRY_POINT = ("deepseek_v2-affine4", "deepseek_v3-affine4", "granitemoe-affine4", "laguna-affine4")


def by_load_quantized(path: Path) -> nn.Module:
    config = AutoConfig.from_pretrained(path)
    for key in ("quantization", "quantization_config"):
        vars(config).pop(key, None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    load_quantized(model, path, progress=False)
    return model.eval()


def by_from_pretrained(path: Path) -> nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    return model


@pytest.mark.filterwarnings("ignore:.*floats")
@pytest.mark.parametrize(
    ("name", "load"),
    [
        (name, load)
        for name in MODELS
        for load in (by_load_quantized, by_from_pretrained)
        if load is by_load_quantized or name not in ONE_ENTRY_POINT
    ],
)
def test_the_logits_are_those_of_mlx(name, load) -> None:
    stacks, bound = MODELS[name]
    model = load(DATA / name)
    assert sum(isinstance(module, MarlinExperts) for module in model.modules()) == stacks
    with torch.no_grad():
        found = model(IDS).logits[0].numpy()
    np.testing.assert_allclose(found, np.load(DATA / name / "logits.npy"), rtol=0, atol=bound)


def test_every_model_is_tried() -> None:
    assert sorted(path.name for path in DATA.iterdir()) == sorted(MODELS)


def test_keys_and_values_of_latent_attention_are_one_matrix_of_floats() -> None:
    path = DATA / "deepseek_v3-affine4"
    with pytest.warns(UserWarning, match="embed_q and unembed_out are one matrix"):
        model = by_load_quantized(path)
    state, layer = load_file(path / "model.safetensors"), "model.layers.0.self_attn"

    def decoded(part: str) -> np.ndarray:
        words = state[f"{layer}.{part}.weight"].numpy().view(np.uint8)
        codes = np.stack((words & 15, words >> 4), axis=-1).reshape(*words.shape[:2], -1)
        scales, biases = (
            state[f"{layer}.{part}.{role}"].double().numpy().repeat(32, 2) for role in ("scales", "biases")
        )
        return codes * scales + biases

    keys, values = decoded("embed_q"), decoded("unembed_out")
    expected = np.concatenate((keys.swapaxes(1, 2), values), axis=1).reshape(-1, values.shape[2])
    found = model.get_submodule(f"{layer}.kv_b_proj").weight.detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_routers_of_8_bit_become_floats_and_gates_stay_packed_without_a_warning(recwarn) -> None:
    path = DATA / "qwen3_5_moe-affine4"
    model = by_load_quantized(path)
    assert not [str(entry.message) for entry in recwarn if "floats" in str(entry.message)]
    settings, state = (
        json.loads((path / "config.json").read_text())["quantization"],
        load_file(path / "model.safetensors"),
    )
    eight = [layer for layer, own in settings.items() if isinstance(own, dict) and own["bits"] == 8]
    assert len(eight) == 4
    for layer in eight:
        module = model.get_submodule(layer.removeprefix("language_model."))
        words = state[f"{layer}.weight"].numpy().view(np.uint8)  # one code per byte, groups of 64
        scales, biases = (state[f"{layer}.{role}"].float().numpy().repeat(64, 1) for role in ("scales", "biases"))
        is_gate = layer.endswith("shared_expert_gate")
        assert isinstance(module, MarlinLinear) is is_gate
        weight = module.dequantize() if is_gate else module.weight.detach()
        np.testing.assert_allclose(weight.numpy(), words * scales + biases, rtol=1e-6, atol=1e-7)
    with pytest.raises(
        ModelMismatchError, match=r"mlp.gate\': it is packed in .* Qwen3_5MoeTopKRouter is no nn.Linear"
    ):
        AutoModelForCausalLM.from_pretrained(path, quantization_config=MarlinConfig(on_unsupported="error"))


def test_a_saved_model_has_transformers_own_names_and_values(tmp_path) -> None:
    model = by_from_pretrained(DATA / "qwen3_5_moe-affine4")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
