"""Tests `torch-marlin-metal doctor`: the report, checks that fail or whose process crashes, and the real checks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from torch_marlin_metal import WEIGHT_FORMATS, MarlinLinear, extension, tuning
from torch_marlin_metal.cli import doctor, doctor_steps, doctor_variants
from torch_marlin_metal.cli.app import app
from torch_marlin_metal.extension import native
from torch_marlin_metal.gpu.tuning.errors import LARGEST_ERROR
from torch_marlin_metal.gpu.tuning.products import Product

# The program of a child process. It runs one check, whose name says how it ends.
CHILD = """
import os, sys, time
name = sys.argv[1]
if name == "raises": raise RuntimeError("the product is wrong")
if name == "dies": os.abort()
if name == "hangs": time.sleep(60)
print("something else")
if name != "silent":
    print('doctor: {"layer": "%s", "ms": 1.5}' % os.environ.get("MTL_DEBUG_LAYER"), flush=True)
if name == "ends badly": sys.exit(3)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(doctor, "CHILD", (sys.executable, str(script)))
    monkeypatch.delenv("MTL_DEBUG_LAYER", raising=False)


def steps(*names: str, validated: bool = True) -> dict[str, doctor_steps.Step]:
    return {name: doctor_steps.Step(dict, is_validated=validated and name != "times") for name in names}


def test_after_a_failing_check_all_further_checks_run(child, tmp_path, monkeypatch):
    checks = steps("good", "raises", "dies", "silent", "ends badly", "times")
    monkeypatch.setattr(doctor_steps, "QUICK", {})
    monkeypatch.setattr(doctor_steps, "STEPS", checks)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "machine", lambda: {"torch": torch.__version__})
    path = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["doctor", "--deep", "--report", str(path)])
    assert done.exit_code == 1
    report = json.loads(path.read_text())
    assert report["machine"] == {"torch": torch.__version__}
    found = {check["check"]: check for check in report["checks"]}
    assert list(found) == list(checks)
    results = {name: check["result"] for name, check in found.items()}
    assert results == {**dict.fromkeys(checks, "failed"), "good": "passed", "times": "passed"}
    assert found["raises"]["summary"] == "exit code 1: RuntimeError: the product is wrong"
    assert "Traceback" in found["raises"]["output"]
    assert found["dies"]["summary"].startswith("exit code -6")
    assert found["silent"]["summary"] == "exit code 0: nothing was printed"
    assert found["ends badly"]["summary"] == "exit code 3 after the check"
    # Metal's validation is on for every check except "times", because validation changes the times.
    assert found["good"]["values"] == {"layer": "1", "ms": 1.5}
    assert found["times"]["values"]["layer"] == "None"
    assert all(name in done.stdout for name in checks)


def test_a_check_that_hangs_fails(child, monkeypatch):
    monkeypatch.setattr(doctor_steps, "STEPS", steps("hangs"))
    assert doctor.run_step("hangs", seconds=0.5)["summary"] == "did not end within 0.5 s"


def test_without_deep_doctor_compares_products_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert report["machine"]["torch"] == torch.__version__
    assert report["machine"]["mps"] == "no"
    (check,) = report["checks"]
    assert (check["check"], check["result"]) == ("products on cpu", "passed"), check
    errors = {"torch.matmul", *WEIGHT_FORMATS}
    assert set(check["values"]) == {f"error of {name}" for name in errors}
    assert 0 < max(check["values"].values()) < LARGEST_ERROR[torch.float32]


def test_the_text_has_a_line_for_each_fact_and_check(child, monkeypatch):
    monkeypatch.setattr(doctor_steps, "QUICK", steps("good", "dies", validated=False))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "machine", lambda: {"torch": "2.13.0", "extension": "loaded"})
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert done.stdout.splitlines()[:3] == [
        "torch      2.13.0",
        "extension  loaded",
        "good       passed: layer None, ms 1.5",
    ]
    assert done.stdout.splitlines()[3].startswith("dies       failed: exit code -6")


def test_without_the_extension_nothing_is_multiplied(child, monkeypatch):
    monkeypatch.setattr(extension, "refusal", "built for another torch")
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert (report["checks"], report["machine"]["extension"]) == ([], "built for another torch")


def test_a_wrong_product_on_the_cpu_is_named(monkeypatch):
    right = MarlinLinear.forward
    monkeypatch.setattr(MarlinLinear, "forward", lambda self, a: right(self, a) * 1.001)
    with pytest.raises(RuntimeError, match=r"uint4b8, 1 rows: expected an error below 1e-05 .*, got 0\.001"):
        doctor_steps.products_on_cpu()


def test_deep_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["doctor", "--deep"])
    assert done.exit_code == 2
    assert "--deep: expected a torch with an mps device" in done.stderr


def kinds(everything: bool) -> list[doctor_variants.Kind]:
    """Returns every kind of product that the check of variants compares, or each format with one dtype in turn."""
    in_turn = [(form, doctor_variants.DTYPES[i % 3]) for i, form in enumerate(WEIGHT_FORMATS)]
    return list(doctor_variants.EVERY_KIND) if everything else in_turn


def test_every_kind_is_compared():
    assert len(set(doctor_variants.EVERY_KIND)) == len(WEIGHT_FORMATS) * 3
    assert set(doctor_variants.ROWS) == set(native.gemm_variants())


@pytest.mark.large
@pytest.mark.parametrize("name", [name for name in doctor_steps.STEPS if "again" not in name and "decode" not in name])
def test_the_checks_pass_on_the_software_device(mps, name, everything, monkeypatch):
    monkeypatch.setattr(doctor_variants, "EVERY_KIND", kinds(everything))
    interval = tuning.commit_interval()
    try:
        assert doctor_steps.STEPS[name].run()
    finally:
        tuning.set_commit_interval(interval)


def test_the_check_of_variants_names_each_wrong_product(monkeypatch):
    exact = torch.ones(2, 3, dtype=torch.float64)

    def fails():
        raise RuntimeError("kernel gemm_tensor does not compile: no such type\nin line 3")

    def cases(problem: Product):
        dtype = problem.torch_dtype
        yield "right", lambda: exact.to(dtype), exact
        yield "late", lambda: (exact * 1.05).to(dtype), exact
        yield "fused", lambda: (exact * 1.003).to(dtype), exact
        if problem.weight_format == "lut4":
            yield "NaN", lambda: torch.full((2, 3), torch.nan, dtype=dtype), exact
            yield "tensor", fails, exact

    monkeypatch.setattr(doctor_variants, "cases", cases)
    with pytest.raises(RuntimeError) as caught:
        doctor_variants.compare([(form, dtype) for form in ("uint4", "lut4") for dtype in ("bfloat16", "float32")])
    texts = str(caught.value).split("; ")
    assert texts[0] == "late of uint4 in bfloat16: expected an error below 0.016 of the largest result, got 0.04688"
    assert texts[1].startswith(
        "late of uint4 in float32: expected an error below 1e-05 of the largest result, got 0.05"
    )
    assert texts[2].startswith("fused of uint4 in float32")
    assert texts[3:5] == [
        "late of lut4 in bfloat16: expected an error below 0.016 of the largest result, got 0.04688",
        "NaN of lut4 in bfloat16: expected an error below 0.016 of the largest result, got nan",
    ]
    assert texts[5:] == ["and 5 more"]


@pytest.mark.large
@pytest.mark.skipif(sys.platform == "darwin", reason="makes the software Metal device an M5")
def test_every_variant_of_an_m5(everything):
    program = "import json, softmetal\nfrom torch_marlin_metal.cli.doctor_variants import compare\n"
    program += f"print(json.dumps(compare({kinds(everything)})))"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "SOFTMETAL_FAMILY": "10"}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    products = [*doctor_variants.ROWS, "torch.matmul", "gemv with a sum of experts"]
    products += [f"{name} with experts" for name in doctor_variants.MOE_VARIANTS]
    names = {f"error of {name} in {dtype}" for name in products for dtype in doctor_variants.DTYPES}
    assert set(errors) == {name for name in names if "tensor" not in name or "float32" not in name}
    assert all(0 < error < LARGEST_ERROR[getattr(torch, name.split()[-1])] for name, error in errors.items())


@pytest.mark.skipif(sys.platform == "darwin", reason="starts the child on the software Metal device")
def test_a_real_child(mps, monkeypatch):
    program = "import runpy, softmetal; runpy.run_module('torch_marlin_metal.cli.doctor_steps', run_name='__main__')"
    monkeypatch.setattr(doctor, "CHILD", (sys.executable, "-c", program))
    monkeypatch.chdir(Path(__file__).parents[2])
    check = doctor.run_step("first product")
    assert check["result"] == "passed", check
    assert set(check["values"]) == {"first_ms", "second_ms"}


def test_the_quick_check_names_the_probe_and_each_kernel(mps):
    values = doctor_steps.QUICK["products on mps"].run()
    assert values.pop("half_subnormals") == "kept"
    products = ("torch.matmul", "gemv", "two_pass", "fused with experts", "gemv with a sum of experts")
    assert {f"error of {product} in float16" for product in products} <= set(values)
    assert all(0 <= error < LARGEST_ERROR[torch.float16] for error in values.values())
