"""4-bit embeddings and output layers tied to them: quantized in memory and during loads, saved, loaded, excluded."""

import warnings

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForMaskedLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from tests.support.models import IDS, SIZES, same
from torch_marlin_metal import MarlinEmbedding, MarlinLinear, load_quantized, quantize_model, quantize_weight
from torch_marlin_metal.cli.models.fit import empty_model
from torch_marlin_metal.convert import FloatReader, write_checkpoint
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.models.report import module_bytes

WHOLE = MarlinConfig("uint4", 32, vocabulary_format="uint4")


def made(family: str, **settings):
    torch.manual_seed(0)
    if family == "bert":  # BERT's output layer has a bias
        return BertForMaskedLM(BertConfig(**SIZES, **settings)).eval()
    if family == "t5":  # T5's three modules share the table
        sizes = {"vocab_size": 64, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 1, "num_heads": 2}
        return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, **settings)).eval()
    kind, config = (Gemma3ForCausalLM, Gemma3TextConfig) if family == "gemma3" else (LlamaForCausalLM, LlamaConfig)
    settings = {"tie_word_embeddings": True} | ({"head_dim": 32} if family == "gemma3" else {}) | settings
    return kind(config(**SIZES, num_key_value_heads=2, **settings)).eval()


def logits(model: nn.Module) -> torch.Tensor:
    more = {"decoder_input_ids": IDS} if hasattr(model, "shared") else {}
    with torch.no_grad():
        return model(IDS, **more).logits


def tables(model: nn.Module) -> dict[str, MarlinLinear]:
    """Returns the modules that hold the table, after checking that they share it."""
    table = model.get_input_embeddings()
    assert type(table) is MarlinEmbedding
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MarlinLinear) and module.b_packed is table.b_packed
    }
    assert all(module.scales is table.scales for module in found.values())
    return found


SHARED = {
    "llama": ["model.embed_tokens", "lm_head"],
    "gemma3": ["model.embed_tokens", "lm_head"],
    "bert": ["bert.embeddings.word_embeddings", "cls.predictions.decoder"],
    "t5": ["shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"],
}


@pytest.mark.parametrize("family", SHARED)
@pytest.mark.parametrize("how", ["in memory", "while loading"])
def test_the_vocabulary_is_packed_once_saved_and_loaded(family, how, tmp_path) -> None:
    model = made(family)
    table = model.get_input_embeddings().weight.detach().clone()
    if how == "in memory":
        report = quantize_model(model, "uint4", 32, vocabulary_format="uint4", progress=False)
        assert {layer.name for layer in report.converted} >= {*SHARED[family]} - {"encoder.embed_tokens"}
    else:
        model.save_pretrained(tmp_path / "floats")
        auto = AutoModelForSeq2SeqLM if family == "t5" else type(model)
        model = auto.from_pretrained(tmp_path / "floats", quantization_config=WHOLE)
    assert set(tables(model)) == set(SHARED[family])
    exact = quantize_weight(table, "uint4", 32).dequantize().T
    held = model.get_input_embeddings()
    assert torch.equal(held(IDS), exact[IDS] * held.scale)
    assert (held.scale != 1) == (family == "gemma3")
    expected = logits(model)
    model.save_pretrained(tmp_path / "packed")
    stored = sum(file.stat().st_size for file in (tmp_path / "packed").glob("*.safetensors"))
    assert stored < module_bytes(model) + 20_000  # the file stores the table once
    again, info = type(model).from_pretrained(tmp_path / "packed", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert set(tables(again)) == set(SHARED[family])
    assert same(again.state_dict(), model.state_dict())
    assert torch.equal(logits(again), expected)


def test_it_computes_what_the_decoded_weights_compute(tmp_path) -> None:
    model = made("bert")
    with torch.no_grad():
        model.cls.predictions.bias.normal_()
    bias = model.cls.predictions.bias.detach().clone()
    quantize_model(model, "uint4", 32, vocabulary_format="uint4", progress=False)
    model.save_pretrained(tmp_path)
    again = BertForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(again.cls.predictions.decoder.bias, bias)
    expected = logits(again)
    floats = again.dequantize()
    table = floats.get_input_embeddings()
    assert type(table) is nn.Embedding
    assert floats.cls.predictions.decoder.weight is table.weight
    torch.testing.assert_close(logits(floats), expected, rtol=1e-4, atol=1e-4)


def test_an_untied_head_has_words_of_its_own(tmp_path) -> None:
    made("llama", tie_word_embeddings=False).save_pretrained(tmp_path / "floats")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "floats", quantization_config=WHOLE)
    assert list(tables(model)) == ["model.embed_tokens"]
    assert isinstance(model.lm_head, MarlinLinear)
    model.save_pretrained(tmp_path / "packed")
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "packed").state_dict(), model.state_dict())


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_empty_model_has_the_bytes_of_a_loaded_one(is_tied, tmp_path) -> None:
    model = made("llama", tie_word_embeddings=is_tied)
    model.save_pretrained(tmp_path)
    empty = empty_model(model.config, torch.float32, "uint4")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=MarlinConfig("uint4"))
    # the format is stored as one or two tensors
    assert module_bytes(empty) == pytest.approx(module_bytes(loaded), abs=16)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(("given", "expected"), [({}, "uint8b128"), ({"vocabulary_format": "none"}, "")])
def test_every_entry_point_has_the_same_default(is_tied, given, expected, tmp_path) -> None:
    model = made("llama", tie_word_embeddings=is_tied)
    model.save_pretrained(tmp_path / "floats")
    quantize_model(model, "uint4", 32, progress=False, **given)
    config = MarlinConfig("uint4", 32, **given)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "floats", quantization_config=config)
    write_checkpoint(FloatReader(tmp_path / "floats", "uint4", 32, **given), tmp_path / "written")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    for one in (model, loaded, written):
        formats = [getattr(layer, "weight_format", "") for layer in (one.model.embed_tokens, one.lm_head)]
        assert formats == [expected, expected]
        assert one.model.layers[0].mlp.up_proj.weight_format == "uint4"
        if is_tied and expected:
            assert one.lm_head.b_packed is one.model.embed_tokens.b_packed
        assert torch.equal(logits(one), logits(model))


def test_tables_outside_the_vocabulary_do_not_count_as_left_in_floats(tmp_path) -> None:
    made("bert").save_pretrained(tmp_path)  # has tables of positions and of token types
    assert FloatReader(tmp_path, "uint4", 32).left == {}


def test_layers_that_share_without_a_tie_are_stored_twice(tmp_path) -> None:
    model = made("llama", tie_word_embeddings=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    quantize_model(model, "uint4", 32, vocabulary_format="uint4", progress=False)
    assert model.lm_head.b_packed is model.model.embed_tokens.b_packed
    model.save_pretrained(tmp_path)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert same(again.state_dict(), model.state_dict())


def test_a_pattern_keeps_the_table_and_its_head_in_floats(tmp_path) -> None:
    model = made("llama")
    model.save_pretrained(tmp_path)
    for name in ("lm_head", "model.embed_tokens"):
        config = MarlinConfig("uint4", 32, vocabulary_format="uint4", modules_to_not_convert=name)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
        assert type(loaded.model.embed_tokens) is nn.Embedding and type(loaded.lm_head) is nn.Linear
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        other = made("llama")
        report = quantize_model(other, "uint4", 32, vocabulary_format="uint4", exclude=name, progress=False)
        assert len(report.left) == 1 and "which stays" in report.left[0].reason
    wrong = MarlinConfig("uint4", 32, vocabulary_format="uint4", modules_to_not_convert="embed")
    with pytest.raises(ValueError, match="modules_to_not_convert: 'embed' matches none"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=wrong)


def test_a_packed_directory_is_decoded_where_a_pattern_says_so(tmp_path) -> None:
    model = made("llama")
    quantize_model(model, "uint4", 32, vocabulary_format="uint4", progress=False)
    model.save_pretrained(tmp_path)
    exact = model.model.embed_tokens.dequantize()
    # the file has only the second name, and the model ties the first one to it
    for name in ("lm_head", "model.embed_tokens"):
        config = MarlinConfig(modules_to_not_convert=name)
        floats = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
        assert torch.equal(floats.model.embed_tokens.weight, exact)
        assert floats.lm_head.weight is floats.model.embed_tokens.weight


def test_a_table_that_does_more_than_look_up_stays_and_is_named(tmp_path) -> None:
    class Doubled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(ids)

    model = made("llama")
    table = Doubled(*model.model.embed_tokens.weight.shape)
    table.weight = model.lm_head.weight
    model.model.embed_tokens = table
    report = quantize_model(model, "uint4", 32, vocabulary_format="uint4", progress=False)
    reasons = {layer.name: layer.reason for layer in report.left}
    assert reasons["model.embed_tokens"] == "Doubled has a forward of its own"
    assert reasons["lm_head"].startswith("its weight is also that of model.embed_tokens")
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_table_that_multiplies_its_rows_gives_the_same_bits(dtype) -> None:
    table = Gemma3TextScaledWordEmbedding(64, 64, 0, embed_scale=64**0.5 + 0.01).to(dtype)
    packed = MarlinEmbedding.from_embedding(table, "uint4", 32)
    table.weight = nn.Parameter(packed.dequantize(dtype))
    with torch.no_grad():
        assert torch.equal(packed(IDS), table(IDS))


def test_what_packs_a_tied_head_is_said(tmp_path) -> None:
    model = made("llama")
    report = quantize_model(made("llama"), "uint4", 32, vocabulary_format="none", progress=False)
    assert report.left[0].reason == 'it belongs to the vocabulary, and vocabulary_format is "none"'
    model.save_pretrained(tmp_path)
    config = MarlinConfig("uint4", 32, vocabulary_format="none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert type(loaded.lm_head) is nn.Linear


def test_tables_move_together_and_load_quantized_reads_them(tmp_path, mps) -> None:
    model = made("llama")
    quantize_model(model, "uint4", 32, vocabulary_format="uint4", progress=False)
    model.save_pretrained(tmp_path)
    skeleton = made("llama")
    load_quantized(skeleton, tmp_path, progress=False)
    assert len(tables(skeleton)) == 2
    assert torch.equal(logits(skeleton), logits(model))
    for moved in (model.to("mps"), model.half(), model.to("cpu").float()):
        assert len(tables(moved)) == 2


def test_plain_modules_have_their_embeddings_packed() -> None:
    model = nn.Sequential(nn.Embedding(40, 64, padding_idx=1), nn.Linear(64, 40, bias=True))
    model[1].weight = model[0].weight
    report = quantize_model(model, "uint4b8", 32, vocabulary_format="uint4b8", progress=False)
    assert [layer.kind for layer in report.converted] == ["Embedding", "Linear"]
    assert model[0].padding_idx == 1
    assert model[1].b_packed is model[0].b_packed and model[1].bias is not None
    assert report.bytes_after < report.bytes_before / 4
    model = nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 40))
    quantize_model(model, "uint4b8", 32, vocabulary_format="uint4b8", exclude="0", progress=False)
    assert type(model[0]) is nn.Embedding and isinstance(model[1], MarlinLinear)
