"""Tests that the device refuses what Apple's compiler refuses, with a line and a reason, and accepts correct source."""

import pytest
from msl_kernels import CompileError, assert_refused, compile_metal

from softmetal.msl.compiler import compile_source

KERNEL = "kernel void k(device float* a [[buffer(0)]], uint i [[thread_position_in_grid]]) {{ {} }}"

REFUSED = {
    "parameter pointer": ("float f(float* p) { return *p; }", "parameter 'p' of 'f' is a pointer or reference without"),
    "parameter reference": ("void f(int& r) { r = 1; }", "parameter 'r' of 'f' is a pointer or reference without"),
    "const reference": ("struct S {}; void f(const S& s) {}", "parameter 's' of 'f' is a pointer or reference without"),
    "pointer beside a template": (
        "template <typename T> void f(const float* x, device T* y) {}",
        "parameter 'x' of 'f'",
    ),
    "local pointer": (KERNEL.format("float* p = a;"), "variable 'p' is a pointer or reference without"),
    "local reference": (KERNEL.format("const float& r = a[i];"), "variable 'r' is a pointer or reference without"),
    "pointer of a loop": (KERNEL.format("for (float* p = a; p < a + 3; ++p) {}"), "variable 'p' is a pointer"),
    "pointer after a label": (KERNEL.format("switch (i) { case 1: float* p = a; }"), "variable 'p' is a pointer"),
    "vector pointer": (KERNEL.format("vec<float, 4>* p = 0;"), "variable 'p' is a pointer"),
    "declared pointer": (KERNEL.format("float* p;"), "variable 'p' is a pointer"),
    "member pointer": ("struct S { float* p; };", "member 'p' is a pointer or reference without"),
    "member reference": ("struct S { int n; const half4& r; };", "member 'r' is a pointer or reference without"),
    "member function": ("struct S { void f(float* p) {} };", "parameter 'p' of 'f'"),
    "declared member function": ("struct S { void f(float* p); };", "parameter 'p' of 'f'"),
    "assignment operator": ("struct S { void operator=(const S& o) {} };", "parameter 'o' of 'operator='"),
    "result": ("float* f(device float* p) { return p; }", "'f' returns a pointer or reference without"),
    "cast": (KERNEL.format("uint x = *(uint*)a;"), "in a cast without an address space"),
    "reinterpret_cast": (
        KERNEL.format("auto x = reinterpret_cast<const uint4*>(a);"),
        "in a cast without an address space",
    ),
    "kernel pointer": (
        "template <typename T> kernel void k(T* a [[buffer(0)]]) {}",
        "kernel parameter 'a' has no address space",
    ),
    "thread pointer of a kernel": (
        "kernel void k(thread float* a [[buffer(0)]]) {}",
        "kernel parameter 'a' has no address",
    ),
    "recursion": ("int f(int n) { return n < 2 ? 1 : n * f(n - 1); }", "'f' calls itself: Metal has no recursion"),
    "recursive member": ("struct S { int f(int n) { return n ? this->f(n - 1) : 0; } };", "'f' calls itself"),
    "mutual recursion": (
        "int odd(int n); int even(int n) { return n ? odd(n - 1) : 1; } int odd(int n) { return n ? even(n - 1) : 0; }",
        "'even' calls itself through 'odd'",
    ),
    "double": (KERNEL.format("double x = 1;"), "'double' is not a type of Metal"),
    "long double": ("long double f();", "'double' is not a type of Metal"),
    "try": (KERNEL.format("try { a[i] = 1; } catch (int) {}"), "'try': exceptions are not supported"),
    "throw": ("void f() { throw 1; }", "'throw': exceptions are not supported"),
    "virtual": ("struct S { virtual void f() {} };", "'virtual' is not supported"),
    "new": (KERNEL.format("auto p = new int;"), "'new' is not supported"),
    "delete": (KERNEL.format("delete a;"), "'delete' is not supported"),
    "goto": (KERNEL.format("goto end; end: a[i] = 1;"), "'goto' is not supported"),
    "dynamic_cast": (
        "struct S {}; void f(thread S* s) { dynamic_cast<thread S*>(s); }",
        "'dynamic_cast' is not supported",
    ),
    "typeid": (KERNEL.format("typeid(int);"), "'typeid' is not supported"),
    "thread_local": ("thread_local int x;", "'thread_local' is not supported"),
    "asm": (KERNEL.format('asm("nop");'), "inline assembly is not supported"),
    "local static": (KERNEL.format("static int n = 0; n++;"), "a static variable inside a function must be constant"),
    "local const static": (
        KERNEL.format("const static int n = 0;"),
        "a static variable inside a function must be constant",
    ),
    "threadgroup array in a function": (
        "void f() { threadgroup float x[3]; }",
        "threadgroup variable in a function that is not",
    ),
    "threadgroup array outside": ("threadgroup float x[3];", "threadgroup variable outside of a function"),
    "variable arguments": ("void f(int n, ...) {}", "'f': functions with a variable number of arguments"),
    "outside ASCII": ("constant int \u00e9 = 3;", "outside ASCII"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_line_and_reason(name: str) -> None:
    assert_refused(*REFUSED[name])


def test_all_findings_are_reported_at_once() -> None:
    with pytest.raises(CompileError) as error:
        compile_source("void f(float* p) {}\n#define SPACE\nvoid g(SPACE int& r) {}\n", file_name="bad.metal")
    lines = str(error.value).splitlines()
    assert [line.split(": error: ")[0] for line in lines] == ["bad.metal:1", "bad.metal:3"]


ACCEPTED = {
    "products": KERNEL.format(
        "float x = a[0], y = a[1]; int n = 3, m = 5; a[i] = x * y + (x) * y + (n & m) + (n * m);"
    ),
    "conditions": KERNEL.format("bool b = a[0] > 0 && i & 1; if (b & (i > 2)) { a[i] = (i * 2) & 3; }"),
    "spaces on either side": (
        "struct S { thread float* p; const device half4* q; float thread& r; };"
        "float thread* f(float thread* p, device const float* q, constant int& n) { return p; }"
    ),
    "pointers to members of structs": (
        "struct P { int n; }; " + KERNEL.format("P p{3}; thread P& q = p; thread const P* r = &p; a[i] = q.n * r->n;")
    ),
    "deduced types": KERNEL.format("auto p = a + 1; device auto* q = a; auto& r = a[i]; r = *p * *q;"),
    "template parameters that carry the space": (
        "template <typename T> T first(T x) { return x; } template <typename P> void g(P& x, P y) { x = y; }"
    ),
    "aliases that carry the space": "using P = device float*; typedef constant float* Q;"
    " void f(P p, Q q) { P r = p; Q s = q; }",
    "functions as arguments": "float apply(float (*op)(float, float), float x) { return op(x, x); }",
    "template recursion": (
        "template <int N> struct Sum { static float of(float x) { return x + Sum<N - 1>::of(x); } };"
        "template <> struct Sum<0> { static float of(float) { return 0; } };"
        + KERNEL.format("a[i] = Sum<3>::of(a[i]);")
    ),
    "an overload calls another": "float twice(float x) { return 2 * x; }"
    " half twice(half x) { return half(twice(float(x))); }",
    "a function of the library with the same name": "float log1p(float x) { return metal::log(1 + x); }"
    " float my(float x) { return log1p(x); }",
    "a method of a member with the same name": (
        "struct A { int next(int x) thread { return x; } };"
        " struct B { A a; int next(int x) thread { return a.next(x); } };"
    ),
    "defaulted and deleted members": "struct S { S() = default; S(thread const S&) = delete; };",
    "constants in functions": KERNEL.format(
        "static constexpr constant int t[] = {1, 2}; constexpr int n = 2; const int m = 3; a[i] = t[i & 1] + n + m;"
    ),
    "threadgroup memory of a kernel": KERNEL.format(
        "threadgroup float x[8]; threadgroup float y; threadgroup float* p = x; x[i % 8] = a[i]; y = 1;"
        " threadgroup_barrier(mem_flags::mem_threadgroup); a[i] = p[i % 8] + y;"
    ),
    "a kernel by attribute": (
        "template <typename T, int N> [[kernel]] void k(device T* a [[buffer(0)]], uint i [[thread_position_in_grid]])"
        " { threadgroup T x[N]; x[i % N] = a[i]; a[i] = x[i % N]; }"
        'template [[host_name("k8")]] [[kernel]] void k<float, 8>(device float*, uint);'
    ),
    "words inside words": "struct S { int new_count, try_count, deleted, virtual_row; };"
    " int doubles(int double_ed) { return double_ed; }",
    "text outside ASCII in comments": "// \u00e9t\u00e9\n" + KERNEL.format("a[i] = 1; /* \u2264 */"),
    "initialisers with braces": (
        "struct S { float x; float4 v; S(float y) : x{y}, v{y, y, y, y} {} };"
        "constant float4 table[2] = {float4(1), {1, 2, 3, 4}};"
        + KERNEL.format("float2 v{1, 2}; S s(v.x); a[i] = s.v.w * table[1].y;")
    ),
    "casts with a space": KERNEL.format(
        "device uint4* p = (device uint4*)a; auto q = reinterpret_cast<device const half*>(a); a[i] = p->x + q[1];"
    ),
    "packs": "template <typename... T> int count(T... x) { return sizeof...(x); }"
    " template <typename... T> int more(T... x) { return count(x...); }",
    "loops": KERNEL.format(
        "for (uint j = 0; j < 3 && j < i; ++j) a[j] *= 2; for (int n = 2 * 3; n > 0; --n) { a[i] += n; }"
    ),
    "function constants": "constant bool gate [[function_constant(0)]]; "
    + KERNEL.format("if (is_function_constant_defined(gate) && gate) a[i] = 1;"),
    "pragmas": KERNEL.format(
        "\n#pragma unroll\nfor (int j = 0; j < 4; ++j) a[j] = j;"
        ' _Pragma("clang loop unroll(full)") for (int j = 0; j < 4; ++j) a[j] += j;'
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_correct_source_is_accepted(name: str) -> None:
    compile_metal(ACCEPTED[name])
