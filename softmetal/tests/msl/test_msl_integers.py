"""Tests integer functions, products of 24 bits, and packing."""

import numpy as np
import pytest
from msl_kernels import INTEGERS, evaluate, run, type_name

RNG = np.random.default_rng


def _bits(x: int, width: int) -> str:
    return format(x & ((1 << width) - 1), f"0{width}b")


@pytest.mark.parametrize("dtype", INTEGERS, ids=type_name)
def test_integer_functions(dtype: type) -> None:
    info = np.iinfo(dtype)
    w = info.bits
    signed = info.min < 0
    a, b, c = RNG(9).integers(info.min, info.max, (3, 48), dtype, endpoint=True)
    a[:4] = [0, 1, info.max, info.min]
    wrap = lambda v: int.from_bytes((v & ((1 << w) - 1)).to_bytes(w // 8, "little"), "little", signed=signed)  # noqa: E731
    clip = lambda v: min(max(v, info.min), info.max)  # noqa: E731
    reference = {
        "popcount": ("popcount(a)", lambda x, y, z: _bits(x, w).count("1")),
        "clz": ("clz(a)", lambda x, y, z: (_bits(x, w) + "1").index("1")),
        "ctz": ("ctz(a)", lambda x, y, z: (_bits(x, w)[::-1] + "1").index("1")),
        "reverse": ("reverse_bits(a)", lambda x, y, z: wrap(int(_bits(x, w)[::-1], 2))),
        "rotate": (
            "rotate(a, decltype(a)(b & 15))",
            lambda x, y, z: wrap(int(_bits(x, w)[(y & 15) % w :] + _bits(x, w)[: (y & 15) % w], 2)),
        ),
        "addsat": ("addsat(a, b)", lambda x, y, z: clip(x + y)),
        "subsat": ("subsat(a, b)", lambda x, y, z: clip(x - y)),
        "hadd": ("hadd(a, b)", lambda x, y, z: (x + y) >> 1),
        "rhadd": ("rhadd(a, b)", lambda x, y, z: (x + y + 1) >> 1),
        "mulhi": ("mulhi(a, b)", lambda x, y, z: (x * y) >> w),
        "madhi": ("madhi(a, b, c)", lambda x, y, z: wrap(((x * y) >> w) + z)),
        "madsat": ("madsat(a, b, c)", lambda x, y, z: clip(x * y + z)),
        "min": ("min(a, b)", lambda x, y, z: min(x, y)),
        "max": ("max(a, b)", lambda x, y, z: max(x, y)),
        "clamp": ("clamp(a, min(b, c), max(b, c))", lambda x, y, z: min(max(x, min(y, z)), max(y, z))),
        "median3": ("median3(a, b, c)", lambda x, y, z: sorted((x, y, z))[1]),
        "abs": ("abs(a)", lambda x, y, z: wrap(abs(x))),
        "extract": ("extract_bits(a, 2, 5)", lambda x, y, z: ((x >> 2) & 31) - (32 if signed and (x >> 6) & 1 else 0)),
        "insert": ("insert_bits(a, b, 1, 4)", lambda x, y, z: wrap((x & ~0x1E) | ((y << 1) & 0x1E))),
    }
    made = evaluate({n: e for n, (e, _) in reference.items()}, [a, b, c], type_name(dtype))
    for name, results in made.items():
        for (x, y, z), got in results:
            wanted = [reference[name][1](*map(int, v)) for v in zip(x, y, z, strict=True)]
            np.testing.assert_array_equal(got, np.array(wanted, dtype), name)
    unsigned = type_name(f"uint{w}")
    for (x, y), got in evaluate({"d": "absdiff(a, b)"}, [a, b], unsigned)["d"]:
        np.testing.assert_array_equal(got, [abs(int(p) - int(q)) for p, q in zip(x, y, strict=True)])


def test_24_bit_products() -> None:
    a, b = RNG(10).integers(-(1 << 23), 1 << 23, (2, 64)).astype(np.int32)
    made = evaluate({"mul": "mul24(a, b)", "mad": "mad24(a, b, a)"}, [a, b], "int")
    for (x, y), got in made["mul"]:
        np.testing.assert_array_equal(got, (x.astype(np.int64) * y).astype(np.int32))
    for (x, y), got in made["mad"]:
        np.testing.assert_array_equal(got, (x.astype(np.int64) * y + x).astype(np.int32))


def test_packing() -> None:
    source = """
kernel void k(device const float4* a [[buffer(0)]], device uint* w [[buffer(1)]], device float4* back [[buffer(2)]]) {
  w[0] = pack_float_to_unorm4x8(a[0]); w[1] = pack_float_to_snorm4x8(a[0]); w[2] = pack_float_to_unorm2x16(a[0].xy);
  w[3] = pack_float_to_snorm2x16(a[0].zw);
  back[0] = unpack_unorm4x8_to_float(w[0]); back[1] = unpack_snorm4x8_to_float(w[1]);
  back[2] = float4(unpack_unorm2x16_to_float(w[2]), unpack_snorm2x16_to_float(w[3]));
}"""
    a = np.float32([[0.1, 2.0, -0.5, -3.0]])
    w, back = np.zeros(4, np.uint32), np.zeros((3, 4), np.float32)
    run(source, a, w, back)
    unorm, snorm = np.clip(a[0], 0, 1).astype(np.float64), np.clip(a[0], -1, 1).astype(np.float64)
    np.testing.assert_array_equal(w[0].tobytes(), np.rint(unorm * 255).astype(np.uint8).tobytes())
    np.testing.assert_array_equal(w[1].tobytes(), np.rint(snorm * 127).astype(np.int8).tobytes())
    np.testing.assert_array_equal(w[2].tobytes(), np.rint(unorm[:2] * 65535).astype(np.uint16).tobytes())
    np.testing.assert_array_equal(w[3].tobytes(), np.rint(snorm[2:] * 32767).astype(np.int16).tobytes())
    np.testing.assert_allclose(back[0], np.rint(unorm * 255) / 255, rtol=1e-6)
    np.testing.assert_allclose(back[1], np.rint(snorm * 127) / 127, rtol=1e-6)
