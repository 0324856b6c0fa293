"""Tests trace_token: it counts a model's operations from a few layers and predicts the time of a token."""

import json

import pytest
import torch
import transformers
from typer.testing import CliRunner

import torch_marlin_metal as tmm
from lab.token import token
from lab.token.__main__ import app
from lab.token.operations import Operations, kind_of
from lab.token.sample import decoder_layers
from tests.journeys.token_operations import model_of, of_one_call

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
LLAMA = transformers.LlamaConfig(**TINY, num_hidden_layers=5, vocab_size=4000)
# The sizes of Llama 3 8B.
LARGE = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
M1_BYTES_PER_SECOND = 68.25e9 * 0.88  # the figures of csrc/planner/chips.h


def traced(config, **options):
    return token.trace_token(config, **{"gpus": ["M1"], "group_size": 32, "dtype": torch.float32, **options})


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_the_count_of_a_whole_model_equals_that_of_running_all_its_layers(family):
    model = model_of(family, 5)
    found = traced(model.config)
    assert (found.layers, found.sampled) == (5, 1)
    assert found.before.total == of_one_call(model).total()
    tmm.fuse_projections(model)
    tmm.fuse_layers(model)
    assert found.after.total == of_one_call(model).total()
    for side in (found.before, found.after):
        assert sum(side.kinds.values()) == side.total


# The activation of 96 columns needs a separate dispatch, because a threadgroup computes 64 columns or none.
@pytest.mark.parametrize(("inner", "activations"), [(64, 0), (96, 6)])
def test_every_kind_of_layer_is_run_and_windows_limit_attention(inner, activations):
    config = transformers.GptOssConfig(
        **TINY | {"intermediate_size": inner}, head_dim=32, num_hidden_layers=6, vocab_size=4000,
        num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
    )  # fmt: skip
    found = traced(config, context=100)
    assert (found.layers, found.sampled) == (6, 2)
    a_token = 2 * 1 * 32 * 4  # keys and values of one head in fp32
    assert found.after.work.cache_bytes == 3 * a_token * 8 + 3 * a_token * 100
    experts = [(product, count) for product, count in found.after.work.products.items() if product.experts > 1]
    assert [(p.experts, p.is_gated, p.reduces, count) for p, count in experts] == [
        (2, True, False, 6),
        (2, False, True, 6),
    ]
    # One dispatch for each other operation: the sum over experts needs no separate dispatch, and no product splits K.
    assert found.after.costs[0].dispatches == pytest.approx(6e-6 * (found.after.total + activations))
    assert found.after.kinds["attention"] == 2 * 6  # each layer has a product with the keys and one with the values


def test_a_tied_head_is_a_dense_product_with_the_whole_vocabulary():
    config = transformers.LlamaConfig(**TINY, num_hidden_layers=2, vocab_size=4000, tie_word_embeddings=True)
    products = traced(config).before.work.products
    assert [(product.N, product.K, count) for product, count in products.items() if not product.weight_format] == [
        (4000, 64, 1)
    ]


def test_an_8b_model_is_traced_from_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    found = token.trace_token(tmp_path, gpus=["M1", "M3 Ultra"], context=1000)
    assert (found.layers, found.sampled) == (32, 1)
    assert (found.before.layer, found.after.layer) == (40, 12)
    m1, ultra = found.after.costs
    codes = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    weights = codes * (4 + 16 / 128) / 8 / M1_BYTES_PER_SECOND
    assert weights < m1.weights < 1.05 * weights
    assert m1.attention == pytest.approx(32 * 2 * 8 * 128 * 2 * 1000 / M1_BYTES_PER_SECOND)
    assert m1.dispatches == pytest.approx(6e-6 * found.after.total)
    assert m1.seconds == m1.weights + m1.attention + m1.dispatches
    assert found.before.costs[1].seconds / ultra.seconds > 1.5
    assert "32 layers" in str(found)
    assert "M3 Ultra" in str(found)


def test_the_time_of_a_dispatch_can_be_chosen():
    found = traced(LLAMA, dispatch_seconds=13e-6)
    assert found.before.costs[0].dispatches == pytest.approx(13e-6 * found.before.total)


def test_kinds():
    names = {
        "torch_marlin_metal.gemm.default": "4-bit products",
        "torch_marlin_metal.rotary.default": "fused operators",
        "aten.mm.default": "dense products",
        "aten._scaled_dot_product_flash_attention_for_cpu.default": "attention",
        "aten.cat.default": "copies",
        "aten.add.Tensor": "other operations",
    }
    assert {name: kind_of(name) for name in names} == names


def test_views_are_not_counted():
    with Operations() as seen:
        x = torch.ones(4, 4)
        torch.empty(4)
        x.T.reshape(2, 8).view(16)
    assert dict(seen.counts) == {"aten.ones.default": 1, "aten.clone.default": 1}


def test_the_decoder_layers_are_the_longest_outer_list():
    model = torch.nn.ModuleDict(
        {
            "layers": torch.nn.ModuleList([torch.nn.ModuleList([torch.nn.ReLU()] * 4), torch.nn.ReLU()]),
            "norms": torch.nn.ModuleList([torch.nn.ReLU()]),
        }
    )
    assert decoder_layers(model) is model["layers"]
    with pytest.raises(ValueError, match="no list of decoder layers"):
        decoder_layers(torch.nn.ReLU())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float64}, "dtype: expected float16, bfloat16 or float32, got torch.float64"),
        ({"context": -1}, "context: expected 0 or more, got -1"),
        ({"dispatch_seconds": 6.0}, "dispatch_seconds: expected 0 to 1, got 6.0"),
        ({"gpus": ["M0"]}, "name: expected one of M1,"),
        ({"weight_format": "int3"}, "int3"),
    ],
    ids=str,
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        traced(LLAMA, **options)


def test_a_wrong_source():
    with pytest.raises(ValueError, match="source: expected a path or a config, got int"):
        token.trace_token(1)


def command(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_the_command_prints_all_chips(tmp_path):
    (tmp_path / "config.json").write_text(LLAMA.to_json_string())
    done = command(tmp_path, "--group-size", 32)
    assert (done.exit_code, done.stderr) == (0, "")
    assert all(
        name in done.stdout for name in ("5 layers", "1024 tokens before", *tmm.profiling.AppleSiliconGPU.names())
    )
    found = traced(LLAMA)
    assert (found.after.layer, found.after.total) == (12, sum(found.after.kinds.values()))
    assert found.after.total < found.before.total
    assert found.fused.splitlines() == [
        *("3 x rms_norm", "1 x rotary", "1 x mask", "1 x write_cache", "1 x gated_activation", "1 x add_rms_norm"),
    ]
    assert all(line in done.stdout for line in found.fused.splitlines())


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (None, 3, "no such file"),
        ("{", 3, "transformers cannot make a config of it"),
        ('{"model_type": "no such family"}', 3, "transformers cannot make a config of it"),
        ('{"model_type": "clip"}', 3, "no model can be made of the config"),
    ],
    ids=["missing", "damaged", "unknown", "no language model"],
)
def test_a_wrong_model_ends_the_command_with_one_line(tmp_path, content, code, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    done = command(tmp_path)
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


def test_a_model_that_does_not_run_on_tokens_is_refused(monkeypatch):
    def fails(*_, **__):
        raise TypeError("forward() wants pixels")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", fails)
    with pytest.raises(tmm.convert.CheckpointError, match=r"does not run on tokens alone: .*pixels"):
        traced(LLAMA)
