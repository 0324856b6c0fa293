"""A small sample of the campaign's random models: any family, format and entry point, compared in fp64."""

import random

import pytest

from tests.support import random_entry_points, random_models
from tests.support.random_models import case
from torch_marlin_metal import MarlinLinear

SEEDS = (5, 11, 17, 23, 29, 41)  # each takes about a second


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_computes_what_its_decoded_weights_compute(seed, tmp_path) -> None:
    assert case(random.Random(seed), tmp_path).startswith(("right", "refused"))


@pytest.mark.parametrize("kind", random_entry_points.CASES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("seed", [3, 7])
def test_other_files_and_libraries(kind, seed, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(random_entry_points, "ENTRY_POINTS", (kind,))
    assert random_entry_points.case(random.Random(seed), tmp_path).startswith("right")


@pytest.mark.parametrize("kind", random_entry_points.CASES, ids=lambda kind: kind.__name__)
def test_a_wrong_weight_behind_another_entry_point_is_noticed(kind, tmp_path, monkeypatch) -> None:
    compare = random_models.compare

    def wrong(exact, loaded, *rest):
        packed = next(module for module in loaded.modules() if isinstance(module, MarlinLinear))
        packed.b_packed.bitwise_xor_(0x11111111)  # the lowest bit of each code
        compare(exact, loaded, *rest)

    monkeypatch.setattr(random_entry_points, "compare", wrong)
    monkeypatch.setattr(random_entry_points, "ENTRY_POINTS", (kind,))
    with pytest.raises(AssertionError, match="relative errors"):
        random_entry_points.case(random.Random(3), tmp_path)


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
