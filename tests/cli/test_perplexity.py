"""Compares `torch-marlin-metal perplexity` with a plain loop in fp64 that uses llama-perplexity's formulas."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli import test_cli
from tests.support.documented_keys import documented, keys_of
from tests.support.small_llama import WORDS, save_small_llama
from torch_marlin_metal.integrations.transformers import MarlinConfig, quantizer

CONTEXT, FIRST = 16, 3  # the last piece of the text is incomplete


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_small_llama(tmp_path_factory.mktemp("small"))


@pytest.fixture
def text(tmp_path) -> tuple[Path, list[int]]:
    ids = torch.randint(1, WORDS, (5 * CONTEXT + 7,), generator=torch.Generator().manual_seed(1)).tolist()
    (tmp_path / "text.txt").write_text(" ".join(f"w{number}" for number in ids))
    return tmp_path / "text.txt", ids


def probabilities(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """Returns the predicted probabilities `[tokens, vocabulary]` for the second half of each piece."""
    rows = []
    for start in range(0, len(ids) - len(ids) % CONTEXT, CONTEXT):
        with torch.no_grad():
            logits = model(torch.tensor([ids[start : start + CONTEXT]])).logits[0].double().numpy()
        for position in range(CONTEXT // 2, CONTEXT - 1):
            weights = np.exp(logits[position] - logits[position].max())
            rows.append(weights / weights.sum())
    return np.array(rows)


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    return values.mean(), math.sqrt((np.mean(values**2) - np.mean(values) ** 2) / (len(values) - 1))


def call(*arguments: object, device: str = "cpu") -> tuple[int, str, str]:
    return test_cli.call("perplexity", *arguments, "--device", device)


def test_each_measure_is_that_of_a_plain_loop_in_fp64(folder, text, device, monkeypatch):
    # does not compile in advance, because most of these kernels would be for other prompts
    monkeypatch.setattr(quantizer, "prepare", lambda model, progress: 0)
    path, ids = text
    line = [folder, path, "--context", CONTEXT, "--weight-format", "nf4", "--against", folder, "--json"]
    code, out, err = call(*line, device=device)
    assert code == 0, err
    found = json.loads(out)
    packed = AutoModelForCausalLM.from_pretrained(folder, quantization_config=MarlinConfig("nf4"))
    p, q = probabilities(AutoModelForCausalLM.from_pretrained(folder), ids), probabilities(packed, ids)
    next_tokens = [
        ids[start + position + 1]
        for start in range(0, 5 * CONTEXT, CONTEXT)
        for position in range(CONTEXT // 2, CONTEXT - 1)
    ]
    assert (found["tokens"], found["pieces"]) == (len(next_tokens), 5)
    assert keys_of(found) == documented("perplexity")
    expected = {}
    for name, one in (("perplexity", q), ("other_perplexity", p)):
        loss, error = mean_and_error(-np.log(one[np.arange(len(one)), next_tokens]))
        expected |= {name: math.exp(loss), f"{name}_error": math.exp(loss) * error}
    divergence = (p * np.log(p / q)).sum(1)
    expected["divergence"], expected["divergence_error"] = mean_and_error(divergence)
    expected["divergence_99"] = np.percentile(divergence, 99)
    expected["same_first"], expected["same_first_error"] = mean_and_error((p.argmax(1) == q.argmax(1)).astype(float))
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=2e-4)
    assert found["divergence"] > 0.01
    assert 0 < found["same_first"] < 1
    half = json.loads(call(*line, "--pieces", 2, "--batch", 1)[1])
    assert (half["pieces"], half["tokens"]) == (2, 2 * len(next_tokens) // 5)


def test_a_model_against_itself_and_the_table(folder, text):
    code, out, err = call(folder, text[0], "--context", CONTEXT, "--against", folder)
    assert code == 0, err
    assert "100.00%" in out
    assert "0.000000" in out
    assert "KL" not in call(folder, text[0], "--context", CONTEXT)[1]


def test_each_piece_begins_as_the_tokenizer_begins_a_text(tmp_path, text):
    """A tokenizer that begins a text with a special token puts this token in place of the first token of each piece."""
    path, ids = text
    folder = save_small_llama(tmp_path / "begins")
    words = AutoTokenizer.from_pretrained(folder)
    words.bos_token = "w95"
    words.backend_tokenizer.post_processor = TemplateProcessing(single="w95 $A", special_tokens=[("w95", 95)])
    words.save_pretrained(folder)
    ids = [95, *ids]
    found = json.loads(call(folder, path, "--context", CONTEXT, "--json")[1])
    changed = [95 if at % CONTEXT == 0 else number for at, number in enumerate(ids)]
    p = probabilities(AutoModelForCausalLM.from_pretrained(folder), changed)
    positions = [start + at + 1 for start in range(0, 5 * CONTEXT, CONTEXT) for at in range(CONTEXT // 2, CONTEXT - 1)]
    losses = -np.log(p[np.arange(len(p)), [ids[at] for at in positions]])
    assert found["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-4)


def test_each_failure_is_one_sentence(folder, tmp_path, text):
    other = save_small_llama(tmp_path / "other", vocab_size=64, tokenizer=False)
    empty = save_small_llama(tmp_path / "empty")
    (empty / "model.safetensors").unlink()  # a load would fail
    (tmp_path / "old.txt").write_bytes("wörter".encode("latin-1"))
    for arguments, code, sentence in (
        ((folder, tmp_path / "none.txt"), 3, "none.txt: No such file or directory"),
        ((folder, tmp_path / "old.txt"), 2, "old.txt: expected a text in UTF-8, got 'utf-8' codec can't decode"),
        ((folder, text[0]), 2, "text.txt: expected at least 512 tokens, got 87"),
        ((other, text[0], "--context", 16, "--tokenizer", folder), 3, "expected tokens below its vocabulary of 64"),
        ((empty, text[0], "--context", 16, "--against", tmp_path / "none"), 3, "none: does not exist; a model of the"),
        (
            (empty, text[0], "--context", 16, "--dtype", "int8"),
            2,
            "--dtype: expected one of float16, bfloat16, float32",
        ),
        ((folder, text[0], "--context", 16, "--against", other), 3, "expected a vocabulary of 96 tokens as"),
    ):
        found = call(*arguments)
        assert (found[0], found[1]) == (code, ""), found
        assert sentence in found[2]
        assert found[2].count("\n") == 1
