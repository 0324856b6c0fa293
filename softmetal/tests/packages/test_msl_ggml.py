"""Tests that ggml's Metal source compiles unmodified."""

from __future__ import annotations

import functools
import struct

import numpy as np
import pytest
from ggml_kernels import DEFINES, ggml_source
from msl_kernels import CompileError

from softmetal import device
from softmetal.apple import wheels


@functools.cache
def _source() -> str:
    try:
        return ggml_source()
    except wheels.WheelUnavailable as error:
        pytest.skip(f"ggml's Metal source is not at hand: {error}")


def test_rows_of_q4_0() -> None:
    library = device.compile(_source(), kernel="kernel_get_rows_q4_0", defines=DEFINES, file_name="ggml-metal.metal")
    assert len(library.names) == 611
    assert len(library.constants) == 52
    generator = np.random.default_rng(3)
    rows, columns, chosen = 5, 64, np.array([3, 0, 4], np.int32)
    scales = generator.uniform(-1, 1, (rows, columns // 32)).astype(np.float16)
    nibbles = generator.integers(0, 256, (rows, columns // 32, 16), dtype=np.uint8)
    packed = np.concatenate([scales[..., None].view(np.uint8), nibbles], axis=2)
    row = packed[0].nbytes
    sizes = struct.pack("@iiQQQiQQQQQQ", columns // 16, columns, row, 0, 0, 3, 4, 0, 0, 4 * columns, 0, 0)
    out = np.zeros((3, columns), np.float32)
    library.kernel("kernel_get_rows_q4_0").launch(groups=3, group=32, buffers=[sizes, packed, chosen, out])
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).astype(np.float64)
    wanted = ((codes - 8) * scales[..., None].astype(np.float64)).reshape(rows, columns)[chosen]
    # Three float operations round, each a value of at most 16 scales.
    assert np.abs(out - wanted).max() <= 3 * 16 * 2.0**-24


def test_a_product_needs_its_function_constants() -> None:
    with pytest.raises(CompileError, match=r"without a value: 'FC_mul_mm_bc_inp' \(700\), 'FC_mul_mm_bc_out' \(701\)"):
        device.compile(_source(), kernel="kernel_mul_mm_q4_0_f32", defines=DEFINES)
