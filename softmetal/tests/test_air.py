"""Tests the loader of metallibs on modules that these tests write: arguments, threadgroup memory, function constants,
faults, and refused libraries.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from air_module import bitcode, buffer, builtin, metallib, save
from softmetal import device
from softmetal.proof.air.compiler import load
from softmetal.proof.air.functions import Declaration, Type, UnknownFunction, cpp_function, parse_name
from softmetal.proof.air.metallib import Metallib, MetallibError

# Reverses 64 numbers through threadgroup memory. The address of one load is a constant expression.
REVERSE = """
@tile = internal unnamed_addr addrspace(3) global [64 x float] undef, align 4
define void @reverse(ptr addrspace(1) noundef "air-buffer-no-alias" %x, i32 noundef %i) #0 {
  %p = getelementptr inbounds float, ptr addrspace(1) %x, i32 %i
  %v = load float, ptr addrspace(1) %p, align 4
  %t = getelementptr inbounds [64 x float], ptr addrspace(3) @tile, i64 0, i32 %i
  store float %v, ptr addrspace(3) %t, align 4
  BARRIER
  %j = sub i32 63, %i
  %u = getelementptr inbounds [64 x float], ptr addrspace(3) @tile, i64 0, i32 %j
  %w = load float, ptr addrspace(3) %u, align 4
  %z = load float, ptr addrspace(3) getelementptr inbounds ([64 x float], ptr addrspace(3) @tile, i64 0, i64 63), align 4
  %d = fsub float %z, %z
  %s = fadd float %w, %d
  store float %s, ptr addrspace(1) %p, align 4
  ret void
}
declare void @air.wg.barrier(i32, i32) #0
attributes #0 = { convergent nounwind }
!air.kernel = !{!0}
!0 = !{ptr @reverse, !1, !2, !5}
!1 = !{}
!2 = !{!3, !4}
!3 = FIRST
!4 = SECOND
!5 = !{!"air.max_work_group_size", i32 64}
"""
BARRIER = "call void @air.wg.barrier(i32 2, i32 1) #0"


def reverse(barrier: str = BARRIER) -> str:
    text = REVERSE.replace("BARRIER", barrier).replace("FIRST", buffer(0, "x", 3))
    return text.replace("SECOND", builtin(1, "thread_position_in_threadgroup"))


# y[i] = scale * x[i]. If the function constant `has_offset` is true, z[i] is added.
GATED = f"""
@scale = internal addrspace(2) externally_initialized constant float undef, section "air.fc_initializer", align 4
@flag = internal addrspace(2) externally_initialized constant i8 undef, section "air.fc_initializer", align 1
@predicate = internal addrspace(2) global i8 0, align 1
@llvm.global_ctors = appending global [1 x {{ i32, ptr, ptr }}] [{{ i32, ptr, ptr }} {{ i32 65535, ptr @start, ptr null }}]
define internal void @start() section "air.static_init" {{
  %f = load i8, ptr addrspace(2) @flag
  %p = call i8 @air.normalize_function_constant_predicate.i8(i8 %f)
  store i8 %p, ptr addrspace(2) @predicate
  ret void
}}
define void @gated(ptr addrspace(1) %y, ptr addrspace(1) %z, i32 %i) #0 {{
  %s = load float, ptr addrspace(2) @scale
  %p = getelementptr float, ptr addrspace(1) %y, i32 %i
  %v = load float, ptr addrspace(1) %p, align 4
  %m = fmul float %v, %s
  %f = load i8, ptr addrspace(2) @flag
  %c = icmp ne i8 %f, 0
  br i1 %c, label %add, label %end
add:
  %q = getelementptr float, ptr addrspace(1) %z, i32 %i
  %w = load float, ptr addrspace(1) %q, align 4
  br label %end
end:
  %o = phi float [ 0.0, %0 ], [ %w, %add ]
  %r = fadd float %m, %o
  store float %r, ptr addrspace(1) %p, align 4
  ret void
}}
declare i8 @air.normalize_function_constant_predicate.i8(i8)
attributes #0 = {{ nounwind }}
!air.kernel = !{{!0}}
!air.function_constants = !{{!7, !8}}
!0 = !{{ptr @gated, !1, !2}}
!1 = !{{}}
!2 = !{{!3, !4, !5}}
!3 = {buffer(0, "y", 0)}
!4 = {buffer(1, "z", 1, access="read", gate="!6")}
!5 = {builtin(2, "thread_position_in_grid")}
!6 = !{{ptr addrspace(2) @predicate, !"bool", !"has_offset"}}
!7 = !{{ptr addrspace(2) @scale, !"float", !"scale", i32 4, i1 true}}
!8 = !{{ptr addrspace(2) @flag, !"bool", !"has_offset", i32 7, i1 true}}
"""


def test_threadgroup_memory_and_barrier(tmp_path: Path, checked: bool) -> None:
    kernel = load(save(tmp_path, {"reverse": reverse()}), "reverse").kernel("reverse")
    assert (kernel.static_threadgroup_bytes, kernel.max_total_threads) == (256, 64)
    assert [(a.name, a.index, a.is_const) for a in kernel.arguments] == [(b"x", 3, 0)]
    x = np.arange(64, dtype=np.float32)
    counters = kernel.launch(groups=1, group=64, buffers={3: x})
    np.testing.assert_array_equal(x, np.arange(64)[::-1])
    assert counters.threadgroup_barriers == 1


def test_checked_mode_sees_a_missing_barrier(tmp_path: Path) -> None:
    library = load(save(tmp_path, {"reverse": reverse("")}), "reverse", checked=True)
    with pytest.raises(device.KernelFault) as fault:
        library.kernel("reverse").launch(groups=1, group=64, buffers={3: np.ones(64, np.float32)})
    assert {f.kind for f in fault.value.faults} <= {device.FaultKind.RACE, device.FaultKind.UNINITIALISED}


def test_checked_mode_sees_the_end_of_a_buffer(tmp_path: Path) -> None:
    library = load(save(tmp_path, {"reverse": reverse()}), "reverse", checked=True)
    with pytest.raises(device.KernelFault, match=r"out-of-bounds read of 4 bytes: buffer 3 \+ 2\d\d \(x, 240 bytes\)"):
        library.kernel("reverse").launch(groups=1, group=64, buffers={3: np.ones(60, np.float32)}, seed=3)


def test_function_constants(tmp_path: Path) -> None:
    path = save(tmp_path, {"gated": GATED})
    y, z = np.arange(5, dtype=np.float32), np.full(5, 0.5, np.float32)
    with_offset = load(path, "gated", constants={"scale": 3.0, "has_offset": True})
    with_offset.kernel("gated").launch(threads=5, group=5, buffers=[y, z])
    np.testing.assert_array_equal(y, np.arange(5) * 3 + 0.5)
    plain = load(path, "gated", constants={4: 2.0, 7: False})
    plain.kernel("gated").launch(
        threads=5, group=5, buffers=[y]
    )  # without has_offset, the kernel has no second argument
    np.testing.assert_array_equal(y, np.arange(5) * 6 + 1)
    assert plain.constants == {"scale": (4, "float", True), "has_offset": (7, "bool", True)}


def test_an_unknown_function_constant_or_kernel_is_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path, {"gated": GATED, "odd": reverse().replace("air.wg.barrier", "air.wg.sparkle")})
    for kernel, message in (
        ("odd", "kernel 'odd': air.wg.sparkle is not known to the software device"),
        ("gated", r"kernel 'gated': function constants without a value: 'scale' \(4\), 'has_offset' \(7\)"),
        ("absent", "kernel 'absent': the library has 2 functions, none of that name"),
    ):
        with pytest.raises(device.CompileError, match=message):
            load(path, kernel)
    with pytest.raises(UnknownFunction, match=r"air\.simd_median\.f32"):
        cpp_function(Declaration("simd_median.f32", "float", ("float",)))


def test_a_damaged_library_is_refused() -> None:
    data = metallib({"reverse": reverse()})
    assert Metallib(data).bitcode("reverse") == bitcode(reverse())
    with pytest.raises(MetallibError, match="expected a metallib"):
        Metallib(b"\0" + data)
    with pytest.raises(MetallibError, match=r"expected \d+ bytes, got"):
        Metallib(data[:-1])
    with pytest.raises(MetallibError, match="does not have its listed SHA-256"):
        Metallib(data[:-1] + bytes([data[-1] ^ 1])).bitcode("reverse")


@pytest.mark.parametrize(
    ("name", "base", "types"),
    [
        ("simd_sum.f32", "simd_sum", [Type("f32", 0)]),
        ("convert.f.bf16.s.i32", "convert", [Type("bf16", 0), Type("s32", 0)]),
        ("max.u.v2i16", "max", [Type("u16", 2)]),
        ("atomic.global.cmpxchg.weak.i32", "atomic.cmpxchg.weak", [Type("u32", 0)]),
        ("simdgroup_matrix_8x8_load.v64f16.p3f16", "simdgroup_matrix_8x8_load", [Type("f16", 64)]),
    ],
)
def test_names(name: str, base: str, types: list[Type]) -> None:
    assert parse_name(name) == (base, types)
