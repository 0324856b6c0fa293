"""Tests the first minute in a checkout: install it as the README says, then use it in the same folder.

A new virtual environment sees the packages of the current one, except this project's. pip installs a copy of the
checkout, or its source distribution. The compiled files come from this checkout, because compiling takes minutes. With
--everything, pip compiles them, and all checks of `doctor --deep` run.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.pages import readme_program

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("build_support", "csrc", "kernels", "torch_marlin_metal", "setup.py", "pyproject.toml", "MANIFEST.in")
PARTS += ("LICENSE", "README.md", "conftest.py", "tests/support", "tests/layers/test_fuse.py")
COMPILED = ("*.so", "*.dylib", "lib", "built_for.cmake")
# Runs the command line with only one of doctor's checks.
SHORT_DOCTOR = """
from torch_marlin_metal.cli import doctor_steps
from torch_marlin_metal.cli.main import main
doctor_steps.QUICK = {}
doctor_steps.STEPS = {"first product": doctor_steps.STEPS["first product"]}
main()
"""


def run(*command: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder, without the environment variables PYTHON* and TORCH_MARLIN_METAL_*."""
    ours = ("PYTHON", "TORCH_MARLIN_METAL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    kept["OMP_WAIT_POLICY"] = "passive"
    return subprocess.run(
        list(map(str, command)), cwd=folder, env={**kept, **environment}, capture_output=True, text=True, check=False
    )


def passed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the checkout in which nothing is compiled."""
    copy = tmp_path_factory.mktemp("first") / "checkout"
    copy.mkdir()
    left = shutil.ignore_patterns("__pycache__", *COMPILED)
    for part in PARTS:
        (copy / part).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, ignore=left)
        else:
            shutil.copy(ROOT / part, copy / part)
    return copy


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "environment" in metafunc.fixturenames:
        both = metafunc.config.getoption("--everything")
        installed = ["checkout", "source distribution"] if both else ["checkout"]
        metafunc.parametrize("environment", installed, indirect=True, scope="module")


@pytest.fixture(scope="module")
def environment(request: pytest.FixtureRequest, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of commands of a new environment in which the package is installed."""
    folder = tmp_path_factory.mktemp("environment")
    passed(run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder))
    paths = {"base": str(folder), "platbase": str(folder)}
    scripts = Path(sysconfig.get_path("scripts", "venv", paths))
    site_packages = Path(sysconfig.get_path("purelib", "venv", paths))
    # The first line adds the folder of the other packages to Python's path. Python ignores the .pth files in that
    # folder, so the editable installation stays hidden. The second line turns off the garbage collector, which would
    # take a third of the time of each import.
    (site_packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\nimport gc; gc.disable()\n")
    what = checkout
    if request.param == "source distribution":
        passed(run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", folder, folder=checkout))
        (what,) = folder.glob("*.tar.gz")
    compiles = request.config.getoption("--everything")
    install = (scripts / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", what)
    passed(run(*install, folder=folder, **({} if compiles else {"WITHOUT_EXTENSION": "1"})))
    package = site_packages / "torch_marlin_metal"
    assert package.is_dir()
    if not compiles:
        for file in ROOT.glob("torch_marlin_metal/_C*"):
            shutil.copy(file, package)
    assert list(package.glob("_C*"))
    return scripts


@pytest.mark.skipif(sys.platform == "darwin", reason="runs on the software Metal device")
@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.whole)])
def test_deep_checks_pass_on_the_software_device(
    environment: Path, checkout: Path, inside: bool, mps: str, everything: bool, tmp_path: Path
) -> None:
    (tmp_path / "softmetal").symlink_to(ROOT / "softmetal" / "src" / "softmetal")
    script = environment / "torch-marlin-metal"
    if not everything:
        script = tmp_path / "short.py"
        script.write_text(SHORT_DOCTOR)
    command = (environment / "python", "-m", "softmetal", script, "doctor", "--deep")
    lines = passed(run(*command, folder=checkout if inside else tmp_path, PYTHONPATH=str(tmp_path))).splitlines()
    (first,) = (number for number, line in enumerate(lines) if line.startswith("first product  "))
    found = [line.split() for line in lines[first : first + 3]]
    assert found[0][:4] == ["first", "product", "passed:", "first_ms"]
    assert found[1:] == [["under", "API", "validation", "passed"], ["under", "shader", "validation", "passed"]]


def test_the_readme_works_in_the_checkout(environment: Path, checkout: Path, tmp_path: Path) -> None:
    """The lines come from standard input, as if they were typed."""
    program = tmp_path / "typed.py"
    program.write_text(readme_program(tmp_path / "model").replace('"mps"', '"cpu"'))
    done = run("sh", "-c", f"{environment / 'python'} - < {program}", folder=checkout)
    assert "torch_marlin_metal: " not in done.stderr
    assert "2 layers converted, 0 left" in passed(done)


def test_pytest_works_in_the_checkout(environment: Path, checkout: Path) -> None:
    test = "tests/layers/test_fuse.py::test_one_call_and_nothing_kept"
    command = (environment / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", test)
    assert "1 passed" in passed(run(*command, folder=checkout))


def test_a_checkout_that_differs_is_refused_but_not_by_doctor(environment: Path, checkout: Path) -> None:
    show = "import torch_marlin_metal as t; print(t.extension.refusal); t.cpu_capability()"
    file = checkout / "torch_marlin_metal" / "layers" / "fuse.py"
    text = file.read_text()
    try:
        file.write_text(text + "# edited\n")
        done = run(environment / "python", "-c", show, folder=checkout)
        doctor = run(environment / "torch-marlin-metal", "doctor", folder=checkout)
    finally:
        file.write_text(text)
    site_packages = environment.parent / "lib"
    assert done.returncode == 1
    assert done.stdout.startswith(
        f"{checkout / 'torch_marlin_metal'} has no compiled extension, and the package that is"
    )
    assert f"installed in {site_packages}" in done.stdout and "has another layers/fuse.py." in done.stdout
    assert f"`pip install {checkout}`" in done.stdout
    assert done.stderr.splitlines()[-1].endswith(f": {done.stdout.strip()}")
    # The command and its checks are the installed ones.
    found = dict(line.split("  ", 1) for line in passed(doctor).splitlines())
    assert found["extension"].strip() == "loaded"
    assert found["products on cpu"].strip().startswith("passed: error of ")
