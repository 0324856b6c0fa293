"""The choice of formats by a memory limit, llama.cpp's recipes, and sizes as users write them."""

import itertools
import random

import pytest

from torch_marlin_metal.quantize.fit import Unit, choose
from torch_marlin_metal.quantize.like import FORMATS, Described, formats_like, types_like
from torch_marlin_metal.sizes import human_size, parse_size

CANDIDATES = (("a", 32), ("b", 32), ("c", 32))


def units(seed: int, count: int) -> list[Unit]:
    chance, made = random.Random(seed), []
    for index in range(count):
        size, error = chance.randint(10, 300), 10 ** chance.uniform(-2, 2)
        sizes = [4 * size, 5 * size + chance.randint(0, 9), 8 * size]
        made.append(Unit([f"layer{index}"], sizes, [error, error * chance.uniform(0.1, 1.1), error / 250], size))
    return made


@pytest.mark.parametrize("seed", range(6))
def test_the_choice_fits_and_is_the_best_of_all(seed) -> None:
    made = units(seed, 7)
    ends = [sum(sizes) for sizes in zip(*(unit.sizes for unit in made), strict=True)]
    for share in (0.0, 0.1, 0.3, 0.6, 0.9):
        limit = 100 + ends[0] + int((ends[2] - ends[0]) * share)
        fit = choose("op", CANDIDATES, made, frozenset({"layer0"}), 100, limit)
        assert fit.total_bytes <= limit
        assert fit.total_bytes == 100 + sum(unit.sizes[at] for unit, at in zip(made, fit.choice, strict=True))
        every = [
            sum(unit.errors[at] for unit, at in zip(made, choice, strict=True))
            for choice in itertools.product(range(3), repeat=7)
            if 100 + sum(unit.sizes[at] for unit, at in zip(made, choice, strict=True)) <= limit
        ]
        assert fit.error == pytest.approx(min(every))
        errors = [one.error for one in fit.curve()]
        assert errors == sorted(errors, reverse=True)
        assert fit.plot().count("< chosen") == 1


def test_a_limit_that_cannot_be_met_is_answered_with_the_least() -> None:
    made = units(0, 3)
    least = 50 + sum(unit.sizes[0] for unit in made)
    message = rf"^op: memory: expected at least {human_size(least)} \({least} bytes\), .*; got {human_size(least - 1)}$"
    with pytest.raises(ValueError, match=message):
        choose("op", CANDIDATES, made, frozenset(), 50, least - 1)
    assert choose("op", CANDIDATES, made, frozenset(), 50, least).total_bytes == least


@pytest.mark.parametrize(
    ("text", "expected"),
    [("9 GB", 9 * 10**9), ("8.5GiB", int(8.5 * 2**30)), (" 900 mb ", 9 * 10**8), (12, 12), (".5 kB", 500)],
)
def test_sizes_are_read(text, expected) -> None:
    assert parse_size("memory", text) == expected


@pytest.mark.parametrize("text", ["9", "GB", "9 GBit", "-9 GB", "9,5 GB", None, 1.5, True])
def test_other_sizes_are_refused(text) -> None:
    with pytest.raises(
        ValueError, match=r"memory: expected a number and one of B, kB, MB, GB, .*, such as '9 GB', got"
    ):
        parse_size("memory", text)


def test_sizes_in_powers_of_two_and_as_text() -> None:
    assert parse_size("memory", "16GB", binary=True) == 16 * 2**30
    with pytest.raises(ValueError, match="expected more than 0 bytes"):
        parse_size("memory", "0 GB")
    assert [human_size(count) for count in (999, 2_500_000, 5e12)] == ["999 B", "2.5 MB", "5e+03 GB"]


# Bytes of llama.cpp's types for 256 weights (ggml-common.h).
BLOCKS = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "Q8_0": 272, "Q5_0": 176, "Q5_1": 192}


def llama_8b() -> dict[str, tuple[int, int]]:
    shapes = {"model.embed_tokens": (128256, 4096), "lm_head": (128256, 4096)}
    for block in range(32):
        attention = {"q_proj": (4096, 4096), "k_proj": (1024, 4096), "v_proj": (1024, 4096), "o_proj": (4096, 4096)}
        inner = {"gate_proj": (14336, 4096), "up_proj": (14336, 4096), "down_proj": (4096, 14336)}
        shapes |= {f"model.layers.{block}.self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= {f"model.layers.{block}.mlp.{name}": shape for name, shape in inner.items()}
    return shapes


@pytest.mark.parametrize(
    ("like", "gigabytes"),  # of bartowski's files of Meta-Llama-3.1-8B-Instruct on the Hugging Face Hub
    [("Q4_K_S", 4.69), ("Q4_K_M", 4.92), ("Q5_K_S", 5.60), ("Q5_K_M", 5.73), ("Q6_K", 6.60), ("Q8_0", 8.54)],
)
def test_a_recipe_gives_the_size_of_the_published_file(like, gigabytes) -> None:
    layers = [
        Described(name, K, name == "lm_head", name == "model.embed_tokens") for name, (_, K) in llama_8b().items()
    ]
    found = types_like("op", like, layers)
    size = sum(N * K * BLOCKS[found[name]] / 256 for name, (N, K) in llama_8b().items())
    assert size / 1e9 == pytest.approx(gigabytes, rel=0.003)


def test_recipes_know_mixtures_and_rows_of_other_lengths() -> None:
    layers = [
        Described(f"model.layers.{block}.{name}", K)
        for block in range(16)
        for name, K in (("self_attn.v_proj", 512), ("mlp.experts.down_proj", 512), ("mlp.experts.gate_up_proj", 96))
    ]
    layers.append(Described("lm_head", 96, True))
    found = types_like("op", "Q4_K_M", layers, experts=8)
    assert formats_like("op", "Q4_K_M", layers, 8) == {name: FORMATS[kind] for name, kind in found.items()}
    assert {found[f"model.layers.{block}.self_attn.v_proj"] for block in range(16)} == {"Q8_0"}
    more = [block for block in range(16) if found[f"model.layers.{block}.mlp.experts.down_proj"] == "Q6_K"]
    assert more == [0, 1, 4, 7, 10, 13, 14, 15]
    assert {found[f"model.layers.{block}.mlp.experts.gate_up_proj"] for block in range(16)} == {"Q5_0"}
    assert found["lm_head"] == "Q8_0"
    with pytest.raises(ValueError, match=r"op: like: expected one of Q4_K_S, Q4_K_M, .*, got 'Q4'"):
        formats_like("op", "Q4", [])
