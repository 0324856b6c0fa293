"""Each fault of the table is reported with its place. The corrected kernels give no report."""

from __future__ import annotations

import re

import access_faults
import numpy as np
import order_faults
import pytest
from fault_case import FIRST_LINE, Case

from softmetal import device
from softmetal.device import Buffer, FaultKind, KernelFault

CASES = [*access_faults.CASES, *order_faults.CASES]


def run(case: Case, good: bool, seed: int) -> list[device.Fault]:
    library = device.compile(case.text(good), checked=True, file_name="fault.metal")
    made = [Buffer.empty(64, np.float32) if isinstance(b, str) else b for b in case.buffers]
    fresh = [b.copy() if isinstance(b, np.ndarray) else b for b in made]
    try:
        library.kernel("f").launch(**case.launch, buffers=fresh, seed=seed)
    except KernelFault as fault:
        return fault.faults
    return []


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_fault_is_reported(case: Case) -> None:
    for seed in range(3):
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
    assert {c.kind for c in CASES} == set(FaultKind) - {FaultKind.RESOURCE}
