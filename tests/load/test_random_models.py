"""A small sample of the campaign's random models: any family, format and door, against the decoded weights in fp64."""

import random

import pytest

from tests.support import random_models
from tests.support.random_models import case

SEEDS = (5, 11, 17, 23, 29, 41)  # each takes about a second


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_computes_what_its_decoded_weights_compute(seed, tmp_path) -> None:
    assert case(random.Random(seed), tmp_path).startswith(("right", "refused"))


def test_a_wrong_weight_is_noticed(tmp_path, monkeypatch) -> None:
    load = random_models.load

    def wrong(*args):
        model = load(*args)
        model.get_decoder().norm.weight.data.mul_(1.001)
        return model

    monkeypatch.setattr(random_models, "load", wrong)
    monkeypatch.setattr(random_models, "FAMILIES", ("qwen2",))
    with pytest.raises(AssertionError, match="relative errors"):
        case(random.Random(1), tmp_path)
