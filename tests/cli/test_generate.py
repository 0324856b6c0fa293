"""Compares `torch-marlin-metal generate` with a plain loop over the same model, and tests each failure."""

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.test_cli import call
from tests.support.documented_keys import documented, keys_of
from tests.support.llama import MODELS, write_gguf
from tests.support.small_llama import WORDS, save_small_llama
from torch_marlin_metal.cli.models import generate as module
from torch_marlin_metal.cli.models import opened
from torch_marlin_metal.integrations.transformers import MarlinConfig, quantizer

NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_small_llama(tmp_path_factory.mktemp("small"))


def plain_loop(model: torch.nn.Module, ids: list[int]) -> list[int]:
    """Returns the most probable next tokens, each computed from all earlier tokens without a cache."""
    ids = list(ids)
    with torch.no_grad():
        for _ in range(NEW):
            ids.append(int(model(torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1].argmax()))
    return ids[-NEW:]


def words(ids: list[int]) -> str:
    return " ".join(f"w{number}" for number in ids)


def test_the_text_is_that_of_a_plain_loop_in_floats_and_in_4_bit(folder, device, monkeypatch):
    # does not compile in advance, because most of these kernels would be for longer prompts
    monkeypatch.setattr(quantizer, "prepare", lambda model, progress: 0)
    floats, packed = ((), None), (("--weight-format", "uint4"), MarlinConfig("uint4"))
    for option, config in (floats, packed) if device == "cpu" else (packed,):
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map=device)
        expected = words(plain_loop(model, [5, 9, 7]))
        code, out, err = call("generate", folder, "w5 w9 w7", "--tokens", NEW, "--device", device, *option)
        assert (code, out) == (0, expected + "\n"), err
    numbers, loaded = err.strip().splitlines()[-2:]
    assert re.match(r"prompt: 3 tokens, [\d.,]+ tokens/s; .*generated: 6 tokens, [\d.,]+ tokens/s; peak", numbers), err
    packed_layers = r"\d+ layers of uint8b128 g\d+, \d+ layers of uint4 g\d+"
    assert re.match(packed_layers + r": [\d.]+ kB of the model's [\d.]+ kB; loaded in", loaded), err


def test_a_packed_model_takes_no_weight_format(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=MarlinConfig("uint4"))
    model.save_pretrained(tmp_path)
    options = ("--tokenizer", folder, "--weight-format", "nvfp4")
    code, out, err = call("generate", tmp_path, "w5", *options)
    assert (code, out) == (2, "")
    assert "--weight-format: expected a model of floats, got" in err and "is packed (" in err


def test_a_gguf_file_with_a_tokenizer_from_elsewhere(folder, tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, MODELS / "auto-round-asym-g32", "Q4_0")
    code, out, err = call("generate", file, "w5 w9", "--tokens", NEW, "--tokenizer", folder, "--dtype", "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    expected = [number for number in plain_loop(model, [5, 9]) if number < WORDS]
    assert (code, out.split()) == (0, words(expected).split()), err


def test_a_chat_keeps_the_conversation_and_its_cache(folder):
    """The second prompt is the template of all messages. Tokens that the cache already has are not computed again."""
    code, out, err = call("generate", folder, "w1 w2", "--chat", "--tokens", NEW, "--json", stdin="\nw3\n")
    assert code == 0, err
    assert keys_of(json.loads(out)) == documented("generate")
    first, second = json.loads(out)["answers"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    one = plain_loop(model, [1, 2, 0])  # the template ends a user's message with the unknown word
    assert (first["text"], first["prompt_tokens"], first["cached_tokens"]) == (words(one), 3, 0)
    said = [1, 2, 0, *one, 3, 0]
    assert second["text"] == words(plain_loop(model, said))
    assert (second["prompt_tokens"], second["cached_tokens"]) == (len(said), 3 + NEW - 1)


def test_the_rates_count_what_is_computed(folder, monkeypatch):
    """A fake clock advances one second at each call, so that each rate is a simple number."""
    clock = itertools.count()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    found = json.loads(call("generate", folder, "w1 w2 w3 w4", "--tokens", NEW, "--json")[1])["answers"][0]
    assert (found["first_token_seconds"], found["prompt_tokens_per_second"]) == (1, 4)
    assert (found["new_tokens"], found["decode_tokens_per_second"]) == (NEW, 1)
    only = json.loads(call("generate", folder, "w1", "--tokens", 1, "--json")[1])["answers"][0]
    assert (only["new_tokens"], only["decode_tokens_per_second"]) == (1, None)


def test_a_temperature_draws_with_its_seed(folder):
    def draw(seed: int) -> str:
        return call("generate", folder, "w1", "--tokens", 12, "--temperature", 9, "--seed", seed)[1]

    assert draw(1) == draw(1) != draw(2)


def test_each_failure_is_one_sentence(folder, tmp_path, monkeypatch):
    without = save_small_llama(tmp_path / "without", tokenizer=False)
    fewer = save_small_llama(tmp_path / "fewer", tokenizer=False, vocab_size=9)
    plain = save_small_llama(tmp_path / "plain", template=False)
    for arguments, code, sentence in (
        ((tmp_path / "none", "x"), 3, "none: does not exist; a model of the Hub must be downloaded first"),
        ((tmp_path, "x"), 3, "expected a directory with a config.json of transformers, or a .gguf file"),
        ((without, "x"), 3, "its tokenizer cannot be loaded: --tokenizer names"),
        ((plain, "--chat"), 3, "its tokenizer has no chat template; without --chat"),
        ((folder,), 2, "generate: expected a prompt, or --chat"),
        ((fewer, "w9", "--tokenizer", folder), 3, "expected tokens below its vocabulary of 9, the tokenizer gives 9"),
        ((folder, ""), 2, "generate: the prompt has no token"),
    ):
        found = call("generate", *arguments)
        assert (found[0], found[1]) == (code, ""), found
        assert sentence in found[2]
        assert found[2].count("\n") == 1
    assert call("generate", without, "w5", "--tokens", 1, "--tokenizer", folder)[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(AutoTokenizer, "from_pretrained", Mock(side_effect=AssertionError()))
        assert "its tokenizer cannot be loaded (AssertionError): --tok" in call("generate", folder, "w1")[2]
    monkeypatch.setattr(opened, "physical_memory", lambda: 1000)
    code, _, err = call("generate", folder, "w1")
    assert (code, "this machine has 1 kB of memory" in err) == (3, True)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("MPS out of memory"), 3)])
def test_an_end_while_it_generates(folder, monkeypatch, error, code):
    def put(self, value):
        raise error

    monkeypatch.setattr(module._Timed, "put", put)
    found = call("generate", folder, "w1 w2")
    memory = "error: generate: there is not enough memory: the prompt has 2 tokens; `torch-marlin-metal fit` says what"
    assert found[:2] == (code, "")
    assert found[2].startswith("interrupted\n" if code == 130 else memory)
