"""Tests benchmarks/metal/experts_model.py, which compares the planned times of experts with their limits."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks/metal"))

import experts_model as model

from torch_marlin_metal.extension import native
from torch_marlin_metal.profiling import AppleSiliconGPU

GPT_OSS, QWEN3 = model.MIXTURES


def test_the_limit_at_one_token_is_memory_and_at_many_tokens_the_matrix_rate() -> None:
    gpu = AppleSiliconGPU.from_name("M1")
    # Four experts with 2880 x 8640 weights of 4 bits, and a byte for each group of 32. 60.06 GB/s are read.
    one = 4 * 2880 * 8640 * (0.5 + 1 / 32) / 60.06e9
    assert model.limit(GPT_OSS, 1, gpu) == pytest.approx(one, rel=1e-3)
    # 8 cores with 4 schedulers at 1.278 GHz. A scheduler takes 18 clocks for 8^3 multiply-adds.
    many = 2048 * 4 * 2880 * 8640 / (8**3 / 18 * 4 * 8 * 1.278e9)
    assert model.limit(GPT_OSS, 2048, gpu) == pytest.approx(many, rel=1e-3)


def test_the_rows_of_an_expert_have_the_right_mean() -> None:
    for mixture, tokens in ((GPT_OSS, 1), (QWEN3, 64)):
        found = dict(model.rows_of_an_expert(tokens, mixture))
        assert sum(found.values()) == pytest.approx(1 - (1 - mixture.top_k / mixture.experts) ** tokens, rel=1e-4)
        mean = sum(rows * probability for rows, probability in found.items())
        assert mean == pytest.approx(tokens * mixture.top_k / mixture.experts, rel=1e-4)


def test_one_by_one_at_one_token_is_a_product_for_each_chosen_expert() -> None:
    gpu = AppleSiliconGPU.from_name("M2 Pro")
    products = sum(model.one_product(QWEN3, 1, N, K, gpu.name) for N, K in QWEN3.products())
    assert model.one_by_one(QWEN3, 1, gpu) == pytest.approx(8 * products)


def test_one_by_one_moves_the_rows_of_each_expert_from_two_tokens_on() -> None:
    gpu = AppleSiliconGPU.from_name("M1")
    # Two launches of 6 us. Five times 10 rows of 2048 halves, of which memory reads or writes 60.06 GB/s.
    assert model.moving_rows(QWEN3, 10, gpu) == pytest.approx(12e-6 + 5 * 10 * 2048 * 2 / 60.06e9, rel=1e-3)
    products = sum(model.one_product(QWEN3, 1, N, K, gpu.name) for N, K in QWEN3.products())
    assert model.one_by_one(QWEN3, 2, gpu) > 15 * (products + 12e-6)


@pytest.mark.parametrize("mixture", model.MIXTURES)
@pytest.mark.parametrize("name", ["M1", "M2 Pro", "A18 Pro"])
def test_one_expert_after_the_other_is_never_faster(mixture: model.Mixture, name: str) -> None:
    gpu = AppleSiliconGPU.from_name(name)
    for tokens in model.TOKENS:
        found = model.predict(mixture, tokens, gpu)
        assert found.seconds < found.one_by_one, (tokens, found)


# The time over the limit at 1, 16 and 512 tokens, and over that of one expert after the other at 512 tokens.
PREDICTED = [
    (GPT_OSS, "M1", (1.04, 1.04, 1.24), 0.99),
    (GPT_OSS, "M3 Max", (1.12, 1.06, 1.15), 0.89),
    (GPT_OSS, "M5", (1.06, 1.05, 1.13), 0.98),
    (QWEN3, "M1", (1.06, 1.03, 1.34), 0.86),
    (QWEN3, "M3 Max", (1.27, 1.06, 1.27), 0.54),
    (QWEN3, "M5", (1.10, 1.04, 1.22), 0.78),
]


@pytest.mark.parametrize(("mixture", "name", "over_limit", "over_one_by_one"), PREDICTED)
def test_experts_stay_as_near_to_the_limit_as_the_page_says(
    mixture: model.Mixture, name: str, over_limit: tuple[float, ...], over_one_by_one: float
) -> None:
    gpu = AppleSiliconGPU.from_name(name)
    for tokens, most in zip((1, 16, 512), over_limit, strict=True):
        found = model.predict(mixture, tokens, gpu)
        assert 1 < found.over_limit <= most, (tokens, found)
        assert found.seconds / found.one_by_one <= (over_one_by_one if tokens == 512 else 1), (tokens, found)


def test_a_bar_that_is_missed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(model, "TOKENS", (512,))
    monkeypatch.setattr(model, "MIXTURES", (GPT_OSS,))
    monkeypatch.setattr(sys, "argv", ["experts_model.py", "--gpus", "M4"])
    plan = native.moe_plan
    monkeypatch.setattr(native, "moe_plan", lambda **options: plan(**{**options, "variant": "gemv"}))
    assert model.main() == 1
    printed = capsys.readouterr().out
    assert "gpt-oss-20b, M4, 512 tokens: time over the limit" in printed
    assert "gpt-oss-20b, M4, 512 tokens: time over that of one expert after the other" in printed
