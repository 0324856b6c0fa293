"""The tuner checks results before it compares times: a wrong or failing candidate is reported and never chosen."""

import sys

import pytest

import torch_marlin_metal as tmm
from torch_marlin_metal import tuning
from torch_marlin_metal.gpu.tuning import tuner
from torch_marlin_metal.gpu.tuning.table import TunedRange
from torch_marlin_metal.gpu.tuning.tuner import candidates

PRODUCT = tuning.Product(N=64, K=128, weight_format="uint4b8", group_size=32)
pytestmark = [
    pytest.mark.usefixtures("mps"),
    pytest.mark.skipif(sys.platform == "darwin", reason="takes the place of the Mac's kernels"),
]


def tuned_with_faults(monkeypatch, wrong) -> TunedRange:
    """Tunes 40 rows.

    The variants for which `wrong` returns true are the fastest, but their results are 1.05 times too large.
    """

    def gemm(a, weight, *, variant):
        result = tmm.gemm(a, weight, variant=variant)
        if variant.startswith("striped"):
            raise RuntimeError("the kernel does not compile")
        return result * 1.05 if wrong(variant) else result

    monkeypatch.setattr(tuner, "gemm", gemm)
    times = {True: [1.0] * 3, False: [2.0] * 3}
    return tuning.tune(
        [PRODUCT], rows=(40,), timer=lambda chains: {name: times[wrong(name)] for name in chains}, cold_bytes=1,
        progress=False,
    ).ranges[0]  # fmt: skip


def test_a_candidate_that_is_wrong_or_fails_is_reported_and_never_chosen(monkeypatch):
    names, model = candidates(PRODUCT, 40)
    wrong = next(name for name in names if name != model and not name.startswith("striped"))
    striped = {name for name in names if name.startswith("striped")}
    with pytest.warns(UserWarning, match="is left out") as warned:
        entry = tuned_with_faults(monkeypatch, lambda name: name == wrong)
    faults = entry.faults
    assert set(faults) == {wrong, *striped} and len(faults) > 1
    assert set(entry.times) == set(names) - set(faults)
    assert entry.variant in entry.times
    assert faults[wrong].startswith("its product: expected an error below 0.002 of the largest result, got 0.0")
    assert all(faults[name] == "the kernel does not compile" for name in striped)
    for name, fault in faults.items():
        assert any(str(w.message) == f"tune: {PRODUCT} M=40: {name} is left out: {fault}" for w in warned)


def test_the_models_choice_may_be_the_wrong_one(monkeypatch):
    model = candidates(PRODUCT, 40)[1]
    with pytest.warns(UserWarning, match="is left out") as warned:
        entry = tuned_with_faults(monkeypatch, lambda name: name == model)
    assert any(f"{model} is left out" in str(w.message) for w in warned)
    assert (entry.model_variant, entry.speedup) == (model, 1.0)
    assert entry.variant in entry.times and entry.variant != model
    with (
        pytest.warns(UserWarning, match="is left out"),
        pytest.raises(RuntimeError, match=r"tune: .* M=40: no candidate is right: its product: expected an error"),
    ):
        tuned_with_faults(monkeypatch, lambda name: True)
