"""Errors about a complete load: layers of several kinds, and two checkpoint tensors for one tensor of the model."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.support.models import SIZES
from torch_marlin_metal import convert, load_quantized, quantize_model
from torch_marlin_metal.checkpoints.directory import DirectoryReader
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.models.linear_layers import ModelMismatchError

KINDS = {"mlp.down_proj": "of one kind", "self_attn.v_proj": "of another"}


@pytest.fixture
def path(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"tie_word_embeddings": True}))
    quantize_model(model, group_size=32, vocabulary_format="none", progress=False)
    model.save_pretrained(tmp_path)
    return tmp_path


def empty() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SIZES | {"tie_word_embeddings": True}))


def by_load_quantized(path) -> None:
    load_quantized(empty(), path, on_unsupported="error", progress=False)


def by_from_pretrained(path) -> None:
    AutoModelForCausalLM.from_pretrained(path, quantization_config=MarlinConfig(on_unsupported="error"))


@pytest.mark.parametrize("load", [by_load_quantized, by_from_pretrained])
def test_the_error_names_every_kind_of_layer_that_is_refused(load, path, monkeypatch) -> None:
    original, sizes = DirectoryReader.convert, {}

    def convert_some(self, index: int):
        sizes[self.layer_names[index]] = self.stored_bytes(index)
        for ending, kind in KINDS.items():
            if self.layer_names[index].endswith(ending):
                raise convert.UnsupportedFormat(f"layer {self.layer_names[index]}", lambda: torch.zeros(1), kind)
        return original(self, index)

    monkeypatch.setattr(DirectoryReader, "convert", convert_some)
    # the headers then do not show which layers are refused
    monkeypatch.setattr(DirectoryReader, "kind", lambda self, index: index)
    with pytest.raises(convert.UnsupportedFormat) as caught:
        load(path)
    state = {name: tensor.nbytes for name, tensor in load_file(path / "model.safetensors").items()}
    total = sum(sizes.values())
    packed = {name.removesuffix(".b_packed") for name in state if name.endswith(".b_packed")}
    assert total == sum(size for name, size in state.items() if name.rpartition(".")[0] in packed)
    refused = {
        kind: sum(size for name, size in sizes.items() if name.endswith(ending)) for ending, kind in KINDS.items()
    }
    shares = ", ".join(f"{kind} ({size / total:.0%})" for kind, size in sorted(refused.items()))
    whole = sum(refused.values())
    assert f"refused are {whole / total:.0%} of the bytes of its matrices ({whole / 1e6:.3g} MB): {shares}" in str(
        caught.value
    )


@pytest.mark.parametrize("differs", [False, True])
def test_two_tensors_for_one_of_the_model_must_be_equal(differs, path) -> None:
    file = path / "model.safetensors"
    state = load_file(file)
    second = state["model.embed_tokens.weight"].clone()
    second[3, 5] += differs
    save_file(state | {"lm_head.weight": second}, file, {"format": "pt"})
    model = empty()
    if not differs:
        load_quantized(model, path, progress=False)
        assert torch.equal(model.lm_head.weight, second)
        return
    with pytest.raises(ModelMismatchError, match="are one tensor of the model") as caught:
        load_quantized(model, path, progress=False)
    assert all(name in str(caught.value) for name in ("'lm_head.weight'", "'model.embed_tokens.weight'"))
    left = re.search(r"ignore='([^']+)'", str(caught.value))[1]
    load_quantized(model, path, ignore=left, progress=False)
    other = {"lm_head.weight": "model.embed_tokens.weight", "model.embed_tokens.weight": "lm_head.weight"}[left]
    assert torch.equal(model.lm_head.weight, load_file(file)[other])
