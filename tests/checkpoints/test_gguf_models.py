"""Whole models in GGUF files, of each architecture with a table of names: names, values, and mixed files."""

import warnings

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.gguf_models import FAMILIES, IDS, model_of, write
from tests.support.llama import MODELS, write_gguf
from torch_marlin_metal import MarlinExperts, MarlinLinear, convert, load_quantized
from torch_marlin_metal.integrations import transformers
from torch_marlin_metal.integrations.transformers import packed_checkpoint

WARNINGS = {
    architecture: [f"model.embed_tokens is decoded to floats: {table} has a forward of its own"]
    for architecture, table in (
        ("gemma", "GemmaTextScaledWordEmbedding"),
        ("gemma2", "Gemma2TextScaledWordEmbedding"),
        ("gemma3", "Gemma3TextScaledWordEmbedding"),
    )
}
WARNINGS["llama4"] = [
    "model.layers.1.feed_forward.experts is decoded to floats: Llama4TextExperts computes something else than "
    "MarlinExperts"
]


@pytest.mark.parametrize(("architecture", "family"), FAMILIES)
def test_a_model_computes_what_its_decoded_weights_compute(architecture, family, tmp_path) -> None:
    model = model_of(family)
    path = write(tmp_path / "model.gguf", architecture, model)
    loaded = model_of(family)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        load_quantized(loaded, path, progress=False)
    assert [str(warning.message) for warning in told] == WARNINGS.get(architecture, [])
    stacks = [module for module in loaded.modules() if isinstance(module, MarlinExperts)]
    packs = architecture != "llama4" and any(".experts." in name for name in model.state_dict())
    assert len(stacks) == 2 * packs
    assert sum(isinstance(module, MarlinLinear) for module in loaded.modules()) >= 8
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_plain_projections_get_back_the_order_of_their_rows(tmp_path) -> None:
    """Mixed files keep some matrices in 16 bit, and llama.cpp reorders the rows of q and k in these, too."""
    model = model_of("llama")
    path = write(
        tmp_path / "m.gguf", "llama", model, lambda name: "F16" if "attn_q" in name or "attn_k" in name else "Q4_0"
    )
    loaded = model_of("llama")
    load_quantized(loaded, path, progress=False)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    stored = convert.open_reader(path).tensors["blk.0.attn_q.weight"].read()
    assert not torch.equal(stored.float(), model.model.layers[0].self_attn.q_proj.weight)


def mixed(name: str) -> str:
    return "Q8_0" if "attn_v" in name or "token_embd" in name else "Q5_0" if "ffn_down" in name else "Q4_0"


def test_a_mixed_file_says_its_share_and_loads(tmp_path) -> None:
    model = model_of("llama")
    path = write(tmp_path / "model.gguf", "llama", model, mixed)
    stored = {tensor.name: tensor for tensor in convert.open_reader(path).tensors.values() if not tensor.is_plain}
    other = [tensor for name, tensor in stored.items() if mixed(name) != "Q4_0"]
    share = sum(tensor.nbytes for tensor in other) / sum(tensor.nbytes for tensor in stored.values())
    loaded = model_of("llama")
    with pytest.warns(
        UserWarning, match=rf"{share:.0%} of the bytes .* floats: Q5_0 \(\d+%\), Q8_0 \(\d+%\)\. They"
    ) as caught:
        load_quantized(loaded, path, progress=False)
    assert type(loaded.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert isinstance(loaded.model.layers[0].mlp.up_proj, MarlinLinear)
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    held, size = (sum(sizes) for sizes in zip(*((4 * np.prod(t.shape), t.nbytes) for t in other), strict=True))
    assert f"take {held / 1e6:.1f} MB instead of {size / 1e6:.1f} MB" in str(caught[0].message)
    with pytest.raises(convert.UnsupportedFormat, match="is not a 4-bit type that is read"):
        load_quantized(model_of("llama"), path, on_unsupported="error", progress=False)


@pytest.mark.parametrize(("architecture", "family"), [("qwen3moe", "qwen3_moe"), ("gpt-oss", "gpt_oss")])
def test_experts_of_a_mixed_file_are_not_stacked(architecture, family, tmp_path) -> None:
    """llama.cpp's Q4_K_M keeps some down projections in more bits. These become floats, gate and up stay packed."""
    model = model_of(family)
    path = write(
        tmp_path / "m.gguf", architecture, model, lambda name: "Q8_0" if "blk.1.ffn_down_exps" in name else "Q4_0"
    )
    loaded = model_of(family)
    with pytest.warns(UserWarning, match=r"became floats: Q8_0 \(\d+%\)\. They"):
        report = load_quantized(loaded, path, progress=False)
    packed, separate = (layer.mlp.experts for layer in loaded.model.layers)
    assert isinstance(packed, MarlinExperts) and not isinstance(separate, MarlinExperts)
    stack, *left = [layer for layer in report.left if "experts" in layer.name]
    assert stack.name == "model.layers.1.mlp.experts" and stack.reason.startswith("runs one expert after the other: ")
    assert len(left) == len(model.model.layers[1].mlp.experts.down_proj)
    kinds = [type(module) for module in separate.modules()]
    assert kinds.count(torch.nn.Linear) == len(left)
    assert kinds.count(MarlinLinear) == len(left) * (2 if family == "qwen3_moe" else 1)
    for layer, whole in zip(left, model.model.layers[1].mlp.experts.down_proj, strict=True):
        assert "down" in layer.name and "Q8_0 is not a 4-bit type that is read" in layer.reason
        weight = loaded.get_submodule(layer.name).weight
        assert torch.equal(weight, whole if family == "qwen3_moe" else whole.T), layer.name
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(convert.UnsupportedFormat, match="Q8_0 is not a 4-bit type that is read"):
        load_quantized(model_of(family), path, on_unsupported="error", progress=False)


def test_from_pretrained_says_it_and_loads(tmp_path, monkeypatch) -> None:
    _, weights = write_gguf(tmp_path / "tiny.gguf", MODELS / "auto-round-asym-g32", "Q4_0", embedding="Q8_0")
    told: list[str] = []
    monkeypatch.setattr(packed_checkpoint.logger, "warning", told.append)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float16)
    assert len(told) == 1 and "of its matrices have no 4-bit weight format and became floats: Q8_0 (" in told[0]
    table = model.model.embed_tokens
    assert type(table) is torch.nn.Embedding and table.weight.dtype == torch.float16
    assert torch.equal(table.weight, torch.from_numpy(weights["model.embed_tokens"]).half())
    assert isinstance(model.model.layers[0].mlp.up_proj, MarlinLinear)
    transformers.take_over(on_unsupported="error")
    try:
        with pytest.raises(convert.UnsupportedFormat, match="Q8_0 is not a 4-bit type"):
            AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    finally:
        transformers.take_over()
