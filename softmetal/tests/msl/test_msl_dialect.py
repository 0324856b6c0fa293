"""Tests that the check of address spaces, overloads and types refuses source that only Apple's compiler refuses."""

import pytest
from msl_kernels import HEADER, CompileError, assert_refused, compile_metal

from softmetal.msl.compiler import compile_source

KERNEL = (
    "kernel void k(device float* a [[buffer(0)]], constant float* c [[buffer(1)]], uint i [[thread_index_in_threadgroup]])"
    " {{ threadgroup float s[64]; float l[4] = {{}}; s[i] = l[i & 3]; {} }}"
)

# name: (source, the message)
SPACES = {
    "threadgroup array for a device pointer": (
        "float total(device const float* p, uint n) { float x = 0; while (n--) x += p[n]; return x; } "
        + KERNEL.format("a[i] = total(s, 64);"),
        "no known conversion",
    ),
    "address of a device element for thread": (
        "void split(float x, thread float& whole) { whole = floor(x); } " + KERNEL.format("split(s[i], a[i]);"),
        "cannot bind reference",
    ),
    "method of an object in threadgroup memory": (
        "struct Sum { float x; void add(float y) { x += y; } }; kernel void k(threadgroup Sum* t [[threadgroup(0)]]) "
        "{ t[0].add(1); }",
        "object",
    ),
    "pointer member": (
        "struct View { device float* p; }; " + KERNEL.format("View v = {s}; v.p[i] = 1;"),
        "'device float *'",
    ),
    "result in another space": (
        "device float* row(device float* p, uint i) { return p + i; } "
        + KERNEL.format("threadgroup float* r = row(a, i);"),
        "'threadgroup float *'",
    ),
    "difference of two spaces": (KERNEL.format("a[i] = &s[1] - &a[1];"), "arithmetic operation with operands of type"),
    "choice between two spaces": (KERNEL.format("a[i] = *(i ? &s[1] : &a[1]);"), "incompatible operand types"),
    "swap of two spaces": (
        "template <typename T> void exchange(T x, T y) { auto v = *x; *x = *y; *y = v; } "
        + KERNEL.format("exchange(&s[i], &a[i]);"),
        "conflicting types",
    ),
    "constant table for a device pointer": (
        "constant float table[2] = {1, 2}; float first(device const float* p) { return *p; } "
        + KERNEL.format("a[i] = first(table);"),
        "no known conversion",
    ),
    "cast to another space": (KERNEL.format("a[i] = *reinterpret_cast<device float*>(&s[0]);"), "reinterpret_cast"),
    "cast of a local array": (KERNEL.format("((device float*)l)[0] = a[i];"), "mismatching address spaces"),
    "pointer into a loop": (KERNEL.format("for (device float* p = s; p != a; ++p) *p = 0;"), "'device float *'"),
    "reference to a parameter": (
        "struct P { uint n; }; uint count(thread const P& p) { return p.n; } "
        "kernel void k(constant P& p [[buffer(0)]], device uint* o [[buffer(1)]]) { *o = count(p); }",
        "cannot bind reference",
    ),
    "template for one space": (
        "template <typename T> T sum4(threadgroup const T* p) { return p[0] + p[1] + p[2] + p[3]; } "
        + KERNEL.format("a[i] = sum4(a);"),
        "no matching function",
    ),
    "simdgroup matrix in threadgroup memory": (
        KERNEL.format("threadgroup simdgroup_float8x8 m; simdgroup_load(m, a, 8);"),
        "no matching function",
    ),
    "store to constant": (KERNEL.format("c[i] = 1;"), "const"),
    "variable outside of functions": ("float scale = 2; " + KERNEL.format("a[i] = scale;"), "must be constant"),
    "constexpr outside of functions": (
        "constexpr float scale = 2; " + KERNEL.format("a[i] = scale;"),
        "must be constant",
    ),
}
OVERLOADS = {
    "max(uint, int)": (KERNEL.format("a[i] = max(i, 1);"), "call to 'max' is ambiguous"),
    "min(int, uint) of a difference": (KERNEL.format("int n = 3; a[i] = min(n - 1, i);"), "call to 'min' is ambiguous"),
    "min(ushort, uint)": (KERNEL.format("ushort n = 3; a[i] = min(n, i);"), "call to 'min' is ambiguous"),
    "max(float, half)": (KERNEL.format("a[i] = max(a[i], 1.0h);"), "call to 'max' is ambiguous"),
    "max(float, int)": (KERNEL.format("a[i] = max(a[i], 0);"), "call to 'max' is ambiguous"),
    "clamp(uint, int, int)": (KERNEL.format("a[i] = clamp(i, 0, 7);"), "call to 'clamp' is ambiguous"),
    "mix(half, float, float)": (KERNEL.format("a[i] = mix(1.0h, a[i], 0.5f);"), "call to 'mix' is ambiguous"),
    "pow(int, int)": (KERNEL.format("a[i] = pow(2, 3);"), "call to 'pow' is ambiguous"),
    "sqrt(uint)": (KERNEL.format("a[i] = sqrt(i);"), "call to 'sqrt' is ambiguous"),
    "fma(half, float, float)": (KERNEL.format("a[i] = fma(1.0h, a[i], a[0]);"), "call to 'fma' is ambiguous"),
    "min(long, int)": (KERNEL.format("a[i] = min(long(i), 3);"), "call to 'min' is ambiguous"),
    "select(half, float)": (KERNEL.format("a[i] = select(1.0h, a[i], i > 1);"), "call to 'select' is ambiguous"),
    "metal::min(uint, int)": (KERNEL.format("a[i] = metal::min(i, 3);"), "call to 'min' is ambiguous"),
    "precise::max(float, half)": (KERNEL.format("a[i] = precise::max(a[i], 1.0h);"), "call to 'max' is ambiguous"),
    "simd_sum(ulong)": (KERNEL.format("a[i] = simd_sum(ulong(i));"), "call to 'simd_sum' is ambiguous"),
    "simd_shuffle_down(long)": (KERNEL.format("a[i] = simd_shuffle_down(long(i), 1);"), "is ambiguous"),
    "quad_broadcast(ulong)": (KERNEL.format("a[i] = quad_broadcast(ulong(i), 1);"), "is ambiguous"),
    "matrix of integers": (KERNEL.format("simdgroup_matrix<uint, 8, 8> m; (void)m;"), "half, bfloat and float only"),
    "threadgroup atomic_float": (
        "kernel void k(threadgroup atomic_float* x [[threadgroup(0)]]) "
        "{ atomic_fetch_add_explicit(x, 1, memory_order_relaxed); }",
        "no matching function",
    ),
    "maximum of atomic_float": (
        "kernel void k(device atomic_float* x [[buffer(0)]]) { atomic_fetch_max_explicit(x, 1.0f, memory_order_relaxed); }",
        "no matching function",
    ),
}
REFUSED = SPACES | OVERLOADS
# name -> (source, the first language version that accepts it, the error message of earlier versions)
VERSIONS = {
    "bfloat": (KERNEL.format("bfloat x = bfloat(a[i]); a[i] = float(x);"), 310, "'bfloat'"),
    "vector of bfloat": (KERNEL.format("bfloat4 x = bfloat4(a[i]); a[i] = float(x.y);"), 310, "'bfloat4'"),
    "atomic_float": (
        "kernel void k(device atomic_float* x [[buffer(0)]]) { atomic_store_explicit(x, 1, memory_order_relaxed); }",
        300,
        "atomic_float",
    ),
    "memory order of an atomic": (
        "kernel void k(device atomic_uint* x [[buffer(0)]]) { atomic_fetch_add_explicit(x, 1, memory_order_acq_rel); }",
        320,
        "memory_order_acq_rel",
    ),
    "memory order of a load": (
        "kernel void k(device atomic_uint* x [[buffer(0)]], device uint* y [[buffer(1)]]) "
        "{ *y = atomic_load_explicit(x, memory_order_acquire); }",
        320,
        "memory_order_acquire",
    ),
    "fence": (
        KERNEL.format("atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst); a[i] = 1;"),
        320,
        "memory_order_seq_cst",
    ),
    "fence of one scope": (
        KERNEL.format(
            "atomic_thread_fence(mem_flags::mem_device, memory_order_release, thread_scope_device); a[i] = 1;"
        ),
        320,
        "memory_order_release",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_its_line(name: str) -> None:
    assert_refused(*REFUSED[name])


@pytest.mark.parametrize("name", VERSIONS)
def test_what_a_language_version_has(name: str) -> None:
    source, version, message = VERSIONS[name]
    compile_source(HEADER + source, version=version)
    before = {310: 240, 300: 240, 320: 310}[version]
    with pytest.raises(CompileError) as error:
        compile_source(HEADER + source, file_name="bad.metal", version=before)
    assert message in str(error.value)
    assert "bad.metal:3:" in str(error.value)
    assert "the language version may be too old" in str(error.value)


def test_the_version_is_a_macro() -> None:
    for version in (240, 320):
        compile_source(f"#if __METAL_VERSION__ != {version}\n#error wrong\n#endif\n", version=version)


def test_the_message_names_the_header_and_says_what_to_do(tmp_path) -> None:
    (tmp_path / "part.h").write_text("\ntemplate <typename T>\nvoid f(T x) { device float* y = x; (void)y; }\n")
    source = HEADER + '#include "part.h"\n' + KERNEL.format("f(&s[i]);")
    with pytest.raises(CompileError) as error:
        compile_source(source, file_name="bad.metal", include_paths=[str(tmp_path)])
    assert str(error.value).startswith(
        f"{tmp_path}/part.h:3: error: cannot initialize a variable of type 'device float *'"
    )
    assert "declare one function or template for each space" in str(error.value)


ACCEPTED = {
    "functions for each space": (
        "float sum(device const float* p) { return p[0]; } float sum(threadgroup const float* p) { return p[1]; } "
        "float sum(thread const float* p) { return p[2]; } float sum(constant float* p) { return p[3]; } "
        + KERNEL.format("a[i] = sum(a) + sum(s) + sum(l) + sum(c);")
    ),
    "methods for each space": (
        "struct S { float x; float get() const { return x; } float get() const device { return x; } "
        "float get() const threadgroup { return x; } }; kernel void k(device S* a [[buffer(0)]], "
        "threadgroup S* t [[threadgroup(0)]]) { S s = a[0]; a[1].x = s.get() + a[0].get() + t[0].get(); }"
    ),
    "one template for all": (
        "template <typename P> float first(P p) { return *p; } " + KERNEL.format("a[i] = first(a) + first(s) + first(l);")
    ),
    "one type in a call": KERNEL.format("a[i] = min(int(i), 3) + max(a[i], 0.0f) + float(clamp(i, 1u, 3u)) + pow(2.0f, a[i]);"),
    "vectors with scalars": KERNEL.format("float3 v = float3(1); v = clamp(v, 0.0f, 1.0f) + max(v, 2.0f); a[i] = v.x + 0.5;"),
    "pointers and objects": (
        "template <int N> struct Int { constexpr operator int() const thread { return N; } }; "
        "template <class P, class S> P on(P p, S s) { p += s; return p - s; } "
        + KERNEL.format("a[i] = *on(a, Int<1>()) + *on(s, Int<2>()) + *on(c, 3);")
    ),
    "copies of structs": (
        "struct P { uint n; float x; }; kernel void k(constant P& p [[buffer(0)]], device P* o [[buffer(1)]]) "
        "{ P q = p; q.n += 1; o[0] = q; threadgroup P t; t = q; }"
    ),
    "function constants": "constant int rows [[function_constant(0)]]; constant bool on = rows > 3; "
    + KERNEL.format("if (on) a[i] = rows;"),
    "words of the dialect": KERNEL.format("float local = 1, global = 2, generic = 3, pipe = 4; a[i] = local + global + generic + pipe;"),
    # The following forms are MLX's.
    "list in braces for a vector": "uint area(uint3 v) { return v.x * v.y * v.z; } int area(int v) { return v; } "
    + KERNEL.format("a[i] = area({i * 2, i, i + 1});"),
    "own overload for bool": "inline bool simd_shuffle_down(bool x, uint16_t n) { return metal::simd_shuffle_down(uint32_t(x), n); } "
    + KERNEL.format("a[i] = simd_shuffle_down(i > 3, 1);"),
    "int8_t is a type of lanes": "struct Pair { int8_t x; }; "
    + KERNEL.format("Pair p{simd_shuffle_down(int8_t(i), ushort(1))}; a[i] = p.x;"),
    "definition of a constant member": (
        "template <int N> struct Table { static constant constexpr const float rows[2][2] = {{N, 2}, {3, 4}}; }; "
        "template <> struct Table<3> { static constant constexpr const float rows[2][2] = {{1, 2}, {3, 4}}; }; "
        "constant constexpr const float Table<3>::rows[2][2]; " + KERNEL.format("a[i] = Table<3>::rows[i & 1][0];")
    ),
    "zeros for threadgroup memory": (
        "kernel void k(device float* a [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) "
        "{ constexpr int N = 8; threadgroup float s[N] = {0}, t[N][2] = {}; s[i] = t[i][0] = i; a[i] = s[i]; }"
    ),
    "choice between structs of two spaces": (
        "struct Pair { float x; float y; constexpr Pair(float x, float y) thread : x(x), y(y) {} "
        "constexpr Pair() threadgroup : x(0), y(0) {} }; "
        "kernel void k(device Pair* a [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) "
        "{ threadgroup Pair s[8]; a[i].x = (i > 3 ? s[i] : Pair(0, 1)).x; }"
    ),
    "a temporary converts itself": (
        "template <typename T, T v> struct Known { constexpr operator T() const thread { return v; } }; "
        "template <int A, int B> constexpr auto operator+(Known<int, A>, Known<int, B>) { return Known<int, A + B>{}; } "
        + KERNEL.format("Known<int, 1> one; const int sum = one + one; a[i] = sum;")
    ),
    "type of a value among template arguments": (
        "template <typename T, T v> struct Known { constexpr operator T() const thread { return v; } }; "
        "template <typename T, T t, typename U, U u> constexpr auto operator+(Known<T, t>, Known<U, u>) "
        "{ constexpr auto r = t + u; using R = metal::remove_addrspace_t<decltype(r)>; return Known<R, r>{}; } "
        + KERNEL.format("Known<int, 1> one; const int sum = one + one + one; a[i] = sum;")
    ),
    "type traits": (
        "struct S { int x; }; enum E { e }; "
        'static_assert(is_floating_point_v<half4> && is_integral_v<uint3> && !is_integral_v<float>, ""); '
        'static_assert(is_arithmetic_v<bfloat> && is_signed_v<float2> && is_signed_v<int> && is_unsigned_v<uint>, ""); '
        'static_assert(is_vector_v<float2> && !is_vector_v<float> && is_enum_v<E> && is_class_v<S>, ""); '
        'static_assert(is_scalar_v<float> && is_scalar_v<device int*> && !is_scalar_v<float4> && !is_scalar_v<S>, ""); '
        'static_assert(is_same_v<make_unsigned_t<int>, uint> && is_same_v<make_signed_t<ulong>, long>, ""); '
        'static_assert(is_same_v<common_type_t<int, float>, float> && is_same_v<remove_cvref_t<thread const S&>, S>, ""); '
        'static_assert(is_same_v<conditional_t<false, int, S>, S> && is_same_v<remove_extent_t<int[4]>, int>, ""); '
        'static_assert(is_convertible_v<int, float> && !is_convertible_v<S, float> && is_constructible_v<S>, ""); '
        'static_assert(conjunction_v<true_type, is_same<E, E>> && negation_v<false_type>, ""); '
        'static_assert(!disjunction_v<false_type, is_same<E, S>>, ""); '
        + KERNEL.format("enable_if_t<is_same_v<decay_t<const float>, float>, float> x = 1; a[i] = x;")
    ),
    "constant member that is a struct": (
        "struct Pair { float x; constexpr Pair(float x) thread : x(x) {} }; "
        "template <typename T> struct Limits { static constexpr constant T low = T(-1); }; "
        "template <typename T> struct Max { static constexpr constant T init = Limits<T>::low; }; "
        + KERNEL.format("a[i] = Max<Pair>::init.x;")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_similar_right_source_is_accepted(name: str) -> None:
    compile_metal(ACCEPTED[name])


def test_a_scope_that_metal_does_not_define_can_be_defined() -> None:
    own = (
        "namespace metal { constexpr constant metal::thread_scope thread_scope_system = static_cast<thread_scope>(3); }"
    )
    fence = "atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_system);"
    compile_source(HEADER + own + KERNEL.format(fence), version=320)
