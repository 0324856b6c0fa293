"""Tests the package without a usable extension.

The package must inspect and convert checkpoints. Every operator must raise the same error.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.support.programs import run_python
from torch_marlin_metal import convert, extension, interface
from torch_marlin_metal.checkpoints import words

ROOT = Path(__file__).parents[2]
LAYERS = ROOT / "tests/data/layers"
# Together, these checkpoints call each function of checkpoints/words.py in each way in which the readers call it.
CHECKPOINTS = (
    "gptq/gptqmodel-asym-g64-v1",
    "gptq/gptqmodel-sym-g32-actorder-v1",
    "awq/autoawq-gemm-asym-g32",
    "awq/autoawq-gemv-asym-g64",
    "compressed-tensors/int4-asym-g64",
)
IMPORT = """
import json, sys, warnings
# Removes the finder of an editable installation, which would find the extension in the repository.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always", RuntimeWarning)
    import torch
    {before}
    import torch_marlin_metal as tmm
found = {{"warnings": [str(w.message) for w in warned if "torch_marlin_metal" in str(w.message)], "errors": {{}}}}

def error_of(name, call):
    try:
        found["errors"][name] = f"no error: {{call()}}"
    except Exception as error:
        found["errors"][name] = f"{{type(error).__name__}}: {{error}}"

from torch_marlin_metal import interface
weight = tmm.quantize_weight(torch.ones(64, 128), "uint4b8", 64)
a = torch.ones(2, 128)
for name in interface.OPERATORS:
    error_of(name, getattr(torch.ops.torch_marlin_metal, name))
    error_of(f"{{name}}.default", getattr(torch.ops.torch_marlin_metal, name).default)
for name in interface.FUNCTIONS:
    if name != "torch_version":
        error_of(f"_C.{{name}}", getattr(tmm.extension.native, name))
error_of("layer", lambda: tmm.MarlinLinear.from_packed(weight)(a))
error_of("function", lambda: tmm.gemm(a, weight))
error_of("weight", weight.dequantize)
error_of("quantize_model", lambda: tmm.quantize_model(torch.nn.Sequential(torch.nn.Linear(128, 64)), "uint4b8", 64))
error_of("fuse_layers", lambda: tmm.fuse_layers(torch.nn.Linear(2, 2)))
error_of("plan", lambda: tmm.profiling.plan(8, 64, 64, gpu="M1"))
error_of("cpu_capability", tmm.cpu_capability)
{after}
print(json.dumps(found))
"""
# Without its own extension, a source tree looks for the extension of an installed package, by the suffixes in this list.
# An empty list hides the installed one. Python's importers have their own copy of the list, so other imports still work.
HIDE_INSTALLED = "import importlib.machinery; importlib.machinery.EXTENSION_SUFFIXES.clear()"
COMMANDS = """
from typer.testing import CliRunner
from torch_marlin_metal.cli.app import app
found["commands"] = []
for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, arguments)
    found["commands"].append([done.exit_code, done.stdout, done.stderr])
"""


def run(folder: Path, before: str = "", after: str = "", *arguments: str) -> dict:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    code = IMPORT.format(before=before, after=after)
    done = run_python("-c", code, *arguments, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_an_extension(tmp_path: Path) -> None:
    package = Path(extension.__file__).parent
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    commands = [["--help"], ["doctor", "--json"]]
    commands += [["inspect", str(LAYERS / name)] for name in CHECKPOINTS]
    commands += [["convert", str(LAYERS / name), str(tmp_path / "without" / name)] for name in CHECKPOINTS]
    commands += [
        ["plan", "8", "64", "64", "--gpu", "M1"],
        ["verify", str(LAYERS / CHECKPOINTS[0]), str(tmp_path / "without" / CHECKPOINTS[0])],
    ]
    for name in CHECKPOINTS:
        (tmp_path / "without" / name).parent.mkdir(parents=True, exist_ok=True)
    found = run(tmp_path, HIDE_INSTALLED, COMMANDS, json.dumps(commands))

    (warning,) = found["warnings"]
    reason = f"no compiled extension for Python {sys.version.split()[0]} is installed. Build it: "
    reason += f"{extension.BUILD_COMMAND}."
    assert warning == f"torch_marlin_metal: {reason} {extension.WHAT_WORKS}"
    assert len(found["errors"]) == 2 * len(interface.OPERATORS) + len(interface.FUNCTIONS) - 1 + 7
    for name, message in found["errors"].items():
        assert message.startswith("ExtensionError: ") and message.endswith(f": {reason}"), (name, message)
    assert found["errors"]["gemm"] == f"ExtensionError: torch.ops.torch_marlin_metal.gemm: {reason}"
    assert found["errors"]["layer"] == found["errors"]["gemm"]

    (help_page, doctor, *others, plan, verify) = found["commands"]
    assert help_page[0] == 0 and help_page[2] == ""
    assert doctor[0] == 1 and json.loads(doctor[1])["machine"]["extension"] == reason
    for (code, _, stderr), arguments in zip(others, commands[2:], strict=False):
        assert (code, stderr) == (0, f"warning: {warning}\n"), arguments
    assert plan[0] == 3 and plan[2].splitlines()[1].startswith("error: torch_marlin_metal._C.")
    assert verify[0] == 3 and verify[2].splitlines()[1].startswith("error: torch.ops.torch_marlin_metal.dequantize: ")

    for name in CHECKPOINTS:
        (tmp_path / "with" / name).parent.mkdir(parents=True, exist_ok=True)
        written = convert.write_checkpoint(convert.open_reader(LAYERS / name), tmp_path / "with" / name)
        files = list(written.glob("*.safetensors"))
        assert files
        for file in files:
            assert file.read_bytes() == (tmp_path / "without" / name / file.name).read_bytes(), name


def test_an_extension_for_another_torch_is_not_used(tmp_path: Path) -> None:
    """The extension loads and registers its operators, but calling them must raise an error."""
    found = run(ROOT, "import torch.torch_version; torch.__version__ = torch.torch_version.TorchVersion('2.99.0')")
    (warning,) = found["warnings"]
    built_for = extension.native.torch_version
    reason = f"the extension was built for torch {built_for}, but this is torch 2.99.0. "
    assert warning.startswith(f"torch_marlin_metal: {reason}") and f"pip install torch=={built_for}" in warning
    for name, message in found["errors"].items():
        assert message.startswith("ExtensionError: ") and reason in message, (name, message)


@pytest.mark.parametrize("rule", ["word", "masked", "unmasked"])
def test_repacking_without_the_extension_gives_the_operators_results(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(-(2**31), 2**31, (16, 24), dtype=torch.int32, generator=generator)
    packed[0, :4] = torch.tensor([-1, 0, 0x0FFFFFFF, -(2**31)])  # zero points of 15 carry into the next nibble
    perm = torch.randperm(8 * 16, generator=generator).int()
    calls = {
        "permuted": lambda: words.permuted(packed, perm),
        "gptq_zeros, version 1": lambda: words.gptq_zeros(packed, 1, rule),
        "gptq_zeros, version 2": lambda: words.gptq_zeros(packed, 2),
        "awq_words": lambda: words.awq_words(packed),
        "awq_zeros": lambda: words.awq_zeros(packed),
        "transposed": lambda: words.transposed(packed),
    }
    wanted = {name: call() for name, call in calls.items()}
    monkeypatch.setattr(extension, "refusal", "hidden by this test")
    for name, call in calls.items():
        found = call()
        assert found.dtype == wanted[name].dtype and found.is_contiguous() and torch.equal(found, wanted[name]), name
