"""Compares torch.mps.compile_shader on the software device with NumPy and with torch on the CPU."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import softmetal

SOURCE = """
#include <metal_stdlib>
using namespace metal;
kernel void scale(device const float* x, device float* y, constant float& a, constant long& b,
                  uint i [[thread_position_in_grid]]) { y[i] = a * x[i] + float(b); }
kernel void pick(device float* y, constant float* values, constant int2* pairs, uint i [[thread_position_in_grid]]) {
  y[i] = values[i] * float(pairs[i].x - pairs[i].y);
}
kernel void cast(device float* y, constant half& h, constant bfloat& b, constant int& i4, constant short& i2,
                 constant char& i1, constant uchar& u1) {
  y[0] = float(h); y[1] = float(b); y[2] = float(i4); y[3] = float(i2); y[4] = float(i1); y[5] = float(u1);
}
kernel void where(device int* y, uint3 p [[thread_position_in_grid]], uint3 size [[threads_per_grid]],
                  uint3 group [[threads_per_threadgroup]]) {
  y[(p.z * size.y + p.y) * size.x + p.x] = int(p.x + 10 * p.y + 100 * p.z + 1000 * group.x);
}
kernel void gather(device float* y, device float* constant* inputs, uint i [[thread_position_in_grid]]) {
  y[i] = inputs[0][i] + 10 * inputs[1][i];
}
[[max_total_threads_per_threadgroup(64)]] kernel void limited(device float* y, uint i [[thread_position_in_grid]]) {
  threadgroup float scratch[64];
  scratch[i % 64] = 1;
  y[i] = scratch[i % 64];
}
template <typename T> kernel void twice(device T* x, uint i [[thread_position_in_grid]]) { x[i] = x[i] + x[i]; }
template [[host_name("twice_half")]] kernel void twice<half>(device half*, uint);
template [[host_name("twice_int")]] kernel void twice<int>(device int*, uint);
kernel void past(device float* y, uint i [[thread_position_in_grid]]) { y[i + 1] = 1; }
kernel void copy(device const float* x, device float* y, uint i [[thread_position_in_grid]]) { y[i] = x[i]; }
"""


@pytest.fixture(scope="module")
def library() -> object:
    return torch.mps.compile_shader(SOURCE)


@pytest.fixture(autouse=True, params=["fast", "checked"])
def mode(request: pytest.FixtureRequest) -> object:
    softmetal.faults()
    with softmetal.checked(request.param == "checked"):
        yield request.param


def test_tensors_and_numbers(library) -> None:
    x = torch.randn(100)
    y = torch.empty(100, device="mps")
    library.scale(x.to("mps"), y, 2.5, -3)
    assert torch.equal(y.cpu(), torch.addcmul(torch.tensor(-3.0), torch.tensor(2.5), x))


def test_storage_offsets_are_respected(library) -> None:
    x = torch.arange(32, dtype=torch.float32, device="mps")
    y = torch.zeros(32, device="mps")
    library.scale(x[5:9], y[20:24], 1.0, 0)
    assert y.tolist() == [0.0] * 20 + [5, 6, 7, 8] + [0.0] * 8


def test_lists_of_numbers(library) -> None:
    y = torch.zeros(3, device="mps")
    library.pick(y, [1.5, 2.0, -1.0], [7, 3, 5, 5, 1, 9], arg_casts={2: "int32"})
    assert y.tolist() == [6.0, 0.0, 8.0]


def test_casts(library) -> None:
    y = torch.empty(6, device="mps")
    casts = {1: "fp16", 2: "bf16", 3: "int32", 4: "int16", 5: "int8", 6: "uint8"}
    library.cast(y, 0.1, 0.1, -70000, -300, -100, 200, arg_casts=casts, threads=1)
    expected = [torch.tensor(0.1, dtype=t).float().item() for t in (torch.float16, torch.bfloat16)]
    assert y.tolist() == [*expected, -70000, -300, -100, 200]


def test_one_cast_for_all(library) -> None:
    y = torch.zeros(2, device="mps")
    library.pick(y, torch.tensor(2.0), [4, 1], arg_casts="int32", threads=1)
    assert y.tolist() == [6.0, 0.0]


def test_zero_dimensional_cpu_tensors_are_numbers(library) -> None:
    y = torch.empty(4, device="mps")
    library.scale(torch.ones(4, device="mps"), y, torch.tensor(0.5, dtype=torch.float64), torch.tensor(2))
    assert y.tolist() == [2.5] * 4


@pytest.mark.parametrize("group", [None, [2, 3, 1], [4, 2, 2]])
def test_three_dimensions_with_partial_groups(library, group: list[int] | None) -> None:
    y = torch.full((3, 5, 7), -1, dtype=torch.int32, device="mps")
    library.where(y, threads=[7, 5, 3], group_size=group)
    z, r, x = np.mgrid[0:3, 0:5, 0:7]
    found = y.cpu().numpy()
    assert np.array_equal(found % 1000, x + 10 * r + 100 * z)
    widths = {1024} if group is None else {group[0], 7 % group[0]}
    assert set(np.unique(found // 1000)) <= widths | {7}


def test_a_list_of_tensors_is_a_table_of_addresses(library) -> None:
    a, b = (
        torch.arange(8.0, device="mps"),
        torch.arange(20.0, 28.0, device="mps"),
    )  # small integers, so that sums are exact with and without fused multiply-adds
    y = torch.empty(4, device="mps")
    library.gather(y, [a[2:], b], threads=4)
    assert torch.equal(y.cpu(), a.cpu()[2:6] + 10 * b.cpu()[:4])


def test_templates_and_names(library) -> None:
    x = torch.tensor([1.5, -2.0], dtype=torch.float16, device="mps")
    library.twice_half(x)
    n = torch.tensor([3, -4], dtype=torch.int32, device="mps")
    library.twice_int(n)
    assert x.tolist() == [3.0, -4.0]
    assert n.tolist() == [6, -8]
    assert set(dir(library)) == {
        *("scale", "pick", "cast", "where", "gather", "limited", "twice_half", "twice_int", "past", "copy")
    }


def test_properties(library) -> None:
    assert library.limited.max_threads_per_threadgroup == 64
    assert library.limited.static_thread_group_memory_length == 256
    assert library.limited.thread_execution_width == 32
    assert library.scale.max_threads_per_threadgroup == 1024


def test_work_is_deferred_and_ordered(library) -> None:
    x = torch.ones(4, device="mps")
    for _ in range(5):
        library.scale(x, x, 2.0, 0)
    assert x.tolist() == [32.0] * 4


def test_an_input_may_be_freed_before_the_work_runs(library) -> None:
    y = torch.empty(1000, device="mps")
    library.scale(torch.full((1000,), 3.0, device="mps"), y, 1.0, 0)
    others = [torch.full((1000,), -1.0, device="mps") for _ in range(20)]
    assert y.tolist() == [3.0] * 1000
    assert len(others) == 20


def test_wrong_source_is_a_syntax_error() -> None:
    with pytest.raises(SyntaxError, match="undeclared identifier 'missing'") as caught:
        torch.mps.compile_shader("kernel void f(device float* y) {\n  y[0] = missing;\n}")
    assert re.search(r":2\b", str(caught.value))


def test_unknown_function(library) -> None:
    with pytest.raises(AttributeError, match=r"no function 'missing'; it has .*scale"):
        library.missing  # noqa: B018


def test_unsupported_arguments(library) -> None:
    y = torch.empty(4, device="mps")
    with pytest.raises(TypeError, match="argument 2: expected an mps tensor, a number, or a list of either, got 'a'"):
        library.scale(y, y, "a", 1)
    with pytest.raises(RuntimeError, match="Passed CPU tensor to MPS op"):
        library.scale(torch.ones(4), y, 1.0, 1)
    with pytest.raises(RuntimeError, match=r"arg_casts: expected one of fp16, .*, got 'fp8'"):
        library.scale(y, y, 1.0, 1, arg_casts={2: "fp8"})
    with pytest.raises(ValueError, match="Threadgroup size exceeds 64 limit"):
        library.limited(y, threads=128, group_size=128)
    with pytest.raises(RuntimeError, match="must have same number of dimensions"):
        library.limited(y, threads=[4, 4], group_size=4)
    with pytest.raises(RuntimeError, match=r"Metal API violation \[zero-size dispatch\]"):
        library.limited(y, threads=0)
    with pytest.raises(RuntimeError, match=r"Metal API violation \[unbound argument\].*'b'"):
        library.scale(y, y, 1.0)


def test_errors_that_a_kernel_reports() -> None:
    """A kernel writes to PyTorch's error buffer with the macro of PyTorch's header."""
    checking = torch.mps.compile_shader("""
    #include <metal_stdlib>
    #include <c10/metal/error.h>
    kernel void check(device float* y, device c10::metal::ErrorMessages* errors, uint i [[thread_position_in_grid]]) {
      if (y[i] > 2) TORCH_REPORT_ERROR(errors, "value at ", long(i), " is too large");
    }""")
    checking.check(torch.zeros(8, device="mps"), error_buf_idx=1)
    torch.mps.synchronize()
    checking.check(torch.arange(4.0, device="mps"), error_buf_idx=1)
    with pytest.raises(torch.AcceleratorError, match="value at 3 is too large"):
        torch.mps.synchronize()
    torch.mps.synchronize()


@pytest.mark.parametrize("mode", ["checked"], indirect=True)
def test_faults_raise_at_the_wait_and_name_the_place(library) -> None:
    library.past(torch.zeros(256, device="mps"))
    with pytest.raises(RuntimeError, match=r"out-of-bounds write .*:28; thread \(255,0,0\).*kernel 'past', seed \d+"):
        torch.mps.synchronize()
    torch.mps.synchronize()
    found = softmetal.faults()
    assert len(found) == 1
    assert softmetal.faults() == []


@pytest.mark.parametrize("mode", ["fast"], indirect=True)
def test_a_store_past_the_end_shows_in_fast_mode_when_the_buffer_is_freed(library) -> None:
    y = torch.zeros(256, device="mps")
    library.past(y)
    torch.mps.synchronize()
    del y
    with pytest.raises(RuntimeError, match="a store past the end of a buffer of 1024 bytes, at byte 1024"):
        torch.mps.synchronize()


CONST = """
kernel void cast_away(device const float* x, uint i [[thread_position_in_grid]]) {
  ((device float*)(ulong)x)[i] = 1;
}
kernel void cast_away_bytes(constant float& x, device float* y) {
  device float* p = (device float*)(ulong)&x;
  p[0] = y[0];
}
"""


@pytest.mark.parametrize("mode", ["checked"], indirect=True)
def test_stores_into_constant_memory_are_faults() -> None:
    library = torch.mps.compile_shader(CONST)
    x = torch.zeros(4, device="mps")
    library.cast_away(x)
    with pytest.raises(RuntimeError, match=r"const.* at program_source.metal:3\b.*kernel 'cast_away'"):
        torch.mps.synchronize()
    library.cast_away_bytes(1.0, x, threads=1)
    with pytest.raises(RuntimeError, match=r"const.* at program_source.metal:7\b.*kernel 'cast_away_bytes'"):
        torch.mps.synchronize()


@pytest.mark.parametrize("mode", ["checked"], indirect=True)
def test_reading_bytes_that_were_never_written_is_a_fault(library) -> None:
    y = torch.zeros(16, device="mps")
    x = torch.empty(16, device="mps")
    x[:8] = 1
    library.copy(x[:8], y)
    torch.mps.synchronize()
    library.copy(x, y, threads=9)
    with pytest.raises(RuntimeError, match="read of device memory never written"):
        torch.mps.synchronize()
    x[8:] = 2
    library.copy(x, y)
    assert y.tolist() == [1.0] * 8 + [2.0] * 8


def test_seeds_and_counters(library, mode: str) -> None:
    softmetal.faults()
    softmetal.seed(41)
    x = torch.ones(96, device="mps")
    library.scale(x, x, 1.0, 1, group_size=32)
    library.twice_half(torch.ones(7, dtype=torch.float16, device="mps"))
    first, second = softmetal.counters()
    assert (first.kernel, first.seed, first.threads, first.threadgroups) == ("scale", 41, 96, 3)
    assert (second.kernel, second.seed, second.threads) == ("twice_half", 42, 7)
    if mode == "checked":
        assert (second.device_bytes_written, second.distinct_bytes_read) == (14, 14)
    else:
        assert second.device_bytes_read is None
