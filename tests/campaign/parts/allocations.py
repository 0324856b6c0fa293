"""Makes each allocation of a call fail in turn.

The call must raise or give the right result, and so must the next call.
"""

import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torch_marlin_metal as tmm
from tests.support import checkpoint_writers as writers
from tests.support import reference
from tests.support.experts import make_experts
from torch_marlin_metal import convert

OPS = torch.ops.torch_marlin_metal

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).parents[1] / "failing_allocations.c"
MOST = 400


@cache
def shim() -> Path:
    """Compiles the library that makes allocations fail, once for each version of its source. Returns the path."""
    built = Path(tempfile.gettempdir()) / f"failing_allocations_{os.getuid()}_{SOURCE.stat().st_mtime_ns}.so"
    if not built.exists():
        new = built.with_suffix(f".{os.getpid()}")
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-fexceptions", str(SOURCE), "-o", str(new), "-ldl"], check=True
        )
        new.rename(built)
    return built


def product(rng: random.Random, work: Path) -> Callable[[], Any]:
    del work
    name = rng.choice(reference.ANY_FORMAT)
    weight = reference.make_weight(name, 512, rng.choice((40, 256)), 64, seed=rng.randrange(99))
    a = reference.random(rng.choice((1, 3, 40)), 512, dtype=rng.choice(reference.DTYPES))
    if rng.random() < 0.3:
        return lambda: OPS.dequantize(weight.b_packed, weight.scales, **weight.arguments)
    return lambda: OPS.gemm(a, weight.b_packed, weight.scales, **weight.arguments)


def experts(rng: random.Random, work: Path) -> Callable[[], Any]:
    del work
    name = rng.choice(reference.ANY_FORMAT)
    options = {"global_scale_shape": (-1,)} if name == "nvfp4" else {}
    stack = make_experts(name, 4, 256, rng.choice((40, 256)), 64, use_perm=rng.random() < 0.3, **options)
    ids = torch.tensor([[rng.randrange(-1, 4), rng.randrange(4)] for _ in range(rng.choice((1, 3, 40)))])
    a = reference.random(len(ids), 256, dtype=rng.choice(reference.DTYPES))
    factors = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) if rng.random() < 0.5 else None
    return lambda: OPS.moe_gemm(
        a, stack.b_packed, stack.scales, ids, **stack.arguments, row_weights=factors, reduce=factors is not None
    )


def quantization(rng: random.Random, work: Path) -> Callable[[], Any]:
    del work
    w = reference.random(64, 128)
    name, method = rng.choice(reference.ANY_FORMAT), rng.choice(("rtn", "mse"))
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


def attack(call: Callable[[], Any], of_extension: bool, most: int = MOST) -> tuple[int, bool]:
    """Makes the first allocation of a call fail, then the second, and so on, until all allocations have failed once.

    Args:
        call: returns a tensor.
        of_extension: which allocations fail: if True, those of C++ objects of the extension; if False, those of large
            blocks in the process.
        most: the maximum number of failures.

    Returns:
        The number of allocations that failed, and whether these were all.
    """
    library = ctypes.CDLL(str(shim()))
    expected = call()
    for number in range(most):
        library.fail_allocation(number, int(of_extension))
        try:
            result = call()
        except (MemoryError, RuntimeError, ValueError, OSError):
            assert library.allocation_failed(), "the call raised an error although no allocation had failed"
        else:
            failed = library.allocation_failed()
            assert torch.equal(result, expected), f"the call gave a wrong result while allocation {number} failed"
            if not failed:
                return number, True
        assert torch.equal(call(), expected), f"the next call gave a wrong result after allocation {number} had failed"
    return most, False


def run(calls: Sequence[tuple[str, int, bool]], work: Path, most: int = MOST) -> list[tuple[int, bool]]:
    """Attacks calls one after another in a process that has loaded the failing allocator.

    Args:
        calls: for each call, the name of the function of this module that makes it, the function's seed, and
            `of_extension`.
        work: an empty folder.
        most: see `attack`.

    Returns:
        The result of `attack` for each call.
    """
    code = (
        "import json, random, sys, torch; from pathlib import Path; from tests.campaign.parts import allocations as a\n"
        "torch.set_num_threads(1)\n"
        f"for number, (kind, seed, of_extension) in enumerate({list(calls)!r}):\n"
        "    work = Path(sys.argv[1], str(number)); work.mkdir()\n"
        "    made = getattr(a, kind)(random.Random(seed), work)\n"
        f"    print(json.dumps(a.attack(made, of_extension, {most})), flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(work)], check=False, capture_output=True, text=True,
        cwd=ROOT, env={**os.environ, "LD_PRELOAD": str(shim())},
    )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{calls[len(results)]}: {done.returncode}: {done.stderr[-1500:]}"
    return [(count, all_of_them) for count, all_of_them in results]


def case(rng: random.Random, work: Path) -> Counter[str]:
    kind = rng.choice((product, experts, quantization, loading, conversion)).__name__
    ((count, all_of_them),) = run([(kind, rng.randrange(1 << 30), rng.random() < 0.3)], work)
    return Counter({f"{kind}, {'all' if all_of_them else 'the first'} allocations": count, f"{kind} calls": 1})
