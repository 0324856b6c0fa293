"""Texts that Metal's compiler refuses. If each /*bad|good*/ is replaced by `good`, the compiler accepts them."""

from __future__ import annotations

K = "kernel void k(device float* a [[buffer(0)]], constant float* c [[buffer(1)]], uint i [[thread_index_in_threadgroup]])"


def _body(statements: str) -> str:
    return f"{K} {{ threadgroup float s[64]; float l[4] = {{1, 2, 3, 4}}; s[i] = l[i & 3] + c[0]; {statements} }}"


def _kernel(parameters: str, statements: str = "a[0] = 1;") -> str:
    return f"kernel void k(device float* a [[buffer(0)]], {parameters}) {{ {statements} }}"


SPACES = {
    "member of another space": f"struct Row {{ /*constant|device*/ float* p; }}; {_body('Row r = {a}; r.p += 1; a[i] = r.p[0];')}",
    "reference returned": "/*thread|threadgroup*/ float& at(threadgroup float* p) { return p[1]; } "
    + _body("a[i] = at(s);"),
    "device struct as constant reference": "struct P { uint n; }; uint count(/*constant|device const*/ P& p) { return p.n; } "
    "kernel void k(device P* p [[buffer(0)]], device uint* o [[buffer(1)]]) { *o = count(p[0]); }",
    "pointer to a pointer": "void next(/*threadgroup|device*/ float* thread* p) { *p += 1; } "
    + _body("device float* q = a; next(&q); q[i] = 1;"),
    "address of a local": _body("threadgroup float* p = /*&l[1]|&s[1]*/; a[i] = *p;"),
    "array of pointers": _body("device float* rows[2] = {a, /*s|a + 1*/}; a[i] = rows[i & 1][0];"),
    "method for device on a local": "struct S { float x; float get() const /*device|thread*/ { return x; } }; "
    + _body("S v; v.x = 1; a[i] = v.get();"),
    "no overload for constant": "float sum(device const float* p) { return p[0]; } float sum(threadgroup const float* p) { return p[1]; } "
    + _body("a[i] = sum(/*c|a*/);"),
    "alias template": "template <typename T> using Dev = device T*; " + _body("Dev<float> p = /*s|a*/; p[i] = 1;"),
    "matrix from a local array": _body(
        "simdgroup_float8x8 m; simdgroup_load(m, /*l|s*/, 8); simdgroup_store(m, a, 8);"
    ),
    "matrix into constant memory": _body("simdgroup_float8x8 m(1); simdgroup_store(m, /*c|a*/, 8);"),
    "atomic in thread memory": "kernel void k(device atomic_uint* n [[buffer(0)]]) { "
    "/*atomic_uint x; auto p = &x;|auto p = n;*/ atomic_fetch_add_explicit(p, 1u, memory_order_relaxed); }",
    "atomic in constant memory": "kernel void k(/*constant|device*/ atomic_uint* n [[buffer(0)]]) "
    "{ atomic_fetch_add_explicit(n, 1u, memory_order_relaxed); }",
    "difference of two spaces": _body("a[i] = float(/*a - s|a - &a[1]*/);"),
    "comparison of two spaces": _body("if (/*a == s|a == &a[1]*/) a[i] = 1;"),
    "reference to threadgroup memory": _body("/*device|threadgroup*/ float& r = s[i]; r = 2;"),
    "array by reference": "float first(threadgroup float (&t)[4]) { return t[0]; } "
    "kernel void k(device float* a [[buffer(0)]]) { threadgroup float s[4]; float l[4] = {}; s[0] = l[0]; a[0] = first(/*l|s*/); }",
    "reference member": "struct R { threadgroup float& x; }; " + _body("R r = {/*a[i]|s[i]*/}; r.x = 1;"),
    "two spaces in a return": "device float* pick(device float* p, /*threadgroup|device*/ float* q, bool b) { return b ? p : q; } "
    + _body("pick(a, /*s|a + 1*/, i > 3)[0] = 1;"),
    "address of a parameter": "void keep(uint n, device uint* o) { /*device|thread*/ uint* p = &n; o[0] = *p; } "
    "kernel void k(device uint* o [[buffer(0)]]) { keep(3, o); }",
    "static cast of a pointer": _body("auto p = static_cast</*device|threadgroup*/ float*>(s); p[i] = 1;"),
    "accumulator of another thread space": "void add(thread float* acc, float x) { *acc += x; } "
    + _body("/*add(&a[i], 1)|float x = 0; add(&x, 1); a[i] = x*/;"),
    "functor on threadgroup memory": "struct Op { float k; float operator()(float x) const { return k * x; } }; "
    "kernel void k(device float* a [[buffer(0)]]) { /*threadgroup|*/ Op op; op.k = 2; a[0] = op(a[0]); }",
    "table of a helper": "static float look(threadgroup const float* t, uint i) { return t[i]; } "
    "constant float table[2] = {1, 2}; " + _body("a[i] = look(/*table|s*/, i & 1);"),
}
OVERLOADS = {
    "atan2(half, float)": _body("a[i] = atan2(/*half(a[i])|a[i]*/, a[0]);"),
    "max(ushort, int)": _body("ushort n = ushort(i); a[i] = max(/*n|int(n)*/, 3);"),
    "min of size_t and uint": _body("a[i] = min(/*sizeof(float)|uint(sizeof(float))*/, i);"),
    "clamp(float, int, float)": _body("a[i] = clamp(a[i], /*0|0.0f*/, 1.0f);"),
    "step(half, float)": _body("a[i] = step(/*0.5h|0.5f*/, a[i]);"),
    "max of vector types": _body("half4 h = half4(1); a[i] = max(/*h|float4(h)*/, float4(a[0])).x;"),
    "dot of two types": _body("a[i] = dot(float3(a[0]), /*half3|float3*/(1));"),
    "cross of four": _body("/*float4|float3*/ v(a[0]); a[i] = cross(v, v).x;"),
    "fma of vectors": _body("half4 h(1); a[i] = float(fma(h, h, /*float4|half4*/(2)).x);"),
    "popcount(float)": _body("a[i] = popcount(/*a[i]|i*/);"),
    "exp of an int": _body("a[i] = exp(/*int(i)|float(i)*/);"),
    "isnan(int)": _body("a[i] = isnan(/*int(i)|a[i]*/) ? 1 : 0;"),
    "clz(float)": _body("a[i] = clz(/*a[i]|i*/);"),
    "quad_sum(long)": _body("a[i] = quad_sum(/*long(i)|int(i)*/);"),
    "simd_xor(float)": _body("a[i] = simd_xor(/*a[i]|i*/);"),
    "simd_max(long)": _body("a[i] = simd_max(/*long(i)|int(i)*/);"),
    "simd_sum(bfloat)": _body("bfloat b = bfloat(a[i]); a[i] = float(simd_sum(/*b|float(b)*/));"),
    "simd_shuffle of a struct": "struct S { float x; }; "
    + _body("S v = {1}; a[i] = /*simd_shuffle(v, 0).x|simd_shuffle(v.x, 0)*/;"),
    "as_type of another size": _body("a[i] = float(as_type<half2>(/*ushort|uint*/(i)).x);"),
}
VECTORS = {
    "half4 for float4": _body("float4 v = /*half4|float4*/(1); a[i] = v.x;"),
    "float4 for float3": _body("float3 v = /*float4|float3*/(1); a[i] = v.x;"),
    "vector for a scalar": _body("float2 v(1); a[i] = /*v|v.x*/;"),
    "scalar of a swizzle": _body("float4 v(1); a[i] = /*v.xy|v.y*/;"),
    "element twice in an assignment": _body("float4 v(1); v./*xx|xy*/ = float2(2); a[i] = v.x;"),
    "element that is not there": _body("float2 v(1); a[i] = v./*z|y*/;"),
    "two sets of names": _body("float4 v(1); float2 w = v./*xg|xy*/; a[i] = w.y;"),
    "too few elements": _body("float4 v = float4(1, 2, 3/*|, 4*/); a[i] = v.x;"),
    "too many elements": _body("float3 w(1); float2 v = float2(w/*, 1|.x, 1*/); a[i] = v.x;"),
    "half element into float vector": _body("float4 v(1); v.xy = /*half2|float2*/(1); a[i] = v.x;"),
    "condition of a vector": _body("float2 v(a[0]); if (/*v < 1.0f|all(v < 1.0f)*/) a[i] = 1;"),
    "remainder of floats": _body("float2 v(a[0]); a[i] = (/*v % 2.0f|fmod(v, 2.0f)*/).x;"),
    "bits of a float": _body("a[i] = float(/*a[0]|i*/ & 3);"),
    "matrix times a shorter vector": _body("float4x4 m(1.0f); a[i] = (m * /*float3|float4*/(1)).x;"),
    "matrices of two shapes": _body("float3x3 m(1.0f); /*float4x4|float3x3*/ n(1.0f); a[i] = (m * n)[0].x;"),
    "matrix of ints": _body("/*int2x2|float2x2*/ m(1); a[i] = float(m[0].x);"),
    "vector of five": _body("vec<float, /*5|4*/> v(1); a[i] = v.x;"),
    "vector of a struct": "struct S { float x; }; " + _body("vec</*S|float*/, 2> v; v.x = {}; a[i] = 1;"),
    "matrix of 4 by 4": _body("simdgroup_matrix<float, /*4, 4|8, 8*/> m(1); simdgroup_store(m, a, 8);"),
    "matrix product with three operands": _body(
        "simdgroup_float8x8 m(1), n(1); simdgroup_multiply_accumulate(m, n, n/*|, m*/); simdgroup_store(m, a, 8);"
    ),
    "ballot as a number": _body("ulong b = /*simd_ballot(i > 3)|ulong(simd_ballot(i > 3))*/; a[i] = float(b & 1);"),
    "array with one too many": _body("array<float, 2> v = {1, 2/*, 3|*/}; a[i] = v[1];"),
}
ATOMICS = {
    "sum of 64 bits": "kernel void k(device atomic_/*ulong|uint*/* n [[buffer(0)]]) { atomic_fetch_add_explicit(n, 1u, memory_order_relaxed); }",
    "bits of a float": "kernel void k(device atomic_/*float|uint*/* n [[buffer(0)]]) { atomic_fetch_or_explicit(n, 1u, memory_order_relaxed); }",
    "sum of bools": "kernel void k(device atomic_/*bool|int*/* n [[buffer(0)]]) { atomic_fetch_add_explicit(n, 1, memory_order_relaxed); }",
    "increment": "kernel void k(device atomic_int* n [[buffer(0)]]) { /*(*n)++|atomic_fetch_add_explicit(n, 1, memory_order_relaxed)*/; }",
    "assignment": "kernel void k(device atomic_int* n [[buffer(0)]]) { /**n = 1|atomic_store_explicit(n, 1, memory_order_relaxed)*/; }",
    "read as a number": "kernel void k(device atomic_int* n [[buffer(0)]], device int* o [[buffer(1)]]) "
    "{ o[0] = /**n|atomic_load_explicit(n, memory_order_relaxed)*/; }",
    "without an order": "kernel void k(device atomic_int* n [[buffer(0)]]) { atomic_fetch_add/*(n, 1)|_explicit(n, 1, memory_order_relaxed)*/; }",
    "plain int": "kernel void k(device /*int|atomic_int*/* n [[buffer(0)]]) { atomic_fetch_add_explicit(n, 1, memory_order_relaxed); }",
    "strong exchange": "kernel void k(device atomic_int* n [[buffer(0)]]) { int e = 0; "
    "atomic_compare_exchange_/*strong|weak*/_explicit(n, &e, 1, memory_order_relaxed, memory_order_relaxed); }",
    "expected value in device memory": "kernel void k(device atomic_int* n [[buffer(0)]], device int* o [[buffer(1)]]) { int e = o[0]; "
    "atomic_compare_exchange_weak_explicit(n, /*o|&e*/, 1, memory_order_relaxed, memory_order_relaxed); }",
    "memory_order_seq_cst": "kernel void k(device atomic_int* n [[buffer(0)]]) { atomic_store_explicit(n, 1, memory_order_/*seq_cst|relaxed*/); }",
    "acquire in an exchange": "kernel void k(device atomic_uint* n [[buffer(0)]]) { atomic_exchange_explicit(n, 1u, memory_order_/*acquire|relaxed*/); }",
    "barrier without flags": _body("threadgroup_barrier(/*|mem_flags::mem_none*/); a[i] = s[0];"),
    "barrier of a number": _body("threadgroup_barrier(/*1|mem_flags::mem_device*/); a[i] = s[0];"),
    "barrier of an unknown flag": _body("threadgroup_barrier(mem_flags::mem_/*shared|threadgroup*/); a[i] = s[0];"),
}
ARGUMENTS = {
    "kernel with a result": "kernel /*float|void*/ k(device float* a [[buffer(0)]]) { a[0] = 1; /*return 1;|*/ }",
    "one threadgroup index twice": _kernel(
        "threadgroup float* t [[threadgroup(0)]], threadgroup float* u [[threadgroup(/*0|1*/)]]", "t[0] = u[0] = a[0];"
    ),
    "negative index": "kernel void k(device float* a [[buffer(/*-1|1*/)]]) { a[0] = 1; }",
    "index of another argument as a sum": _kernel("device float* b [[buffer(/*1 - 1|1 + 1*/)]]", "b[0] = a[0];"),
    "misspelled builtin": _kernel("uint i [[thread_position_in_/*gird|grid*/]]"),
    "builtin on a pointer": _kernel("/*device uint*|uint*/ i [[thread_position_in_grid]]"),
    "struct by value": "struct P { uint n; }; " + _kernel("/*P p|constant P& p*/ [[buffer(1)]]"),
    "number by value": _kernel("/*float x|constant float& x*/ [[buffer(1)]]"),
    "argument without anything": _kernel("/*uint n|uint n [[threads_per_grid]]*/"),
    "host_name of a number": "template <typename T> kernel void k(device T* a [[buffer(0)]]) { a[0] = 1; } "
    'template [[host_name(/*3|"three"*/)]] kernel void k<float>(device float*);',
    "instance of other arguments": "template <typename T> kernel void k(device T* a [[buffer(0)]]) { a[0] = 1; } "
    'template [[host_name("x")]] kernel void k<float>(device /*half|float*/*);',
    "two kernels of one name": "kernel void k(device float* a [[buffer(0)]]) { a[0] = 1; } kernel void /*k|j*/(device float* a [[buffer(0)]]) { a[0] = 2; }",
    "thread limit that is not constant": "constant int n [[function_constant(0)]]; "
    "[[max_total_threads_per_threadgroup(/*n|64*/)]] kernel void k(device float* a [[buffer(0)]]) { a[0] = n; }",
    "kernel in a struct": "struct S { /*kernel|static*/ void k(device float* a /*[[buffer(0)]]|*/) { a[0] = 1; } };",
    "double buffer": _kernel("device /*double|float*/* b [[buffer(1)]]", "a[0] = 2 * b[0];"),
    "bool position": _kernel("/*bool|uint*/ i [[thread_position_in_grid]]"),
    "simdgroup index in a vector": _kernel("/*uint3|uint*/ i [[simdgroups_per_threadgroup]]"),
    "position in a struct": "struct P { uint x; }; " + _kernel("/*P|uint*/ i [[thread_position_in_grid]]"),
}
CONSTANTS = {
    "function constant that is not constant": "/*device|constant*/ bool on [[function_constant(0)]]; "
    + _kernel("uint i [[thread_position_in_grid]]"),
    "function constant with a value": "constant int n [[function_constant(0)]]/* = 3|*/; " + _body("a[i] = n;"),
    "function constant of a struct": "struct P { int x; }; constant /*P|int*/ p [[function_constant(0)]]; "
    + _body("a[i] = 1;"),
    "array of function constants": "constant int n/*[2]|*/ [[function_constant(0)]]; " + _body("a[i] = 1;"),
    "local function constant": "/*|constant int n [[function_constant(0)]];*/ "
    + _body("/*constant int n [[function_constant(0)]];|*/ a[i] = n;"),
    "function constant beyond the last index": "constant int n [[function_constant(/*65536|65535*/)]]; "
    + _body("a[i] = n;"),
    "function constant as a case": "constant int n [[function_constant(0)]]; "
    + _body("switch (int(i)) { case /*n|3*/: a[i] = n; }"),
    "function constant as a template argument": "constant int n [[function_constant(0)]]; template <int N> float f() { return N; } "
    + _body("a[i] = f</*n|3*/>() + n;"),
    "function constant in an assertion": "constant int n [[function_constant(0)]]; "
    + _body('static_assert(/*n|3*/ > 1, ""); a[i] = n;'),
    "assignment to a function constant": "constant int n [[function_constant(0)]]; "
    + _body("/*n = 3|int m = n; m = 3*/; a[i] = n;"),
    "table without values": "constant float table[2]/*| = {1, 2}*/; " + _body("a[i] = table[i & 1];"),
    "table from a function": "/*static|constexpr static*/ float half_of(float x) { return x / 2; } constant float h = half_of(3); "
    + _body("a[i] = h;"),
    "global without a space": "/*static const|constant*/ float table[2] = {1, 2}; " + _body("a[i] = table[i & 1];"),
    "thread global": "/*thread|constant*/ float g = 1; " + _body("a[i] = g;"),
    "device local": _body("/*device|*/ float x[2] = {}; x[i & 1] = 1; a[i] = x[0];"),
    "member in threadgroup memory": "struct S { /*threadgroup|*/ float x[2]; }; "
    + _body("S v; v.x[0] = 1; a[i] = v.x[0];"),
    "member in device memory": "struct S { /*device float|device float**/ x; }; " + _body("S v{a}; a[i] = 1; (void)v;"),
    "threadgroup variable with braces": "kernel void k(device float* a [[buffer(0)]]) { threadgroup float x/*{1}|*/; x = 1; a[0] = x; }",
    "threadgroup parameter by value": "float f(/*threadgroup float x|float x*/) { return x; } " + _body("a[i] = f(1);"),
}
LANGUAGE = {
    "header of C++": "#include </*vector|metal_math*/>\n" + _body("a[i] = 1;"),
    "std::min": _body("a[i] = /*std|metal*/::min(a[i], 1.0f);"),
    "printf": _body('/*printf("%f", a[i]);|*/ a[i] = 1;'),
    "expf": _body("a[i] = /*expf|exp*/(a[i]);"),
    "M_PI": _body("a[i] = /*M_PI|M_PI_F*/;"),
    "OpenCL's barrier": _body("/*barrier(1)|threadgroup_barrier(mem_flags::mem_threadgroup)*/; a[i] = s[0];"),
    "OpenCL's index": _body("a[/*get_global_id(0)|i*/] = 1;"),
    "OpenCL's space": _body("/*__global|device*/ float* p = a; p[i] = 1;"),
    "OpenCL's conversion": _body("a[i] = /*convert_float4(int4(1))|float4(int4(1))*/.x;"),
    "CUDA's index": _body("a[/*threadIdx.x|i*/] = 1;"),
    "CUDA's barrier": _body("/*__syncthreads()|threadgroup_barrier(mem_flags::mem_threadgroup)*/; a[i] = s[0];"),
    "CUDA's function": "/*__device__|inline*/ float f(float x) { return x; } " + _body("a[i] = f(1);"),
    "concept": "template <typename T> /*requires true|*/ T f(T x) { return x; } " + _body("a[i] = f(a[i]);"),
    "consteval": "/*consteval|constexpr*/ int f(int x) { return x; } " + _body("a[i] = f(1);"),
    "auto as a template parameter": "template </*auto|int*/ N> float f() { return N; } " + _body("a[i] = f<3>();"),
    "deduced class": "template <typename T> struct Box { T x; Box(T v) : x(v) {} }; " + _body("Box/*|<float>*/ b(a[i]); a[i] = b.x;"),
    "three-way comparison": _body("a[i] = (a[0] /*<=>|<=*/ a[1]) ? 1 : 0;"),
    "virtual base": "struct A { int x; }; struct B : /*virtual|public*/ A {}; " + _body("B b; b.x = 1; a[i] = b.x;"),
    "alignment of three": "struct alignas(/*3|4*/) S { char x; }; " + _body("S v; v.x = 1; a[i] = v.x;"),
    "header of a later version": "#include <metal_/*logging|math*/>\n" + _body("a[i] = 1;"),
    "parameter changed through const": "void f(thread const float& x) { /*x = 1|float y = x; (void)y*/; } " + _body("float x = 0; f(x); a[i] = x;"),
    "missing return type": "/*f|float f*/(float x) { return x; } " + _body("a[i] = f(1);"),
}  # fmt: skip
CLASSES = {
    "address spaces": SPACES,
    "overloads and types": OVERLOADS,
    "vectors and matrices": VECTORS,
    "atomics and barriers": ATOMICS,
    "arguments of kernels": ARGUMENTS,
    "constants and variables": CONSTANTS,
    "language": LANGUAGE,
}
