"""Tests that the source distribution can be built, and that a wheel names the torch version that it needs."""

import os
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

import torch_marlin_metal
from build_support import backend
from tests.support.programs import run_python

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    done = run_python("setup.py", "--quiet", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder / "unpacked", filter="data")
    (root,) = (folder / "unpacked").iterdir()
    return root


def test_all_sources_find_their_headers(unpacked: Path) -> None:
    sources = sorted(path.relative_to(ROOT) for path in ROOT.glob("csrc/**/*") if path.suffix in (".cpp", ".mm"))
    assert len(sources) > 40
    # -MM lists the included files of this project. -MG accepts that headers of PyTorch and of the system are missing.
    command = ["g++", "-std=c++20", "-MM", "-MG", "-x", "c++", "-I.", *map(str, sources)]
    listed = subprocess.run(command, cwd=unpacked, check=True, capture_output=True, text=True).stdout
    ours = {name for name in re.split(r"[\s\\]+", listed) if name.startswith(("csrc/", "kernels/"))}
    assert len(ours) > len(sources)
    assert [name for name in sorted(ours) if not (unpacked / name).exists()] == []


def test_all_kernels_are_embedded(unpacked: Path) -> None:
    script = "import sys; from build_support.embed_kernels import write_kernel_sources as w; from pathlib import Path"
    for root, target in ((ROOT, "here.cpp"), (unpacked, "there.cpp")):
        write = f"{script}; w(Path('kernels'), Path(sys.argv[1]))"
        done = run_python("-c", write, unpacked / target, cwd=root)
        assert done.returncode == 0, done.stderr
    assert (unpacked / "here.cpp").read_bytes() == (unpacked / "there.cpp").read_bytes()


def test_the_laboratory_and_the_tests_are_not_distributed(unpacked: Path) -> None:
    """The source distribution lacks `lab`, `tests` and `softmetal`, and a wheel installs only the package itself."""
    assert {"csrc", "kernels", "torch_marlin_metal"} <= {path.name for path in unpacked.iterdir()}
    assert not [name for name in ("lab", "tests", "softmetal") if (unpacked / name).exists()]
    (top_level,) = unpacked.parents[1].glob("*.egg-info/top_level.txt")
    assert top_level.read_text().split() == ["torch_marlin_metal"]


def test_metadata(unpacked: Path) -> None:
    """A source distribution must accept every torch that the sources support, a wheel only the torch of its build."""
    assert "Requires-Dist: torch>=2.13\n" in (unpacked / "PKG-INFO").read_text()
    environment = {name: value for name, value in os.environ.items() if name != "WITHOUT_EXTENSION"}
    (unpacked / "info").mkdir()
    done = run_python(
        "setup.py", "--quiet", "dist_info", "--output-dir", unpacked / "info", cwd=unpacked, env=environment
    )
    assert done.returncode == 0, done.stderr
    (metadata,) = unpacked.glob("info/*.dist-info/METADATA")
    major, minor = torch.__version__.split(".")[:2]
    assert f"Requires-Dist: torch=={major}.{minor}.*\n" in metadata.read_text()
    assert f"Version: {torch_marlin_metal.__version__}+torch{major}.{minor}\n" in metadata.read_text()


def test_the_release_tries_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    """Runs the release workflow's step, without its installation, in the folder of the source distribution."""
    wheels = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]["wheels"]
    (script,) = (step["run"] for step in wheels["steps"] if step.get("name") == "The wheel multiplies")
    lines = [line for line in script.splitlines() if not line.startswith("pip install ")]
    assert len(lines) == len(script.splitlines()) - 1
    (archive,) = unpacked.parents[1].glob("*.tar.gz")
    (tmp_path / archive.name).symlink_to(archive)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "DEVICES": "cpu",
        "PYTHONPATH": str(Path(torch_marlin_metal.__path__[0]).parent),
    }
    command = ["bash", "-e", "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"torch \S+, torch_marlin_metal \S+, cpu: largest error \S+\n", done.stdout)


def empty_wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    info = f"{name}-{version}.dist-info"
    head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    files = {
        f"{info}/METADATA": "\n".join([*head, *(f"Requires-Dist: {one}" for one in requires), ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


@pytest.mark.parametrize("release", ["2.13", "2.14"])  # the oldest wheel, and one that is not the newest
def test_pip_takes_the_wheel_for_the_torch(release: str, tmp_path: Path) -> None:
    for other in ("2.13", "2.14", "2.15"):
        built_for = f"{other}.0+cpu"
        requirement = backend.torch_requirement(built_for)
        empty_wheel(tmp_path, "torch", f"{other}.1")
        empty_wheel(tmp_path, "torch_marlin_metal", f"0.1.0{backend.version_label(built_for)}", requirement)
    install = ["install", "--dry-run", "--ignore-installed", "--no-index", "--find-links", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *install]
    done = subprocess.run([*command, f"torch=={release}.*", "torch_marlin_metal"], capture_output=True, text=True)
    assert f"Would install torch-{release}.1 torch_marlin_metal-0.1.0+torch{release}" in done.stdout, done.stderr


@pytest.mark.parametrize("isolated", [False, True])
def test_an_isolated_build_takes_the_installed_torch(isolated: bool, tmp_path: Path) -> None:
    """In pip's isolation, the build uses the user's interpreter but does not see the user's packages."""
    show = "from build_support import backend as b; print(b.get_requires_for_build_wheel()); b._show_torch()"
    show += "; import torch; print(torch.__version__)"
    folders = (
        "import setuptools, sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; " if isolated else ""
    )
    command = [sys.executable, "-c", folders + show]  # not a fork of run_python, which has already imported torch
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == f"[]\n{torch.__version__}\n", done.stderr


@pytest.mark.parametrize(("platform", "wanted"), [("darwin", "2.14.1"), ("linux", "2.13.0")])
def test_without_torch_the_default_of_the_system_is_asked_for(platform: str, wanted: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    hooks = runpy.run_path(str(ROOT / "build_support" / "backend.py"))
    monkeypatch.setitem(hooks["_needs"].__globals__, "site_packages_with_torch", list)
    assert hooks["get_requires_for_build_wheel"]() == [f"torch=={wanted}"]
    assert hooks["get_requires_for_build_editable"]() == [f"torch=={wanted}"]


def test_the_makefile_and_the_pages_name_the_same_torch() -> None:
    names = f"$(if $(filter Darwin,$(shell uname -s)),{backend.TORCH_ON_MACS},{backend.TORCH_ON_LINUX})\n"
    assert f"REQUIRED_TORCH := torch=={names}" in (ROOT / "Makefile").read_text()
    for page in ("README.md", "docs/use/install.md", "docs/use/mac.md"):
        assert f"pip install torch=={backend.TORCH_ON_MACS}" in (ROOT / page).read_text(), page
