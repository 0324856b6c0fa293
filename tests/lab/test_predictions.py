"""Compares the output of lab/predictions/ with values computed by hand, and with the numbers on the pages."""

import pytest

from lab.predictions import commits, experts
from torch_marlin_metal.profiling import AppleSiliconGPU

GPT_OSS, QWEN3 = experts.MIXTURES
M1 = AppleSiliconGPU.from_name("M1")


def test_one_commit_adds_the_host_to_the_gpu_and_more_overlap_them() -> None:
    boundary, wait = commits.BOUNDARY_SECONDS, commits.WAIT_SECONDS
    work = [(2e-3, 2e-3)] * 4
    assert commits.token_seconds(work, 1e-3, 0) == (pytest.approx(4e-3 + boundary + 8e-3 + wait), 1)
    assert commits.token_seconds(work, 1e-3, 2e-3) == (pytest.approx(1e-3 + 4 * boundary + 8e-3 + wait), 4)
    # If the host is slower, the GPU waits for the host. Only the last command buffer runs after the host has finished.
    assert commits.token_seconds(work, 5e-3, 2e-3)[0] == pytest.approx(20e-3 + boundary + 2e-3 + wait)


def test_a_token_has_every_product_and_kernel() -> None:
    work = commits.operations("M1")
    products = len(commits.PRODUCTS)
    assert len(work) == commits.LAYERS * (products + commits.OTHER_KERNELS) + 1
    assert sum(predicted > 0 for _, predicted in work) == commits.LAYERS * products + 1


def test_the_limit_at_one_token_is_memory_and_at_many_tokens_the_matrix_rate() -> None:
    # Four experts with 2880 x 8640 weights of 4 bits, and a byte for each group of 32, read at 60.06 GB/s.
    one = 4 * 2880 * 8640 * (0.5 + 1 / 32) / 60.06e9
    assert experts.limit(GPT_OSS, 1, M1) == pytest.approx(one, rel=1e-3)
    # 8 cores with 4 schedulers each at 1.278 GHz. A scheduler needs 18 clocks for 8^3 multiply-adds.
    many = 2048 * 4 * 2880 * 8640 / (8**3 / 18 * 4 * 8 * 1.278e9)
    assert experts.limit(GPT_OSS, 2048, M1) == pytest.approx(many, rel=1e-3)


def test_the_rows_of_an_expert_have_the_right_mean() -> None:
    for mixture, tokens in ((GPT_OSS, 1), (QWEN3, 64)):
        found = dict(experts.rows_of_an_expert(tokens, mixture))
        assert sum(found.values()) == pytest.approx(1 - (1 - mixture.top_k / mixture.experts) ** tokens, rel=1e-4)
        mean = sum(count * probability for count, probability in found.items())
        assert mean == pytest.approx(tokens * mixture.top_k / mixture.experts, rel=1e-4)


# The ratio of time to limit at 1, 16 and 512 tokens, and for one expert after another at 512 tokens.
@pytest.mark.parametrize(
    ("mixture", "name", "over_limit", "over_one_by_one"),
    [
        (GPT_OSS, "M1", (1.04, 1.04, 1.24), 0.99),
        (GPT_OSS, "M3 Max", (1.12, 1.06, 1.15), 0.89),
        (QWEN3, "M1", (1.06, 1.03, 1.34), 0.86),
        (QWEN3, "M5", (1.10, 1.04, 1.84), 0.50),
    ],
)
def test_experts_stay_as_near_to_the_limit_as_the_page_says(
    mixture: experts.Mixture, name: str, over_limit: tuple[float, ...], over_one_by_one: float
) -> None:
    gpu = AppleSiliconGPU.from_name(name)
    for tokens, most in zip((1, 16, 512), over_limit, strict=True):
        found = experts.predict(mixture, tokens, gpu)
        assert 1 < found.over_limit <= most, (tokens, found)
        assert found.seconds / found.one_by_one <= (over_one_by_one if tokens == 512 else 1), (tokens, found)
