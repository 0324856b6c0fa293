"""lab/mac/measured.py compares a report of `bench --variant all --json` with the model."""

import json
from pathlib import Path

import pytest

from lab import model
from lab.mac import measured

PRODUCT = {"N": 4096, "K": 4096, "weight_format": "uint4b8", "group_size": 64, "dtype": "float16", "M": 4}
GPU = model.AppleSiliconGPU.from_name("M1 Max", 24)


def report(seconds: dict[str, float]) -> dict[str, object]:
    variants = {name: {"seconds": value, "bytes_per_second": 1.0, "of_roof": 0.5} for name, value in seconds.items()}
    machine = {"device": "mps", "gpu": "Apple M1 Max, 24 cores"}
    return {"machine": machine, "results": [{**PRODUCT, "chosen": "gemv:4x128x16", "variants": variants}]}


def run(monkeypatch: pytest.MonkeyPatch, path: Path) -> int:
    monkeypatch.setattr("sys.argv", ["measured.py", str(path)])
    return measured.main()


def test_each_variant_is_compared_with_the_model_of_the_reports_gpu() -> None:
    problem = model.Problem(4, 4096, 4096, group_size=64)
    tiling, best = model.best(problem, GPU, "fused")
    found = list(measured.comparisons(report({tiling.name: 3 * best, "two_pass": 1e-3}), GPU))
    assert [one.variant for one in found] == [tiling.name, "two_pass"]
    assert found[0].ratio == pytest.approx(3)
    assert found[1].predicted == pytest.approx(model.best(problem, GPU, "two_pass")[1])
    assert measured.gpu_of(report({})).cores == 24


def test_the_command_prints_medians_and_names_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "variants.json"
    path.write_text(json.dumps(report({"gemv:4x128x16": 1e-4, "striped:64x64x32": 2e-4})))
    assert run(monkeypatch, path) == 0
    printed = capsys.readouterr().out
    assert "M1 Max" in printed and "striped:64x64x32" in printed and "100.0" in printed
    for text, message in (("{", "Expecting"), ("{}", "no entry 'machine'"), ("[]", "list indices")):
        path.write_text(text)
        assert run(monkeypatch, path) == 2
        assert message in capsys.readouterr().err
    path.write_text(json.dumps(report({"gemv:9x128x16": 1e-4})))
    assert run(monkeypatch, path) == 2
    assert "got 'gemv:9x128x16'" in capsys.readouterr().err
