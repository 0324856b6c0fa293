"""Tests Metal's vectors: layout, constructors, every swizzle, operators, packed vectors, and refused source."""

import itertools

import numpy as np
import pytest
from msl_kernels import HEADER, INTEGERS, compile_metal, evaluate, refuse, run, type_name

SIZES = {"bool": 1, "char": 1, "uchar": 1, "short": 2, "ushort": 2, "int": 4, "uint": 4, "long": 8, "ulong": 8,
         "half": 2, "bfloat": 2, "float": 4}  # fmt: skip


def test_sizes_and_alignments() -> None:
    lines = []
    for name, size in SIZES.items():
        lines.append(f'static_assert(sizeof({name}) == {size} && alignof({name}) == {size}, "{name}");')
        for n, whole in ((2, 2), (3, 4), (4, 4)):
            lines.append(
                f'static_assert(sizeof({name}{n}) == {whole * size} && alignof({name}{n}) == {whole * size}, "");'
            )
            lines.append(
                f'static_assert(sizeof(packed_{name}{n}) == {n * size} && alignof(packed_{name}{n}) == {size}, "");'
            )
            lines.append(
                f'static_assert(is_same_v<{name}{n}, vec<{name}, {n}>>, "");'
                f'static_assert(is_same_v<packed_{name}{n}, packed_vec<{name}, {n}>>, "");'
            )
    lines += [
        'struct A { float x; float3 v; half h; }; static_assert(sizeof(A) == 48, "");',
        'struct B { float x; packed_float3 v; half h; }; static_assert(sizeof(B) == 20, "");',
        'static_assert(sizeof(float3x3) == 48 && sizeof(half4x2) == 16 && sizeof(float4x4) == 64, "");',
        'static_assert(sizeof(size_t) == 8 && sizeof(int8_t) == 1 && sizeof(uint16_t) == 2, "");',
        'static_assert(is_same_v<int64_t, long> && is_same_v<uint32_t, uint> && is_same_v<uint8_t, uchar>, "");',
    ]
    compile_metal("\n".join(lines))
    assert "static assertion failed" in refuse('static_assert(sizeof(float3) == 12, "");')


@pytest.mark.parametrize("metal", ["float", "half", "uchar", "long"])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_every_swizzle_reads(metal: str, width: int) -> None:
    dtype = {"float": np.float32, "half": np.float16, "uchar": np.uint8, "long": np.int64}[metal]
    value = np.array([3, 5, 7, 11], dtype)
    kernels, wanted = [], []
    # There is one kernel for each set of letters and first letter, because one kernel with all 680 names would take a
    # minute to compile.
    for letters, first in itertools.product(("xyzw"[:width], "rgba"[:width]), range(width)):
        lines, values = [], []
        for n in (1, 2, 3, 4):
            for rest in itertools.product(range(width), repeat=n - 1):
                picks = (first, *rest)
                name = "".join(letters[p] for p in picks)
                lines += [f"{{ auto s = v.{name}; *out++ = s{f'[{j}]' if n > 1 else ''}; }}" for j in range(n)]
                values += [value[p] for p in picks]
        kernels.append("\n".join(lines))
        wanted.append(values)
    library = compile_metal("".join(
        f"kernel void k{i}(device const {metal}* a [[buffer(0)]], device {metal}* out [[buffer(1)]]) {{\n"
        f"{metal}{width} v; for (int i = 0; i < {width}; ++i) v[i] = a[i];\n{body}\n}}\n"
        for i, body in enumerate(kernels)
    ))  # fmt: skip
    assert sum(len(values) for values in wanted) == 2 * sum(n * width**n for n in (1, 2, 3, 4))
    for i, values in enumerate(wanted):
        out = np.zeros(len(values), dtype)
        library.kernel(f"k{i}").launch(threads=1, group=1, buffers=[value, out])
        np.testing.assert_array_equal(out, values)


@pytest.mark.parametrize("form", ["", "packed_"])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_every_swizzle_without_repetition_writes(width: int, form: str) -> None:
    lines, wanted = [], []
    for letters in ("xyzw"[:width], "rgba"[:width]):
        for n in range(1, width + 1):
            for picks in itertools.permutations(range(width), n):
                name = "".join(letters[p] for p in picks)
                new = f"int{n}({', '.join(str(50 + j) for j in range(n))})" if n > 1 else "50"
                lines.append(f"{{ {form}int{width} v(1, 2{', 3' * (width > 2)}{', 4' * (width > 3)}); v.{name} = {new}; for (int i = 0; i < {width}; ++i) *out++ = v[i];"
                             f" v.{name} += 100; for (int i = 0; i < {width}; ++i) *out++ = v[i]; }}")  # fmt: skip
                value = np.arange(1, width + 1)
                for new_value in (50, 150):
                    value[list(picks)] = new_value + np.arange(n)
                    wanted.append(value.copy())
    out = np.zeros(width * len(wanted), np.int32)
    run("kernel void k(device int* out [[buffer(0)]]) {\n" + "\n".join(lines) + "\n}", out)
    np.testing.assert_array_equal(out.reshape(-1, width), wanted)


def test_swizzles_between_vectors() -> None:
    out = np.zeros((5, 4), np.float32)
    run("""kernel void k(device float4* out [[buffer(0)]]) {
  float4 v(1, 2, 3, 4), w(10, 20, 30, 40);
  v.xy += w.zw; out[0] = v;
  v.wzyx = w; out[1] = v;
  v.xz = w.yy * 2; out[2] = v;
  v.rgb = 7; out[3] = v;
  v.zw = v.xy; v.x++; --v.y; out[4] = v.wzyx.yxwz;
}""", out)  # fmt: skip
    np.testing.assert_array_equal(
        out, [[31, 42, 3, 4], [40, 30, 20, 10], [40, 30, 40, 10], [7, 7, 7, 10], [7, 7, 8, 6]]
    )


def test_constructors() -> None:
    source = """
constant float4 table[3] = {float4(1), {1, 2, 3, 4}, float4(float2(5, 6), 7, 8)};
struct Pair { float2 a; half3 b; };
kernel void k(device float* out [[buffer(0)]]) {
  float4 list[] = {float4(1, float3(2, 3, 4)), float4(int2(1, 2), half2(3, 4)), float4(float3(1, 2, 3), 4),
    float4(2.5f),
                   float4(true, uchar(2), half(3), 4.5f), {9, 8, 7, 6}, float4(packed_float2(1, 2), 3, 4),
                   float4(int4(1, -2, 3, -4)), table[0], table[1], table[2], float4(half4(0.5h))};
  for (float4 v : list) for (int i = 0; i < 4; ++i) *out++ = v[i];
  Pair p = {{1, 2}, half3(3)}; float3 w = {1, 2, 3}; constexpr float2 c = {4, 5.5}; float4 z{}; float2 s = 3;
  float rest[] = {p.a.y, p.b.z, w.z, c.y, z.w, s.y}; for (float x : rest) *out++ = x;
}"""
    out = np.zeros(54, np.float32)
    run(source, out)
    wanted = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, *[2.5] * 4, 1, 2, 3, 4.5, 9, 8, 7, 6, 1, 2, 3, 4, 1, -2, 3, -4]
    wanted += [1, 1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0.5, 0.5, 0.5, 0.5, 2, 3, 3, 5.5, 0, 3]
    np.testing.assert_array_equal(out, wanted)


OPERATORS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}


@pytest.mark.parametrize("dtype", INTEGERS, ids=type_name)
def test_integer_operators(dtype: type) -> None:
    info = np.iinfo(dtype)
    a, b = np.random.default_rng(1).integers(info.min, info.max, (2, 64), dtype, endpoint=True)
    b[b == 0] = 3
    metal = type_name(dtype)
    expressions = {n: f"a {o} b" for n, o in OPERATORS.items()}
    expressions |= {
        "scalar": f"a * {metal}(3) + {metal}(1)",
        "not": "~a",
        "neg": "-a",
        "shl": "a << (b & 7)",
        "shr": "a >> (b & 7)",
        "div": "a / b",
        "rem": "a % b",
        "update": "[&] { auto c = a; c += b; c ^= a; c--; return c; }()",
    }
    reference = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "scalar": lambda x, y: x * dtype(3) + dtype(1),
        "not": lambda x, y: ~x,
        "neg": lambda x, y: dtype(0) - x,
        "shl": lambda x, y: x << (y & dtype(7)),
        "shr": lambda x, y: x >> (y & dtype(7)),
        "div": lambda x, y: (
            np.abs(x.astype(object)) // np.abs(y.astype(object)) * np.sign(x.astype(object)) * np.sign(y.astype(object))
        ).astype(dtype),
        "rem": np.fmod,
        "update": lambda x, y: ((x + y) ^ x) - dtype(1),
    }
    with np.errstate(over="ignore"):
        if info.min < 0:
            a[a == info.min] += 1
        for name, results in evaluate(expressions, [a, b], metal).items():
            for (x, y), got in results:
                np.testing.assert_array_equal(got, reference[name](x, y), name)


COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
SIGNS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint8], ids=type_name)
def test_comparisons_give_bool(dtype: type) -> None:
    a, b = np.random.default_rng(2).integers(0, 4, (2, 64)).astype(dtype)
    if np.issubdtype(dtype, np.floating):
        a[:5], b[3:8] = np.nan, np.nan
    made = evaluate({n: f"a {s} b" for n, s in SIGNS.items()}, [a, b], "bool")
    logic = evaluate({"logic": "(a < b) && !(a == b) || (b > a)"}, [a, b], "bool")["logic"]
    for name in SIGNS:
        for (x, y), got in made[name]:
            np.testing.assert_array_equal(got, COMPARISONS[name](x, y))
    for (x, y), got in logic:
        np.testing.assert_array_equal(got, x < y)


def test_select_any_all() -> None:
    a, b = np.random.default_rng(3).normal(0, 1, (2, 64)).astype(np.float32)
    made = evaluate({"select": "select(a, b, a < b)", "by_scalar": "select(a, b, true)"}, [a, b], "float")
    for (x, y), got in made["select"]:
        np.testing.assert_array_equal(got, np.maximum(x, y))
    for (_, y), got in made["by_scalar"]:
        np.testing.assert_array_equal(got, y)
    made = evaluate({"any": "any(a < b)", "all": "all(a < b)"}, [a, b], "bool", widths=[4])
    less = a < b
    four = np.stack([np.roll(less, -j) for j in range(4)])
    np.testing.assert_array_equal(made["any"][0][1], four.any(0))
    np.testing.assert_array_equal(made["all"][0][1], four.all(0))


def test_packed_vectors() -> None:
    source = """
kernel void k(device packed_float3* a [[buffer(0)]], device const packed_half4* h [[buffer(1)]],
    uint i [[thread_position_in_grid]]) {
  float3 v = a[i]; half4 w = h[i];
  a[i] = v * 2 + float3(w.xyz); a[i] += v; a[i].y = -a[i][1]; a[i].zx = a[i].xz;
  a[i] = a[i] + packed_float3(1, 2, 3) * 2.0; if (any(a[i] > float3(1e9))) a[i] = 0;
}"""
    a = np.arange(1, 13, dtype=np.float32).reshape(4, 3)
    h = np.arange(16, dtype=np.float16).reshape(4, 4)
    wanted = (a * 3 + h[:, :3]) * [1, -1, 1]
    wanted = wanted[:, [2, 1, 0]] + [2, 4, 6]
    run(source, a, h, threads=4)
    np.testing.assert_array_equal(a, wanted)


def test_geometric_functions() -> None:
    a, b = np.random.default_rng(4).normal(0, 1, (2, 50)).astype(np.float32)
    three = lambda x: np.stack([np.roll(x, -j) for j in range(3)], -1).astype(np.float64)  # noqa: E731
    names = {
        "dot": "dot(a, b)",
        "length": "length(a)",
        "distance": "distance(a, b)",
        "normalize": "normalize(a)",
        "cross": "cross(a, b)",
        "length_squared": "length_squared(a)",
        "distance_squared": "distance_squared(a, b)",
        "faceforward": "faceforward(a, b, a - b)",
        "reflect": "reflect(a, normalize(b))",
        "refract": "refract(normalize(a), normalize(b), 1.5f)",
    }
    made = evaluate(names, [a, b], "float", widths=[3])
    u, v = three(a), three(b)
    unit = v / np.linalg.norm(v, axis=1, keepdims=True)
    incident = u / np.linalg.norm(u, axis=1, keepdims=True)
    cosine = (incident * unit).sum(1, keepdims=True)
    k = 1 - 1.5**2 * (1 - cosine**2)  # negative: total reflection
    wanted = {
        "dot": (u * v).sum(1),
        "length": np.linalg.norm(u, axis=1),
        "distance": np.linalg.norm(u - v, axis=1),
        "normalize": u / np.linalg.norm(u, axis=1, keepdims=True),
        "cross": np.cross(u, v),
        "length_squared": (u * u).sum(1),
        "distance_squared": ((u - v) ** 2).sum(1),
        "faceforward": np.where((v * (u - v)).sum(1, keepdims=True) < 0, u, -u),
        "reflect": u - 2 * (u * unit).sum(1, keepdims=True) * unit,
        "refract": np.where(k < 0, 0, 1.5 * incident - (1.5 * cosine + np.sqrt(np.maximum(k, 0))) * unit),
    }
    for name, results in made.items():
        for j, (_, got) in enumerate(results):
            value = wanted[name][:, j] if wanted[name].ndim == 2 else wanted[name]
            assert np.abs(got - value).max() <= 2e-6, name


def test_matrices() -> None:
    source = """
kernel void k(device const float4x4* m [[buffer(0)]], device float4* out [[buffer(1)]]) {
  float4x4 a = m[0], b = m[1]; float4 v = a[1];
  out[0] = a * v; out[1] = v * a; float4x4 c = a * b; for (int i = 0; i < 4; ++i) out[2 + i] = c[i];
  float4x4 t = transpose(a) + b * 2.0 - float4x4(1.0); for (int i = 0; i < 4; ++i) out[6 + i] = t[i];
  float3x2 p(1, 2, 3, 4, 5, 6); out[10] = float4(p * float3(1, 10, 100), p[2]);
  out[11] = float4(determinant(a), determinant(float2x2(1, 2, 3, 4)), determinant(float3x3(2)), a == a);
}"""
    m = np.random.default_rng(5).normal(0, 1, (2, 4, 4)).astype(np.float32)  # [column][row]
    out = np.zeros((12, 4), np.float32)
    run(source, m, out)
    a, b = m.astype(np.float64).transpose(0, 2, 1)
    v = a[:, 1]
    wanted = [a @ v, v @ a, *(a @ b).T, *(a.T + 2 * b - np.eye(4)).T, [531, 642, 5, 6], [np.linalg.det(a), -2, 8, 1]]
    assert np.abs(out - wanted).max() < 4e-6


REFUSED = {
    "cut by a constructor": ("float4 v; float3 w(v);", "no matching"),
    "sum of two element types": ("float4 v; int4 w; auto x = v + w;", "invalid operands"),
    "sum of two sizes": ("float4 v; float3 w; auto x = v + w;", "invalid operands"),
    "bits of a float vector": ("float4 v; auto x = v & v;", "invalid operands"),
    "member of a scalar": ("float f; float x = f.x;", "is not a structure or union"),
    "element of a swizzle written": ("float4 v; v.xy.x = 1;", "not assignable"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, message = REFUSED[name]
    assert message in refuse(f"kernel void k(device float* a [[buffer(0)]]) {{ {body} }}")


def test_vectors_are_declared_by_any_of_metals_headers() -> None:
    names = [
        "array",
        "atomic",
        "common",
        "compute",
        "geometric",
        "integer",
        "limits",
        "math",
        "matrix",
        "pack",
        "quadgroup",
        "relational",
        "simdgroup",
        "simdgroup_matrix",
        "stdlib",
        "type_traits",
        "types",
        "uniform",
    ]
    assert HEADER.count("#include") == 1
    compile_metal(
        "".join(f"#include <metal_{n}>\n" for n in names) + "using metal::vec; float4 f(vec<float, 4> v) { return v; }"
    )
