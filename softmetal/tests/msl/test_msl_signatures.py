"""Tests that two kinds of source are refused: kernel arguments that Apple's compiler refuses, and C++ that Metal
lacks.
"""

import pytest
from msl_kernels import assert_refused, compile_metal


def _kernel(parameters: str, body: str = "a[0] = 1;", attributes: str = "") -> str:
    return f"{attributes} kernel void k(device float* a [[buffer(0)]], {parameters}) {{ {body} }}"


KERNELS = {
    "position in float": (_kernel("float i [[thread_position_in_grid]]"), "not float"),
    "position in ulong": (_kernel("ulong i [[thread_position_in_grid]]"), "not ulong"),
    "position in half2": (_kernel("half2 i [[thread_position_in_grid]]"), "not half2"),
    "position of four numbers": (_kernel("uint4 i [[threadgroup_position_in_grid]]"), "not uint4"),
    "size in float3": (_kernel("float3 n [[threads_per_threadgroup]]"), "not float3"),
    "lane in two numbers": (_kernel("uint2 lane [[thread_index_in_simdgroup]]"), "is uint or ushort, not uint2"),
    "simdgroup in three numbers": (_kernel("ushort3 s [[simdgroup_index_in_threadgroup]]"), "is uint or ushort"),
    "index in float": (_kernel("float i [[thread_index_in_threadgroup]]"), "is uint or ushort, not float"),
    "width of a simdgroup in ulong": (_kernel("ulong w [[threads_per_simdgroup]]"), "is uint or ushort, not ulong"),
    "positions of two and three": (
        _kernel("uint2 i [[thread_position_in_grid]], uint3 g [[threadgroup_position_in_grid]]"),
        "one number of components",
    ),
    "position and size of three and two": (
        _kernel("ushort3 i [[thread_position_in_threadgroup]], uint2 n [[threads_per_grid]]"),
        "one number of components",
    ),
    "one builtin twice": (
        _kernel("uint i [[thread_position_in_grid]], uint j [[thread_position_in_grid]]"),
        "[[thread_position_in_grid]] is already 'i'",
    ),
    "lane twice": (
        _kernel("uint i [[thread_index_in_simdgroup]], ushort j [[thread_index_in_simdgroup]]"),
        "is already 'i'",
    ),
    "threadgroup memory in a buffer": (_kernel("threadgroup float* t [[buffer(1)]]"), "bound with [[threadgroup(n)]]"),
    "buffer in threadgroup memory": (_kernel("device float* t [[threadgroup(0)]]"), "bound with [[buffer(n)]]"),
    "constant in threadgroup memory": (_kernel("constant float& t [[threadgroup(1)]]"), "bound with [[buffer(n)]]"),
    "buffer 31": (_kernel("device float* t [[buffer(31)]]"), "the last index is 30"),
    "2048 threads": (
        _kernel("uint i [[thread_position_in_grid]]", attributes="[[max_total_threads_per_threadgroup(2048)]]"),
        "at most 1024",
    ),
    "function constants of one index": (
        "constant bool p [[function_constant(4)]]; constant int q [[function_constant(4)]];",
        "function constant 4 is already 'p'",
    ),
    "call of a kernel": (
        "kernel void one(device float* a [[buffer(0)]]) { a[0] = 1; } "
        "kernel void two(device float* a [[buffer(0)]]) { one(a); }",
        "'one' is a kernel, and cannot be called",
    ),
}
CONSTRUCTS = {
    "array of a variable length": (
        _kernel("constant uint& n [[buffer(1)]]", "float x[n]; x[0] = 1; a[0] = x[0];"),
        "array size is not a constant expression",
    ),
}
REFUSED = KERNELS | CONSTRUCTS


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_its_line(name: str) -> None:
    assert_refused(*REFUSED[name], kernel="")


ACCEPTED = {
    "numbers of all widths": _kernel(
        "ushort3 p [[thread_position_in_threadgroup]], uint3 g [[threadgroup_position_in_grid]], "
        "ushort lane [[thread_index_in_simdgroup]], uint s [[simdgroup_index_in_threadgroup]]"
    ),
    "a number beside vectors": _kernel(
        "uint i [[thread_index_in_threadgroup]], uint2 g [[threadgroup_position_in_grid]]"
    ),
    "type of a template": (
        "template <typename T> kernel void k(device float* a [[buffer(0)]], T i [[thread_position_in_grid]]) { a[0] = 1; }"
    ),
    "a function and a kernel": (
        "static void fill(device float* a, float x) { a[0] = x; } "
        "kernel void k(device float* a [[buffer(0)]]) { fill(a, 1); }"
    ),
    "function as a template argument": (
        "static float one(float x) { return x + 1; } template <float (*f)(float)> float twice(float x) { return f(f(x)); } "
        + _kernel("uint i [[thread_position_in_grid]]", "a[i] = twice<one>(2);")
    ),
}


# Constructs of public kernels: ggml's, candle's, gpt-oss's.
PUBLIC = {
    "index of a function constant as a sum": (
        "constant int n [[function_constant(600 + 2)]]; constant bool m [[function_constant(600 + 3)]]; "
        "kernel void k(device int* a [[buffer(0)]]) { a[0] = n + int(m); }"
    ),
    "host_name through a typedef": (
        "template <typename T> kernel void k(device T* a [[buffer(0)]]) { a[0] = T(1); } "
        'typedef decltype(k<float>) kernel_t; template [[host_name("kf")]] kernel kernel_t k<float>;'
    ),
    "function with pointers as a template argument": (
        "static void d(device const int* p, thread float& x) { x = p[0]; } "
        "template <typename T, void (*f)(device const int*, thread T&)> [[max_total_threads_per_threadgroup(32)]] "
        "kernel void k(device int* a [[buffer(0)]]) { T x; f(a, x); a[0] = int(x); } "
        'template [[host_name("q")]] kernel void k<float, d>(device int*);'
    ),
    "macro in a pragma, and assert": (
        "kernel void k(device int* a [[buffer(0)]]) {\n#define TIMES(x) (x)\n#pragma unroll (TIMES(4))\n"
        "for (int i = 0; i < 4; ++i) { assert(i < 4); a[i] += 1; } }"
    ),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_constructs_of_public_kernels_are_accepted(name: str) -> None:
    assert compile_metal(PUBLIC[name])


@pytest.mark.parametrize("name", ACCEPTED)
def test_similar_right_source_is_accepted(name: str) -> None:
    compile_metal(ACCEPTED[name])
