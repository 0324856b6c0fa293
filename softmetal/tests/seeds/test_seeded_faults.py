"""The device notices seeded faults: it refuses the texts that Metal refuses, and reports faulty kernels or shows them."""

from __future__ import annotations

import shutil

import pytest

if shutil.which("clang++-19") is None:
    pytest.skip("needs clang++-19 (Debian package clang-19)", allow_module_level=True)

import table

# Faults that break no rule of Metal, or that the device cannot see. Only the values of the results show them.
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
