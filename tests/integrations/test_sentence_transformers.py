"""Models of sentence-transformers that were quantized in memory or while they loaded."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from tests.support.models import packed_layers, same
from tests.support.programs import run_python
from torch_marlin_metal import quantize_model
from torch_marlin_metal.checkpoints.formats.native import ADVICE
from torch_marlin_metal.integrations.transformers import MarlinConfig

library = pytest.importorskip("sentence_transformers")

from sentence_transformers.base.modules.dense import Dense  # noqa: E402
from sentence_transformers.base.modules.transformer import Transformer  # noqa: E402
from sentence_transformers.sentence_transformer.modules.pooling import Pooling  # noqa: E402

TEXTS = ["a b c", "c b", "d"]


@pytest.fixture
def floats(tmp_path):
    """Returns the folder of a SentenceTransformer: a Bert with random weights, a pooling and a Dense."""
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["[PAD]", "[UNK]", "a", "b", "c", "d"])}, "[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        tmp_path / "bert"
    )
    torch.manual_seed(0)
    config = BertConfig(vocab_size=8, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    BertModel(config).save_pretrained(tmp_path / "bert")
    bert = Transformer(str(tmp_path / "bert"))
    model = library.SentenceTransformer(
        modules=[bert, Pooling(64), Dense(64, 32, activation_function=nn.Tanh())], device="cpu"
    )
    model.save(str(tmp_path / "floats"))
    return tmp_path / "floats"


def test_a_model_quantized_in_memory_loads_the_same_bits(floats, tmp_path) -> None:
    model = library.SentenceTransformer(str(floats), device="cpu")
    quantize_model(model, "uint4", 32, progress=False)
    assert len(packed_layers(model)) == 15  # six layers in each block, the embedding, the pooler and the Dense
    model.save(str(tmp_path / "saved"))
    again = library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert len(packed_layers(again)) == 15
    assert same(again.state_dict(), model.state_dict())
    assert (again.encode(TEXTS) == model.encode(TEXTS)).all()
    alone = f"from sentence_transformers import SentenceTransformer as S\nS({str(tmp_path / 'saved')!r}, device='cpu')"
    done = run_python("-c", alone)
    assert done.returncode == 1
    assert ADVICE in done.stderr


def test_a_module_alone_is_refused_without_its_import(floats, tmp_path) -> None:
    model = library.SentenceTransformer(str(floats), device="cpu")
    quantize_model(model, "uint4", 32, progress=False, include="2.linear")
    (tmp_path / "dense").mkdir()
    model[2].save(str(tmp_path / "dense"))
    code = f"from sentence_transformers.base.modules.dense import Dense\nDense.load({str(tmp_path / 'dense')!r})"
    done = run_python("-c", code)
    assert done.returncode == 1
    assert "size mismatch for linear.weight" in done.stderr
    assert same(Dense.load(str(tmp_path / "dense")).state_dict(), model[2].state_dict())


def test_a_model_quantized_while_it_loads_is_saved_and_loaded(floats, tmp_path) -> None:
    config = MarlinConfig("uint4", 32)
    model = library.SentenceTransformer(str(floats), device="cpu", model_kwargs={"quantization_config": config})
    assert len(packed_layers(model)) == 14
    model.save(str(tmp_path / "saved"))
    again = library.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert same(again.state_dict(), model.state_dict())
    assert (again.encode(TEXTS) == model.encode(TEXTS)).all()
