"""Tests `torch-marlin-metal doctor`: the report, checks that fail or whose process crashes, and real checks."""

import json
import os
import platform
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.support.programs import run_python
from torch_marlin_metal import WEIGHT_FORMATS, MarlinLinear, extension, tuning
from torch_marlin_metal.cli import bench, doctor, doctor_steps, doctor_variants
from torch_marlin_metal.cli.app import app
from torch_marlin_metal.extension import native
from torch_marlin_metal.gpu.tuning.errors import LARGEST_ERROR
from torch_marlin_metal.gpu.tuning.products import Product

# The program of a child process. It runs one check, whose name determines how it ends.
CHILD = """
import os, sys, time
name = sys.argv[-1]
kinds = [kind for kind in ("MTL_DEBUG_LAYER", "MTL_SHADER_VALIDATION") if os.environ.get(kind) == "1"]
if name == "raises": raise RuntimeError("the product is wrong")
if name == "dies": os.abort()
if name == "dies when validated" and kinds: os.abort()
if name == "needs validation" and not kinds: raise RuntimeError("plain")
if name == "hangs": time.sleep(60)
print("something else")
if name != "silent":
    print('doctor: {"validation": "%s", "ms": 1.5}' % " ".join(kinds), flush=True)
if name == "ends badly": sys.exit(3)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(doctor, "CHILD", (sys.executable, str(script)))


def deep_report(names: tuple[str, ...], path: Path, monkeypatch) -> tuple[int, str, dict]:
    """Runs `doctor --deep` with checks of these names. Returns the exit code, the text and the report's checks."""
    monkeypatch.setattr(doctor_steps, "QUICK", {})
    monkeypatch.setattr(doctor_steps, "STEPS", dict.fromkeys(names, dict))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "machine", lambda: {"torch": torch.__version__})
    done = CliRunner().invoke(app, ["doctor", "--deep", "--report", str(path)])
    report = json.loads(path.read_text())
    assert report["machine"] == {"torch": torch.__version__}
    return done.exit_code, done.stdout, {check["check"]: check for check in report["checks"]}


def test_after_a_failing_check_all_further_checks_run(child, tmp_path, monkeypatch):
    names = ("good", "raises", "dies", "silent", "ends badly", "last")
    code, text, found = deep_report(names, tmp_path / "report.json", monkeypatch)
    assert code == 1
    assert tuple(found) == names
    results = {name: check["result"] for name, check in found.items()}
    assert results == {**dict.fromkeys(names, "failed"), "good": "passed", "last": "passed"}
    assert found["raises"]["summary"] == "exit code 1: RuntimeError: the product is wrong"
    assert "Traceback" in found["raises"]["output"]
    assert found["dies"]["summary"].startswith("exit code -6")
    assert found["silent"]["summary"] == "exit code 0: nothing was printed"
    assert found["ends badly"]["summary"] == "exit code 3 after the check"
    assert all(name in text for name in names)


def test_a_check_runs_without_validation_and_under_each_kind_alone(child, tmp_path, monkeypatch):
    for variable in ("MTL_DEBUG_LAYER", "MTL_SHADER_VALIDATION"):
        monkeypatch.setenv(variable, "1")  # as in a shell that is set up for debugging
    code, _, found = deep_report(("good",), tmp_path / "report.json", monkeypatch)
    assert code == 0
    runs = {"": found["good"], **found["good"]["validated"]}
    assert {kind: run["values"]["validation"] for kind, run in runs.items()} == {
        "": "",
        "API validation": "MTL_DEBUG_LAYER",
        "shader validation": "MTL_SHADER_VALIDATION",
    }


def test_the_run_without_validation_gives_the_verdict(child, tmp_path, monkeypatch):
    code, text, found = deep_report(("dies when validated",), tmp_path / "report.json", monkeypatch)
    assert code == 0
    assert found["dies when validated"]["result"] == "passed"
    assert [run["result"] for run in found["dies when validated"]["validated"].values()] == ["failed", "failed"]
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["under", kind, "validation", "failed:", "exit", "code", "-6:", "nothing", "was", "printed"]
        for kind in ("API", "shader")
    ]

    code, text, found = deep_report(("needs validation",), tmp_path / "report.json", monkeypatch)
    assert code == 1
    assert found["needs validation"]["result"] == "failed"
    assert [run["result"] for run in found["needs validation"]["validated"].values()] == ["passed", "passed"]
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["under", kind, "validation", "passed"] for kind in ("API", "shader")
    ]


def test_a_check_that_hangs_fails(child):
    assert doctor.run_check("hangs", seconds=0.5)["summary"] == "did not end within 0.5 s"


def test_without_deep_doctor_compares_products_on_the_cpu(tmp_path, monkeypatch):
    """The current folder has another package of the same name. The check must use the modules of its parent process."""
    (tmp_path / "torch_marlin_metal").mkdir()
    (tmp_path / "torch_marlin_metal" / "__init__.py").write_text("raise RuntimeError('the wrong package')")
    monkeypatch.chdir(tmp_path)
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
    monkeypatch.setattr(doctor_steps, "QUICK", dict.fromkeys(("good", "dies"), dict))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "machine", lambda: {"torch": "2.13.0", "extension": "loaded"})
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert done.stdout.splitlines()[:3] == [
        "torch      2.13.0",
        "extension  loaded",
        "good       passed: validation , ms 1.5",
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


# Excluded because other tests run a part of these checks, or because they only measure times.
UNUSED = ("first product again",)


def kinds(everything: bool) -> list[doctor_variants.Kind]:
    """Returns every kind of product that the check of variants compares, or a sample of two.

    One kind of the sample has zero points, the other a lookup table. Float16 is left out, because the quick check uses
    it. tests/kernels compares every format with fp64.
    """
    sample = [("uint4", "bfloat16"), ("lut4", "float32")]
    return list(doctor_variants.EVERY_KIND) if everything else sample


def test_every_kind_is_compared():
    assert len(set(doctor_variants.EVERY_KIND)) == len(WEIGHT_FORMATS) * 3
    assert set(doctor_variants.ROWS) == set(native.gemm_variants())


@pytest.mark.large
@pytest.mark.parametrize(
    "name",
    [  # in a sampled run, test_every_variant_of_an_m5 covers the variants
        pytest.param(name, marks=pytest.mark.whole if name == "every variant" else ())
        for name in doctor_steps.STEPS
        if name not in UNUSED
    ],
)
def test_the_checks_pass_on_the_software_device(mps, name, everything, monkeypatch):
    monkeypatch.setattr(doctor_variants, "EVERY_KIND", kinds(everything))
    interval = tuning.commit_interval()
    try:
        assert doctor_steps.STEPS[name]()
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
    # One kind is enough in a sample: an M5 adds only the tensor kernels, and the check of an M1 compares all others.
    compared = kinds(True) if everything else [("uint4", "bfloat16")]
    program = "import json\nfrom torch_marlin_metal.cli.doctor_variants import compare\n"
    program += f"print(json.dumps(compare({compared})))"
    done = run_python("-c", program, env={**os.environ, "SOFTMETAL_FAMILY": "10"}, mps=True)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    products = [*doctor_variants.ROWS, "torch.matmul", "gemv with a sum of experts"]
    products += [f"{name} with experts" for name in doctor_variants.MOE_VARIANTS]
    names = {f"error of {name} in {dtype}" for name in products for _, dtype in compared}
    assert set(errors) == {name for name in names if "tensor" not in name or "float32" not in name}
    assert all(0 < error < LARGEST_ERROR[getattr(torch, name.split()[-1])] for name, error in errors.items())


def test_the_quick_check_names_the_probe_and_each_kernel(mps):
    values = doctor_steps.QUICK["products on mps"]()
    assert values.pop("half_subnormals") == "kept"
    products = ("torch.matmul", "gemv", "two_pass", "fused with experts", "gemv with a sum of experts")
    assert {f"error of {product} in float16" for product in products} <= set(values)
    assert all(0 <= error < LARGEST_ERROR[torch.float16] for error in values.values())


def test_the_processor_of_a_mac_has_its_chips_name(tmp_path, monkeypatch):
    sysctl = tmp_path / "sysctl"
    sysctl.write_text('#!/bin/sh\n[ "$*" = "-n machdep.cpu.brand_string" ] && echo "Apple M1 Max"\n')
    sysctl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert bench.processor_name() == "Apple M1 Max"
