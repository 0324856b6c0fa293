"""With `ignore_mismatched_sizes`, the model's class initializes a layer whose size in the checkpoint differs."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from transformers import LlamaForSequenceClassification as LlamaClassifier

from tests.support.models import IDS, SIZES
from torch_marlin_metal import MarlinEmbedding, MarlinLinear, quantize_model
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.models.linear_layers import ModelMismatchError

RANGE = 0.5  # far from the range in which torch initializes an nn.Linear
BERT = BertConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_labels=2,
    initializer_range=RANGE,
)


@pytest.fixture
def bert(tmp_path):
    torch.manual_seed(0)
    model = BertForSequenceClassification(BERT).eval()
    quantize_model(model, "uint4b8", 32, include="*", progress=False)
    model.save_pretrained(tmp_path / "bert")
    return model, tmp_path / "bert"


def test_a_packed_head_with_other_labels_is_initialized(bert) -> None:
    model, path = bert
    assert type(model.classifier) is MarlinLinear
    loaded = BertForSequenceClassification.from_pretrained(path, num_labels=5, ignore_mismatched_sizes=True)
    head = loaded.classifier
    assert type(head) is nn.Linear
    assert head.weight.shape == (5, 64)
    assert head.weight.requires_grad
    assert 0.8 * RANGE < head.weight.std() < 1.2 * RANGE
    assert not head.bias.any()
    with torch.no_grad():
        assert torch.equal(loaded.bert(IDS)[1], model.bert(IDS)[1])
    loaded.save_pretrained(path.parent / "again")
    again = BertForSequenceClassification.from_pretrained(path.parent / "again")
    assert torch.equal(again.classifier.weight, head.weight)


def test_the_error_names_the_flag(bert) -> None:
    with pytest.raises(
        ModelMismatchError, match=r"'classifier': expected a weight of \[5, 64\].*is \[2, 64\]; ignore_mis"
    ):
        BertForSequenceClassification.from_pretrained(bert[1], num_labels=5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_table_of_another_size_is_initialized(tied, tmp_path) -> None:
    config = LlamaConfig(**SIZES | {"tie_word_embeddings": tied, "initializer_range": RANGE})
    model = LlamaForCausalLM(config).eval()
    quantize_model(model, "uint4b8", 32, include="*", vocabulary_format="uint4b8", progress=False)
    assert type(model.model.embed_tokens) is MarlinEmbedding
    model.save_pretrained(tmp_path / "saved")
    rows = config.vocab_size + 8
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved", vocab_size=rows, ignore_mismatched_sizes=True)
    table, head = loaded.model.embed_tokens, loaded.lm_head
    assert (type(table), type(head)) == (nn.Embedding, nn.Linear)
    assert (table.weight is head.weight) == tied
    for module in (table, head):
        assert module.weight.shape == (rows, config.hidden_size)
        assert 0.8 * RANGE < module.weight.std() < 1.2 * RANGE
    assert type(loaded.model.layers[0].mlp.up_proj) is MarlinLinear


def test_a_head_that_would_be_quantized_while_it_loads(tmp_path) -> None:
    config = LlamaConfig(**SIZES, num_labels=2, initializer_range=RANGE, pad_token_id=0)
    LlamaClassifier(config).save_pretrained(tmp_path / "saved")
    options = {"num_labels": 5, "quantization_config": MarlinConfig("uint4b8", 32, quantize_head=True)}
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        LlamaClassifier.from_pretrained(tmp_path / "saved", **options)
    head = LlamaClassifier.from_pretrained(tmp_path / "saved", **options, ignore_mismatched_sizes=True).score
    assert type(head) is nn.Linear
    assert head.weight.shape == (5, config.hidden_size)
    assert 0.8 * RANGE < head.weight.std() < 1.2 * RANGE
