"""Tests the requirements, errors and side effects of `softmetal.install()`. Each test calls it in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_environment_sets_mode_and_seed() -> None:
    code = """
import softmetal, torch
softmetal.install()
assert softmetal.is_checked()
library = torch.mps.compile_shader("kernel void f(device float* y, uint i [[thread_position_in_grid]]) { y[i] = 1; }")
library.f(torch.zeros(4, device="mps"))
print(softmetal.counters()[-1].seed)
"""
    done = run_python(code, SOFTMETAL_CHECKED="1", SOFTMETAL_SEED="99")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "99\n"


def test_the_import_builds_nothing_and_changes_nothing() -> None:
    """The names exist only after `softmetal.install()`. A second call does not change them."""
    code = """
import sys, torch
native, finders = set(vars(torch._C)), list(sys.meta_path)
import softmetal, softmetal.apple.wheels, softmetal.device, softmetal.extension
assert set(vars(torch._C)) == native and sys.meta_path == finders
assert "softmetal_executor" not in open("/proc/self/maps").read()
try:
    softmetal.faults()
except RuntimeError as error:
    print(error)
softmetal.install()
finders = list(sys.meta_path)
softmetal.install()
assert sys.meta_path == finders and torch.backends.mps.is_available()
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout == "softmetal: there is no device yet: call softmetal.install() before anything uses torch's mps\n"
    )


def test_asking_torch_about_mps_before_the_installation_is_an_error() -> None:
    done = run_python("import torch; torch.backends.mps.is_available(); import softmetal; softmetal.install()")
    assert "call softmetal.install() first" in done.stderr


def test_a_second_copy_is_refused() -> None:
    code = """
import softmetal, importlib.util, os, sys
softmetal.install()
root = os.path.dirname(softmetal.__file__)
spec = importlib.util.spec_from_file_location("copy", root + "/__init__.py", submodule_search_locations=[root])
sys.modules["copy"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.install()
"""
    assert "RuntimeError: softmetal: another copy of the device is loaded already" in run_python(code).stderr


def test_dispatches_do_not_use_up_memory() -> None:
    """Dispatches must not use up mps memory. When the quarantine is full, the process's memory must not grow."""
    code = """
import resource, softmetal, torch
softmetal.install()
library = torch.mps.compile_shader("kernel void f(device float* y, uint i [[thread_position_in_grid]]) { y[i] = 1; }")
def work(n):
    for _ in range(n):
        library.f(torch.empty(4, device="mps"), threads=1)
        torch.mps.synchronize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = torch.mps.current_allocated_memory()
first = work(6000)
second = work(6000)
assert torch.mps.current_allocated_memory() == before, torch.mps.current_allocated_memory()
print(second - first)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1024  # in KiB: 175 bytes for each of the 6000 dispatches


def test_a_mac_is_refused() -> None:
    code = "import sys, sysconfig, torch; sysconfig.get_config_vars(); sys.platform = 'darwin'; import softmetal; softmetal.install()"
    done = run_python(code)
    assert "softmetal.build.Unavailable: softmetal: the software Metal device runs on Linux only" in done.stderr


def test_missing_packages_are_named() -> None:
    done = run_python("import torch, os; os.environ['PATH'] = '/nowhere'; import softmetal; softmetal.install()")
    assert done.stderr.strip().endswith(
        "softmetal: clang++-19, addr2line not found; install with: "
        "apt-get install clang-19 libobjc-$(g++ -dumpversion)-dev libblocksruntime-dev binutils"
    )


def test_a_script_and_the_processes_that_it_starts_have_the_device(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import subprocess, sys, torch
asked = "import torch; print(torch.ones(2, device='mps').sum().item())"
exec(asked)
subprocess.run([sys.executable, "-c", asked], cwd="/", check=True)
""")
    command = [sys.executable, "-u", "-m", "softmetal", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "2.0\n2.0\n", done.stderr
    missing = subprocess.run([*command[:-1], "missing.py"], capture_output=True, text=True, check=False)
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1), missing.stderr
    assert missing.stderr.startswith("softmetal: missing.py does not exist; expected: python -m softmetal program.py")
