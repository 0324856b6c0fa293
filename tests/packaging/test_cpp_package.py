"""Tests the package for C++ programs.

A program without Python runs an exported model and an operator. The results must equal Python's.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME

from build_support import cpp_library
from tests.support.programs import run_python

needs_cmake = sys.platform != "linux" or shutil.which("cmake") is None
has_toolkit = CUDA_HOME is not None and Path(CUDA_HOME, "include", "cuda_runtime.h").exists()
needs_cuda = torch.version.cuda is not None and not has_toolkit
pytestmark = [
    pytest.mark.skipif(needs_cmake, reason="builds a Linux program with CMake"),
    pytest.mark.skipif(needs_cuda, reason="the CMake package of a torch with CUDA needs the CUDA toolkit"),
]
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "cpp"
LIBRARY = ROOT / cpp_library.FOLDER / "lib" / cpp_library.library_name(sys.platform)


def run(*command: str | Path, **options: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "SOFTMETAL"} | options
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def export_model(argument: str | Path) -> str:
    done = run_python(EXAMPLE / "export_model.py", argument, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cpp")
    run("cmake", "-S", EXAMPLE, "-B", folder, f"-DCMAKE_PREFIX_PATH={export_model('--prefix-path')}")
    run("cmake", "--build", folder)
    return folder / "run_model"


def values(text: str, name: str) -> torch.Tensor:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
    return torch.tensor([float(word) for word in line.split()[1:]])


def test_a_program_runs_a_model_and_an_operator(program: Path, tmp_path: Path) -> None:
    package = tmp_path / "model.pt2"
    expected = export_model(package)
    printed = run(program, package)
    assert values(expected, "model").abs().max() > 0.01
    torch.testing.assert_close(values(printed, "model"), values(expected, "model"), rtol=1e-5, atol=1e-5)
    rows = torch.linspace(-1, 1, 3 * 256, dtype=torch.float64).view(3, 256).sum(1, keepdim=True) * 0.5
    torch.testing.assert_close(values(printed, "gemm"), rows.expand(3, 4).flatten().float(), rtol=1e-5, atol=1e-5)


def test_a_wrong_argument_prints_an_error(program: Path, tmp_path: Path) -> None:
    done = subprocess.run([program, tmp_path / "missing.pt2"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip()


def test_the_library_needs_no_python() -> None:
    needed = run("readelf", "--dynamic", LIBRARY)
    assert "libtorch_cpu.so" in needed and "python" not in needed
    undefined = run("nm", "--dynamic", "--undefined-only", LIBRARY).split()
    assert [name for name in undefined if name.startswith(("Py", "_Py"))] == []


def test_another_torch_is_refused(tmp_path: Path) -> None:
    cpp = tmp_path / "cpp"
    cpp.mkdir()
    for path in (ROOT / cpp_library.FOLDER).glob("*Config.cmake"):
        (cpp / path.name).write_text(path.read_text())
    cpp_library.write_built_for(cpp, "2.99.0")
    prefixes = f"{cpp};{torch.utils.cmake_prefix_path}"
    configure = ["cmake", "-S", str(EXAMPLE), "-B", str(tmp_path / "build"), f"-DCMAKE_PREFIX_PATH={prefixes}"]
    done = subprocess.run(configure, capture_output=True, text=True)
    version = torch.__version__.split("+")[0]
    assert done.returncode != 0
    assert f"the library was built for torch 2.99.0, but CMake found torch {version}" in " ".join(done.stderr.split())


def test_commands_of_the_linker() -> None:
    """On a Mac, the library must be a dylib that finds PyTorch in the folder beside the package."""
    out = Path("lib", cpp_library.library_name("darwin"))
    command = cpp_library.link_command("darwin", ["clang++"], ["one.o"], Path("/torch/lib"), out)
    assert {"-dynamiclib", "one.o", "-framework", "Metal", "@rpath/libtorch_marlin_metal.dylib"} <= set(command)
    assert "-Wl,-rpath,@loader_path/../../../torch/lib" in command
    assert cpp_library.is_python_module("csrc/python/module.cpp")
    assert not cpp_library.is_python_module("csrc/weights/schemas.cpp")
