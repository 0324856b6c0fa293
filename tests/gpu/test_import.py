"""`import torch_marlin_metal` neither reads the user's files nor imports the tuner."""

import os
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.support.programs import run_python

ROOT = Path(__file__).parents[2]
PRODUCT = "1, 64, 128, group_size=32"


def run(code: str, mps: bool = True, **environment: str) -> CompletedProcess[str]:
    return run_python("-c", code, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, mps=mps)


def test_import_opens_no_file_of_the_user_and_imports_no_tuner(tmp_path) -> None:
    home = tmp_path / "home"
    table = home / ".cache" / "torch_marlin_metal" / "tuned.json"
    table.parent.mkdir(parents=True)
    table.write_text("damaged")
    code = """
import os, sys, torch
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import torch_marlin_metal as tmm
print([path for path in opened if path.startswith(os.environ["HOME"])])
print([name for name in sys.modules if name.startswith(("torch_marlin_metal.gpu.tuning", "torch_marlin_metal.tuning"))])
assert len(opened) > 10
tmm.tuning.load
print(tmm.profiling.tile_table.__name__, "tuning" in dir(tmm))
"""
    done = run(code, mps=False, HOME=str(home), XDG_CACHE_HOME=str(home / ".cache"), TORCH_MARLIN_METAL_TUNED="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "[]", "tile_table True"]
    assert "UserWarning" not in done.stderr


@pytest.mark.skipif(sys.platform == "darwin", reason="loads the software Metal device in a process of its own")
@pytest.mark.usefixtures("mps")
@pytest.mark.parametrize("damage", ["{", '{"version": 2, "tables": []}', "a directory"])
def test_a_table_that_cannot_be_read_is_a_warning_of_the_first_choice(tmp_path, damage) -> None:
    table = tmp_path / "tuned.json"
    if damage == "a directory":
        table.mkdir()
    else:
        table.write_text(damage)
    code = f"""
import warnings, torch, torch_marlin_metal as tmm
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    tmm.profiling.plan({PRODUCT}, gpu="M1")
    print(len(found))
    tmm.profiling.plan({PRODUCT})
    tmm.profiling.plan({PRODUCT})
    print([str(w.message).split(":")[1].strip() for w in found if "tuned" in str(w.message)])
"""
    done = run(code, TORCH_MARLIN_METAL_TUNED=str(table))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0", "['tuned choices are not used']"]


@pytest.mark.skipif(sys.platform == "darwin", reason="loads the software Metal device in a process of its own")
@pytest.mark.usefixtures("mps")
@pytest.mark.parametrize("reason", ["Permission denied", "File name too long"])
def test_a_cache_folder_that_cannot_be_searched_is_a_warning(tmp_path, reason) -> None:
    (tmp_path / ".cache").mkdir(mode=0)
    code = f"""
import os, warnings, torch, torch_marlin_metal as tmm, torch_marlin_metal.tuning
torch.ones(1, device="mps")
if os.getuid() == 0:  # whom no permission stops
    os.setuid(65534)
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    chosen = tmm.profiling.plan({PRODUCT}).chosen.variant
print(chosen == tmm.profiling.plan({PRODUCT}, tuned=False).chosen.variant, [str(w.message) for w in found if "tuned choices are not used" in str(w.message)])
"""
    named = {} if reason == "Permission denied" else {"TORCH_MARLIN_METAL_TUNED": "/" + "x" * 5000}
    # With an empty XDG_CACHE_HOME, a compiler behind ccache would make a folder here.
    unset = {"XDG_CACHE_HOME": "", "TORCH_MARLIN_METAL_TUNED": "", "CCACHE_DISABLE": "1"}
    done = run(code, HOME=str(tmp_path), **unset | named)
    assert done.returncode == 0, done.stderr
    assert reason in done.stdout
    assert done.stdout.startswith("True")


@pytest.mark.skipif(sys.platform == "darwin", reason="loads the software Metal device in a process of its own")
@pytest.mark.usefixtures("mps")
def test_threads_that_multiply_first_all_use_the_saved_table(tmp_path) -> None:
    code = """
import softmetal, threading, torch, torch_marlin_metal as tmm
product = tmm.tuning.Product(64, 128, "uint4b8", 32)
from torch_marlin_metal.gpu.tuning.table import Machine, TunedRange
entry = TunedRange(product, 1, 4, "single_stage", 1e-6, "gemv", 1.5)
tmm.tuning.save(tmm.tuning.TuningTable(Machine.current(), (entry,)))
weight = product.make_weight("mps")
a = torch.ones(1, 128, dtype=torch.float16, device="mps")
def multiply():
    tmm.gemm(a, weight)
threads = [threading.Thread(target=multiply) for _ in range(4)]
softmetal.faults()
[t.start() for t in threads]; [t.join() for t in threads]
torch.mps.synchronize()
kernels = [record.kernel for record in softmetal.counters() if record.kernel.startswith("gem")]
print(len(kernels), all(kernel.startswith("gemm_single_stage") for kernel in kernels))
"""
    done = run(code, TORCH_MARLIN_METAL_TUNED=str(tmp_path / "tuned.json"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "4 True"
