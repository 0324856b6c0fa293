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


# The time over the limit at 1, 16 and 512 tokens, and over that of one expert after the other at 512 tokens.
PREDICTED = [
    (GPT_OSS, "M1", (1.05, 1.05, 1.37), 1.12),
    (GPT_OSS, "M3 Max", (1.17, 1.07, 1.24), 1.03),
    (GPT_OSS, "M5", (1.07, 1.06, 1.22), 1.12),
    (QWEN3, "M1", (1.08, 1.04, 1.52), 1.08),
    (QWEN3, "M3 Max", (1.39, 1.07, 1.35), 0.75),
    (QWEN3, "M5", (1.14, 1.05, 1.28), 0.96),
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
