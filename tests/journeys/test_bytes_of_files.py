"""Files with layers of 4, 5, 6 and 8 bits need as much memory as the file has bytes, within 3 percent."""

from pathlib import Path

import pytest

from tests.journeys import test_ranks as ranks
from tests.support import gguf_models
from torch_marlin_metal.layers.experts import ExpertWeights
from torch_marlin_metal.layers.packed_layer import PackedLayer


def q4_k_m_of_gemma(name: str) -> str:
    """Returns llama.cpp's types for a mixture in which K of down is no multiple of 256, as in Gemma 4 26B."""
    if "down_exps" in name:
        return "Q8_0" if "blk.0" in name else "Q5_0"
    return "Q6_K" if name.startswith("token_embd") else ranks.q4_k_m(name)


# The architecture in the file, the model's family, the type of each tensor, sizes, and the formats in memory.
GGUF = {
    "Llama 3.1 8B, Q4_K_M": ("llama", "llama", ranks.q4_k_m, {}, {"uint4_bias", "uint6b32"}),
    "Qwen3 30B A3B, Q4_K_M": ("qwen3moe", "qwen3moe", ranks.q4_k_m, {}, {"uint4_bias", "uint6b32"}),
    "Gemma 4 26B A4B, Q4_K_M": (
        "gemma4",
        "gemma4 mixture",
        q4_k_m_of_gemma,
        {"moe_intermediate_size": 96, "head_dim": 32},
        {"uint4_bias", "uint5b16", "uint6b32", "uint8b128"},
    ),
    "Qwen3.6 35B A3B, UD-Q4_K_XL": (
        "qwen35moe",
        "qwen35moe",
        ranks.ud_q4_k_xl,
        {},
        {"uint4_bias", "uint5_bias", "uint8b128"},
    ),
}
MLX = {"qwen3_moe-mixed_4_6": {"uint4_bias", "uint6_bias"}, "qwen3-affine6": {"uint6_bias"}}


def check(path: Path, formats: set[str]) -> None:
    model = ranks.load(path, "cpu")
    layers = [layer for layer in model.modules() if isinstance(layer, PackedLayer | ExpertWeights)]
    assert {layer.weight_format for layer in layers} == formats
    assert ranks.bytes_of(model)[0] <= 1.03 * ranks.bytes_in(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GGUF)
def test_gguf(name, tmp_path, monkeypatch) -> None:
    architecture, family, kinds, sizes, formats = GGUF[name]
    monkeypatch.setattr(gguf_models, "quantize", ranks.blocks_of)
    model = gguf_models.model_of(family, **ranks.LARGE | sizes)
    model.config.save_pretrained(tmp_path)
    check(gguf_models.write(tmp_path / "model.gguf", architecture, model, kinds), formats)


@pytest.mark.parametrize("name", MLX)
def test_mlx(name) -> None:
    path = ranks.MODELS / "mlx" / name
    check(path, MLX[name])
