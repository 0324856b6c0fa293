"""Tests that checked mode reports each fault of the table at its place, and reports nothing for the corrected
kernels.
"""

from __future__ import annotations

import re

import access_faults
import numpy as np
import order_faults
import pytest
import register_faults
from fault_case import FIRST_LINE, HEAD, Case

from softmetal import device
from softmetal.device import Buffer, FaultKind, KernelFault

CASES = [*access_faults.CASES, *order_faults.CASES, *register_faults.CASES]


def run(case: Case, good: bool, seed: int) -> list[device.Fault]:
    library = device.compile(case.text(good), checked=True, file_name="fault.metal")
    made = [Buffer.empty(64, np.float32) if isinstance(b, str) else b for b in case.buffers]
    fresh = [b.copy() if isinstance(b, np.ndarray) else b for b in made]
    kernel = library.kernel("f")
    kernel.launch(**case.launch, buffers=fresh, seed=seed, raise_faults=False)
    return kernel.last_faults


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_fault_is_reported(case: Case) -> None:
    for seed in range(case.seeds):
        faults = run(case, False, seed)
        matching = [f for f in faults if f.kind == case.kind and re.search(case.report, f.message)]
        assert matching, f"seed {seed}: {[(f.kind.name, f.message) for f in faults]}"
        places = re.findall(r"fault\.metal:(\d+)", " ".join(f.message for f in matching))
        assert FIRST_LINE + case.line in {f.line for f in matching} | set(map(int, places))
        assert all("kernel 'f'" in f.message and f"seed {seed}" in f.message for f in matching)
        assert all(re.search(r"thread \(\d+,\d+,\d+\), simdgroup \d+, threadgroup \(\d+,", f.message) for f in matching)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_correct_twin_is_silent(case: Case) -> None:
    for seed in range(5):
        assert [f.message for f in run(case, True, seed)] == []


def test_every_class_of_fault_has_a_case() -> None:
    assert {c.kind for c in CASES} == set(FaultKind) - {
        FaultKind.RESOURCE,
        FaultKind.SIGNAL,
        FaultKind.ENDLESS,
    }  # test_ends.py


def test_an_atomic_store_reads_nothing() -> None:
    source = """
    kernel void f(device atomic_uint* total, device atomic_uint* fresh, uint i [[thread_index_in_threadgroup]]) {
      threadgroup atomic_uint n;
      if (i == 0) atomic_store_explicit(&n, 3u, memory_order_relaxed);
      if (i == 0) atomic_store_explicit(fresh, 5u, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (i == 1) atomic_store_explicit(total, atomic_load_explicit(&n, memory_order_relaxed), memory_order_relaxed);
      if (i == 0) atomic_fetch_add_explicit(&n, 1u, memory_order_relaxed);
    }"""
    library = device.compile(HEAD + source, checked=True)
    total, fresh = np.zeros(1, np.uint32), Buffer.empty(1, np.uint32)
    library.kernel("f").launch(groups=1, group=64, buffers=[total, fresh], seed=1)
    assert (total[0], fresh.array[0]) in {(3, 5), (4, 5)}
    for update in ("fetch_add_explicit", "exchange_explicit"):
        unset = f"""kernel void f(device uint* y) {{
          threadgroup atomic_uint n;
          y[0] = atomic_{update}(&n, 1u, memory_order_relaxed);
        }}"""
        with pytest.raises(KernelFault, match="read of threadgroup memory never written"):
            device.compile(HEAD + unset, checked=True).kernel("f").launch(groups=1, group=1, buffers=[total])
