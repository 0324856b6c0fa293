"""The planner's table follows from the model, and its choices are nearly as fast as the model's best."""

import random
from dataclasses import replace

import pytest

from lab import choices, decisions
from lab.model import AppleSiliconGPU, Problem


def test_the_file_follows_from_the_model() -> None:
    assert decisions.FILE.read_text() == decisions.text()


@pytest.mark.parametrize("problems", [choices.random_products, choices.random_mixtures])
def test_choices_are_close_to_the_best(problems: choices.Problems) -> None:
    """Checks a sample of the output of `python -m lab.choices`."""
    found = problems(random.Random(3))
    ratios = sorted(choices.choice(*next(found)).ratio for _ in range(250))
    assert ratios[125] < 1.001 and ratios[-4] < 1.03 and ratios[-1] <= choices.MOST_RATIO


def test_a_worse_choice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with one simdgroup waits for all its loads, so it is much slower than the best plan."""
    right = choices.planned
    alone = {"simdgroups": 1, "k_per_slice": 4096}
    monkeypatch.setattr(choices, "planned", lambda *plan: replace(right(*plan), **alone))
    gpu = AppleSiliconGPU.from_name("M1 Max")
    assert choices.choice(gpu, Problem(1, 4096, 4096)).ratio > choices.MOST_RATIO
