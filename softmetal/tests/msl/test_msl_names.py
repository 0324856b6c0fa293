"""Tests that a source must not declare Metal's reserved names, but may use these words in other roles."""

import pytest
from msl_kernels import assert_refused, compile_metal

KERNEL = "kernel void k(device float* a [[buffer(0)]], uint i [[thread_position_in_grid]]) {{ {} }}"

KEYWORDS = {
    "member function": ("fragment", "struct S { float fragment(int b) const { return b; } };"),
    "member function of a template": (
        "fragment",
        "template <typename T> struct S { T x; T fragment(uint b) const thread { return x; } };",
    ),
    "call of a member": ("vertex", "struct S { float x; }; float f(S s) { return s.vertex(1); }"),
    "member": ("fragment", "struct S { float4 fragment; };"),
    "function": ("vertex", "float vertex(float x) { return x; }"),
    "parameter": ("kernel", "float f(float kernel) { return 1; }"),
    "pointer parameter": ("kernel", "void f(device float* kernel, int n) {}"),
    "buffer": ("kernel", "kernel void k(device float* kernel [[buffer(0)]]) {}"),
    "local": ("fragment", KERNEL.format("float fragment = 1; a[i] = 2;")),
    "local array": ("vertex", KERNEL.format("float vertex[3]; a[i] = 2;")),
    "address space as a local": ("device", KERNEL.format("int device = 3; a[i] = 2;")),
    "address space as a member": ("thread", "struct S { int thread; };"),
    "address space as an enumerator": ("constant", "enum class Where { constant, other };"),
    "address space as a parameter": ("threadgroup", "int f(int threadgroup) { return 1; }"),
    "address space as a function": ("device", "int device(int x) { return x; }"),
    "rare address space": ("object_data", "int f(int object_data) { return 1; }"),
    "builtin type": ("half", KERNEL.format("int half = 3; a[i] = 2;")),
    "builtin type as a member": ("bfloat", "struct S { int bfloat; };"),
}
MACROS = {
    "local": ("NAN", KERNEL.format("float NAN = 3; a[i] = 2;")),
    "member": ("M_PI_F", "struct S { float M_PI_F; };"),
    "without our using it": ("DBL_MAX", KERNEL.format("float DBL_MAX = 3; a[i] = 2;")),
    "function": ("assert", "void assert(bool x) {}"),
    "parameter": ("METAL_CONST", "int f(int METAL_CONST) { return 1; }"),
}
PREDEFINED = {
    "function": ("quad", "float quad(float x) { return x; }"),
    "function called main": ("main", "kernel void main(device float* a [[buffer(0)]]) { a[0] = 1; }"),
    "variable": ("float16", "constant float float16 = 3;"),
    "array": ("uint8", "constant int uint8[2] = {1, 2};"),
    "enumerator": ("float8", "enum Kind { float4x, float8 };"),
    "struct": ("complex", "struct complex { float re, im; };"),
    "template struct": ("imaginary", "template <typename T> struct imaginary { T x; };"),
    "enumeration": ("int16", "enum class int16 { a, b };"),
    "alias": ("packed_float3", "using packed_float3 = float;"),
    "typedef": ("ushort8", "typedef float ushort8;"),
    "function constant": ("half8", "constant bool half8 [[function_constant(0)]];"),
    "object of a struct": ("llong", "struct S { int x; }; constant S llong = {1};"),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_are_no_names(name: str) -> None:
    word, source = KEYWORDS[name]
    assert_refused(source, f"'{word}' is a keyword of Metal and cannot be a name")


@pytest.mark.parametrize("name", MACROS)
def test_macros_are_no_names(name: str) -> None:
    word, source = MACROS[name]
    assert_refused(source, f"'{word}' is a macro of Metal and cannot be a name")


@pytest.mark.parametrize("name", PREDEFINED)
def test_what_metal_declares_is_not_declared_again(name: str) -> None:
    word, source = PREDEFINED[name]
    assert_refused(source, f"redefinition of '{word}'")


ACCEPTED = {
    "specifiers": (
        'template <typename T> [[host_name("x")]] [[kernel]] void k1(device T* a [[buffer(0)]]) { a[0] = 1; }'
        "[[kernel, max_total_threads_per_threadgroup(32)]] void k2(device float* a [[buffer(0)]]) { a[0] = 1; }"
        "static inline float f(float x) { return x; } " + KERNEL.format("a[i] = f(1);")
    ),
    "spaces of member functions": (
        "struct S { float x; S() thread = default; S(float y) thread : x(y) {} float get() const thread { return x; }"
        " void set(float y) thread { x = y; } }; " + KERNEL.format("S s(1); s.set(2); a[i] = s.get();")
    ),
    "words inside words": "struct S { int fragments, vertex_count, kernel_size, threads, device_id; };",
    "hidden in a namespace": "namespace n { enum class Kind { float16, uint8 }; struct quad { int x; }; }",
    "hidden in a function": KERNEL.format("float quad = 1; int complex = 2; a[i] = quad + complex;"),
    "scoped enumerators": "enum class Type { float16, bfloat16, uint8 };",
    "members": "struct S { uint quad; float imaginary; };",
    "no keywords": "kernel void compute(device float* bias [[buffer(0)]], uint lane [[thread_index_in_simdgroup]])"
    " { bias[lane] = 1; }",
    "values": KERNEL.format("a[i] = i > 3 ? INFINITY : NAN; if (i > M_PI_F) return; a[i] = half(1);"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_words_elsewhere_are_accepted(name: str) -> None:
    compile_metal(ACCEPTED[name])
