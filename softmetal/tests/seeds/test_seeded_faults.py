"""Tests that the device notices seeded faults.

It must refuse each text that Metal's compiler refuses. Each faulty kernel must be reported or change the results.
"""

from __future__ import annotations

import shutil

import pytest

if shutil.which("clang++-19") is None:
    pytest.skip("needs clang++-19 (Debian package clang-19)", allow_module_level=True)

import table

# Faults that only change the values of the results, and the reasons why the device does not report them.
ONLY_VALUES = {
    "last element of a vector that is not aligned": "the compiler loads the one element that is used",
    "tail of a row from the next row": "the address is inside the buffer and was written",
    "flag": "a bool has no bit pattern that marks it as never set",
    "neighbour of the last lane": "Metal defines the result: lane 31 keeps its own value",
    "sign of a byte": "defined arithmetic",
    "sums in half": "defined arithmetic",
    "softmax without its maximum": "defined arithmetic",
    "largest of bits that have a sign": "defined arithmetic",
    "scale of the next group": "the address is inside the buffer and was written",
}


# Faults of host code that only change the values of the results, and the reasons why the device does not report them.
ONLY_VALUES_OF_HOST = {
    **dict.fromkeys(("a view's offset counted twice", "the strides of a view forgotten"), "inside the storage"),
    **dict.fromkeys(("a range counted in elements", "offsets exchanged"), "inside the buffers"),
    "the copy before the kernel": "a copy may read memory that was never written",
    "threadgroups rounded down": "a grid may leave out elements",
    "the default math mode for code that looks for NaN": "fast mode is Metal's default",
    **dict.fromkeys(("a double for a float", "members in another order"), "the bytes have no types"),
    "a command buffer that nobody commits": "it may be dropped",
    "the host reads a kernel's result at once": "the host's reads cannot be observed",
    "the host reads torch's result at once": "the host's reads cannot be observed",
    "the host replaces an input after the commit": "the host's writes cannot be observed",
    "torch reads what a queue of its own has not run": "torch's operators run on the CPU, where no read is checked",
}
UNNOTICED_HOST = {"a write past a view of its storage": "Metal binds the storage, and never learns the view's length"}


def _check(results: list[table.Result]) -> None:
    text = table.table(results)
    assert [r.name for r in results if r.outcome == "unnoticed"] == [], text
    assert [(r.name, r.control) for r in results if r.control] == [], text


def test_texts_that_metal_refuses() -> None:
    results = table.texts()
    assert len(results) >= 100
    _check(results)


def test_faulty_kernels() -> None:
    results = table.kernels()
    _check(results)
    assert {r.name for r in results if r.outcome == "only values"} == set(ONLY_VALUES)


def test_faulty_host_code() -> None:
    results = table.host()
    text = table.table(results)
    assert [(r.name, r.control) for r in results if r.control] == [], text
    outcomes = {r.name: r.outcome for r in results if r.outcome != "reported"}
    named = dict.fromkeys(ONLY_VALUES_OF_HOST, "only values") | dict.fromkeys(UNNOTICED_HOST, "unnoticed")
    assert outcomes == named, text
