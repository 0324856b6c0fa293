"""Every entry point that quantizes keeps heads of classifiers and float32 parts in floats, unless they are named."""

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner

from tests.support.models import packed_layers
from torch_marlin_metal import convert, quantize_model
from torch_marlin_metal.cli.app import app
from torch_marlin_metal.integrations.transformers import MarlinConfig
from torch_marlin_metal.layers.stays import CLASSIFIERS, classifier_heads

SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
SMALL |= {"vocab_size": 64, "num_labels": 24, "max_position_embeddings": 32, "pad_token_id": 0}
IMAGE = SMALL | {"image_size": 8, "patch_size": 4}
DECODER = SMALL | {"num_key_value_heads": 2}
DISTIL = {"dim": 64, "n_layers": 1, "n_heads": 2, "hidden_dim": 64, "vocab_size": 64, "num_labels": 24}
# A class, the arguments of its config, and the layers of its head.
CASES = [
    ("BertForSequenceClassification", SMALL, {"classifier"}),
    ("BertForTokenClassification", SMALL, {"classifier"}),
    ("BertForMultipleChoice", SMALL, {"classifier"}),
    ("BertForNextSentencePrediction", SMALL, {"cls.seq_relationship"}),
    ("RobertaForSequenceClassification", SMALL, {"classifier.dense", "classifier.out_proj"}),
    ("DistilBertForSequenceClassification", DISTIL, {"pre_classifier", "classifier"}),
    ("ModernBertForSequenceClassification", SMALL, {"head.dense", "classifier"}),
    ("LlamaForSequenceClassification", DECODER, {"score"}),
    ("LlamaForTokenClassification", DECODER, {"score"}),
    ("LlamaForQuestionAnswering", DECODER, {"qa_outputs"}),
    ("ViTForImageClassification", IMAGE, {"classifier"}),
    ("GPT2ForSequenceClassification", {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 64}, {"score"}),
]
ids = [name for name, _, _ in CASES]


def make(name: str, arguments: dict) -> nn.Module:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**arguments)).eval()


def floats(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize(("name", "arguments", "head"), CASES, ids=ids)
def test_quantize_model_leaves_the_head(name, arguments, head):
    model = make(name, arguments)
    report = quantize_model(model, "uint4", 32, progress=False)
    assert floats(model) == head
    assert packed_layers(model)
    left = {layer.name: layer.reason for layer in report.left if layer.name in head}
    assert set(left) == head
    assert all("head of a classifier; name it in include" in reason for reason in left.values())


@pytest.mark.parametrize(("name", "arguments", "head"), CASES[1::3], ids=ids[1::3])
def test_from_pretrained_leaves_the_head(name, arguments, head, tmp_path):
    make(name, arguments).save_pretrained(tmp_path)
    kind = getattr(transformers, name)
    model = kind.from_pretrained(tmp_path, quantization_config=MarlinConfig("uint4", 32))
    assert floats(model) == head
    whole = kind.from_pretrained(tmp_path, quantization_config=MarlinConfig("uint4", 32, quantize_head=True))
    assert packed_layers(whole).keys() == packed_layers(model).keys() | head


@pytest.mark.parametrize(("name", "arguments", "head"), CASES[1::3], ids=ids[1::3])
def test_the_command_leaves_the_head(name, arguments, head, tmp_path):
    make(name, arguments).save_pretrained(tmp_path / "floats")
    done = CliRunner().invoke(app, ["quantize", str(tmp_path / "floats"), str(tmp_path / "out"), "--group-size", "32"])
    assert done.exit_code == 0, done.output
    names = set(convert.open_reader(tmp_path / "out").layer_names)
    model = make(name, arguments)
    quantize_model(model, progress=False)
    assert len(names) == len(packed_layers(model))
    assert names.isdisjoint(head)


T5 = {"d_model": 64, "d_ff": 64, "d_kv": 32, "num_heads": 2, "num_layers": 1, "vocab_size": 64}


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "T5EncoderModel", "UMT5EncoderModel"])
def test_parts_that_transformers_keeps_in_float32_stay(name, tmp_path):
    kind = getattr(transformers, name)
    make(name, T5).save_pretrained(tmp_path / "floats")
    in_memory = kind.from_pretrained(tmp_path / "floats")
    report = quantize_model(in_memory, "uint4", 32, progress=False)
    loaded = kind.from_pretrained(tmp_path / "floats", quantization_config=MarlinConfig("uint4", 32))
    done = CliRunner().invoke(app, ["quantize", str(tmp_path / "floats"), str(tmp_path / "out"), "--group-size", "32"])
    assert done.exit_code == 0, done.output
    names = set(convert.open_reader(tmp_path / "out").layer_names)
    wide = {name for name, _ in in_memory.named_modules() if name.endswith(".wo")}
    assert wide
    assert wide <= floats(in_memory) & floats(loaded)
    assert names.isdisjoint(wide)
    tied = {"encoder.embed_tokens", "decoder.embed_tokens", "lm_head"} if "shared" in names else set()
    assert packed_layers(loaded).keys() - tied == names
    assert {layer.reason for layer in report.left if layer.name in wide} == {
        "transformers keeps it in float32; name it in include to quantize it"
    }
    quantize_model(in_memory, "uint4", 32, include="*.wo", progress=False)
    assert wide <= packed_layers(in_memory).keys()


def test_a_head_that_is_named_is_quantized():
    model = make(*CASES[4][:2])
    quantize_model(model, "uint4", 32, include=["*.layer.*", "classifier.*"], progress=False)
    assert {"classifier.dense", "classifier.out_proj"} <= packed_layers(model).keys()


def test_a_classifier_inside_another_module_keeps_its_head():
    model = nn.Sequential(make(*CASES[0][:2]))
    quantize_model(model, "uint4", 32, progress=False)
    assert floats(model) == {"0.classifier"}


def test_a_model_that_is_no_classifier_has_no_head():
    assert classifier_heads(make("BertForMaskedLM", SMALL)) == set()
    assert classifier_heads(nn.Sequential(nn.Linear(64, 2))) == set()


def every_class() -> list[str]:
    names = [name for name in dir(transformers) if "For" in name and not name.startswith("Auto")]
    return [name for name in names if CLASSIFIERS.match(name[name.index("For") :])]


# These classes multiply with parameters, or return the result of another class.
WITHOUT_HEAD = {"TapasForQuestionAnswering", "ShieldGemma2ForImageClassification"}


def test_every_classifier_of_transformers_has_a_head(everything):
    names = every_class()
    assert len(names) > 400
    made = []
    for name in names if everything else names[::40]:
        kind = getattr(transformers, name)
        try:
            config = kind.config_class()
            with torch.device("meta"):
                model = kind(config)
        except Exception:  # some classes need other packages, or their config has no default sizes
            continue
        made.append(name)
        heads = classifier_heads(model)
        found = [module for module in model.modules() if id(module) in heads]
        assert bool(found) == (name not in WITHOUT_HEAD), name
        labels = [layer for layer in model.modules() if getattr(layer, "out_features", None) == config.num_labels]
        assert name in WITHOUT_HEAD or not labels or any(layer in found for layer in labels), name
    assert len(made) >= 0.9 * len(names if everything else names[::40])
