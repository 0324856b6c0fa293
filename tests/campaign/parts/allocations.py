"""Each allocation of a call fails in turn. The call raises or gives the right result, and the next call is right."""

import ctypes
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torch_marlin_metal as tmm
from tests.support import checkpoint_writers as writers
from tests.support import reference
from torch_marlin_metal import convert

SOURCE = Path(__file__).parents[1] / "failing_allocations.c"
MOST = 400


@cache
def shim() -> Path:
    """Compiles the library that makes allocations fail, once for each state of the source. Returns the path."""
    built = Path(tempfile.gettempdir()) / f"failing_allocations_{os.getuid()}_{SOURCE.stat().st_mtime_ns}.so"
    if not built.exists():
        new = built.with_suffix(f".{os.getpid()}")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(new), "-ldl"], check=True)
        new.rename(built)
    return built


def product(rng: random.Random, work: Path) -> Callable[[], Any]:
    del work
    name = rng.choice(reference.FORMATS)
    group = tmm.WEIGHT_FORMATS[name].fixed_group_size or 64
    weight = reference.make_weight(name, 512, rng.choice((40, 256)), group, seed=rng.randrange(99))
    a = torch.randn(rng.choice((1, 3, 40)), 512, generator=torch.Generator().manual_seed(1)).to(
        rng.choice(reference.DTYPES)
    )
    if rng.random() < 0.3:
        return lambda: tmm.dequantize(weight.b_packed, weight.scales, **weight.arguments)
    return lambda: tmm.gemm(a, weight.b_packed, weight.scales, **weight.arguments)


def quantization(rng: random.Random, work: Path) -> Callable[[], Any]:
    del work
    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    name, method = rng.choice(reference.FORMATS), rng.choice(("rtn", "mse"))
    return lambda: tmm.quantize_weight(w, name, None, method).dequantize()


def loading(rng: random.Random, work: Path) -> Callable[[], Any]:
    writers.write_gptq(work / "source", np.random.default_rng(1), 256, 64, 32, version=2, act_order=rng.random() < 0.5)
    if rng.random() < 0.5:
        return lambda: next(convert.read_layers(work / "source")).dequantize()

    def load() -> torch.Tensor:
        model = torch.nn.Module()
        holder = model
        *parts, last = writers.LAYER.split(".")
        for part in parts:
            child = torch.nn.Module()
            holder.add_module(part, child)
            holder = child
        holder.add_module(last, torch.nn.Linear(256, 64, bias=False))
        tmm.load_quantized(model, work / "source")
        return model.get_submodule(writers.LAYER)(torch.ones(1, 256))

    return load


def conversion(rng: random.Random, work: Path) -> Callable[[], Any]:
    del rng
    writers.write_gptq(work / "source", np.random.default_rng(1), 256, 64, 32, version=2)
    count = iter(range(10**6))

    def run() -> torch.Tensor:
        out = work / f"out{next(count)}"
        convert.write_checkpoint(convert.open_reader(work / "source"), out)
        return next(convert.read_layers(out)).b_packed

    return run


def attack(call: Callable[[], Any]) -> str:
    """Makes the first allocation fail, then the second, and so on, until the call has no further allocation to fail."""
    library = ctypes.CDLL(str(shim()))
    expected = call()
    number = 0
    for number in range(MOST):
        library.fail_allocation(number)
        try:
            result = call()
        except (MemoryError, RuntimeError, ValueError, OSError):
            assert library.allocation_failed(), "an error without a failed allocation"
        else:
            failed = library.allocation_failed()
            assert torch.equal(result, expected), f"allocation {number}: another result"
            if not failed:
                break
        assert torch.equal(call(), expected), f"after allocation {number} failed"
    return "all" if number < MOST - 1 else "the first"


def case(rng: random.Random, work: Path) -> str:
    """Runs this part in a process that has loaded the failing allocator."""
    kind = rng.choice((product, quantization, loading, conversion))
    seed = rng.randrange(1 << 30)
    code = (
        "import random, sys, torch; from pathlib import Path; from tests.campaign.parts import allocations as a; "
        f"torch.set_num_threads(1); "
        f"print(a.attack(a.{kind.__name__}(random.Random({seed}), Path(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(work)], check=False, capture_output=True, text=True,
        env={**os.environ, "LD_PRELOAD": str(shim())},
    )  # fmt: skip
    assert done.returncode == 0, f"{kind.__name__} {seed}: {done.returncode}: {done.stderr[-1500:]}"
    return f"{done.stdout.split()[-1]} of {kind.__name__}"
