"""The operators in NumPy fp64, written from the definitions of the formats, independently of the package's code."""

from dataclasses import dataclass, replace

import numpy as np
import torch

# Tests with full grids use the formats of 4 bits. Wider formats have the same rules for groups, scales and zeros, so
# tests use only a sample of their grid.
FORMATS = ("uint4b8", "uint4", "uint4_bias", "float4_e2m1", "nvfp4", "mxfp4", "lut4")
EIGHT_BITS = ("uint8b128", "uint8", "uint8_bias", "float8_e4m3", "mxfp8")
PLANES = ("uint5b16", "uint5", "uint5_bias", "uint6b32", "uint6", "uint6_bias")
WIDE = (*EIGHT_BITS, *PLANES)
ANY_FORMAT = (*FORMATS, *WIDE)
# The offset that a format subtracts from every code.
OFFSETS = {"uint4b8": 8, "uint5b16": 16, "uint6b32": 32, "uint8b128": 128}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GROUP_SIZES = (16, 32, 64, 128, 256)
FIXED_GROUP_SIZES = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}

# OCP MX v1.0: sign, two exponent bits (bias 1), one mantissa bit.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
# The smallest positive results. Every device keeps fp16 subnormals; devices may flush fp32 and bf16 subnormals.
TINY = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126, torch.float32: 2.0**-126}


def code_bits(weight_format: str) -> int:
    return int(weight_format[4]) if weight_format in PLANES else 8 if weight_format in EIGHT_BITS else 4


def word_bytes(weight_format: str, K: int, N: int) -> int:
    """Returns the size of `b_packed` in bytes."""
    return K * N if weight_format in EIGHT_BITS else K * N // 2


def dtypes_in_turn(turn: int, whole: bool) -> tuple[torch.dtype, ...]:
    """Returns all dtypes if `whole` is true, and otherwise only DTYPES[turn % 3].

    Use this to test a grid of two axes with one dtype at each point. If `turn` is the sum of the point's two indices,
    each value of each axis is tested with every dtype.
    """
    return DTYPES if whole else (DTYPES[turn % 3],)


def e4m3(codes: np.ndarray) -> np.ndarray:
    codes = codes.astype(np.int64)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value = np.where((codes & 127) == 127, np.nan, value)
    return np.where(codes & 128, -value, value)


def e8m0(codes: np.ndarray) -> np.ndarray:
    return np.where(codes == 255, np.nan, 2.0 ** (codes.astype(np.float64) - 127))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy() if tensor.is_floating_point() else tensor.cpu().numpy()


def pack(codes: np.ndarray, bits: int = 4) -> torch.Tensor:
    """Packs uint8 codes `[K, N]` into int32 words `[K * bits / 32, N]`. The lowest bits of a word hold the lowest k."""
    K, N = codes.shape
    count = 32 // bits
    shifts = (bits * np.arange(count, dtype=np.uint64))[None, :, None]
    words = (codes.reshape(K // count, count, N).astype(np.uint64) << shifts).sum(axis=1)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


# In a word of the second plane, a code's upper bits begin at the sum of two numbers (docs/formats/formats.md): one for
# the k inside of a group of eight, and one for the group.
FIELDS = {5: (0, 4, 1, 5, 16, 20, 17, 21), 6: (0, 4, 2, 6, 16, 20, 18, 22)}
BLOCKS = {5: (0, 2, 8, 10), 6: (0, 8)}


def pack_high(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Packs the upper bits of uint8 codes `[K, N]` of 5 or 6 bits into int32 words."""
    K, N = codes.shape
    per_word = 8 * len(BLOCKS[bits])
    words = np.zeros((-(-K // per_word), N), dtype=np.uint32)
    for k in range(K):
        place = BLOCKS[bits][k // 8 % len(BLOCKS[bits])] + FIELDS[bits][k % 8]
        words[k // per_word] |= (codes[k] >> 4).astype(np.uint32) << np.uint32(place)
    return torch.from_numpy(words.view(np.int32))


@dataclass
class Weight:
    """A packed weight, the exact value of each element, and the magnitude of each element in the error bound.

    The arrays are fp64 `[K, N]`, in packed order of k.

    Attributes:
        b_packed: the codes.
        scales: the scales of the groups, or their codes.
        arguments: the keyword arguments of gemm and dequantize.
        exact: the weight w.
        magnitude: what an element adds to the error bound per unit of its activation. It is s (|q| + |z|) if kernels
            apply zero points at the end of a group, and |w| otherwise.
        raw_magnitude: the same for kernels that sum raw codes. For these, a fixed offset counts as a zero point.
        steps: |s| + magnitude. If fp32 flushes an activation to zero, the error is at most the activation times this.
    """

    b_packed: torch.Tensor
    scales: torch.Tensor
    arguments: dict
    exact: np.ndarray
    magnitude: np.ndarray
    raw_magnitude: np.ndarray
    steps: np.ndarray

    def to(self, device: str) -> "Weight":
        moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.arguments.items()}
        return replace(self, b_packed=self.b_packed.to(device), scales=self.scales.to(device), arguments=moved)


def make_weight(
    weight_format: str,
    K: int,
    N: int,
    group_size: int,
    *,
    scales_dtype: torch.dtype = torch.float16,
    zeros_dtype: torch.dtype | None = None,
    super_dtype: torch.dtype | None = None,
    global_scale_shape: tuple[int, ...] | None = None,
    seed: int = 0,
    codes: np.ndarray | None = None,
    exponent: int = 0,
    block_scales: bool = False,
) -> Weight:
    """Returns a random weight of a format. All scales are multiplied by 2^exponent. E4M3 codes are finite.

    A format with a fixed group size has this size, whatever `group_size` is.
    With `super_dtype`, scales of formats with floating scales have two levels; `scales_dtype` is then uint8 or int8.
    Biases also have two levels if `zeros_dtype` is uint8. With `block_scales`, one scale is for 128 columns.
    """
    group_size = FIXED_GROUP_SIZES.get(weight_format, group_size)
    rng = np.random.default_rng([seed, K, N, group_size])
    bits = code_bits(weight_format)
    is_e4m3 = weight_format in ("float8_e4m3", "mxfp8")
    if codes is None:
        codes = rng.integers(0, 1 << bits, (K, N), dtype=np.uint8)
        if is_e4m3:
            codes[codes & 127 == 127] -= 1
    largest = (1 << bits) - 1
    G = -(-K // group_size)
    group = np.arange(K) // group_size
    arguments: dict = {"weight_format": weight_format, "group_size": group_size}
    q = codes.astype(np.float64)

    if weight_format == "nvfp4":
        scales = torch.from_numpy(
            rng.integers(0x20, 0x60, (G, N), dtype=np.uint8) | (rng.random((G, N)) < 0.1) * np.uint8(128)
        )
        s = e4m3(scales.numpy())
        if global_scale_shape is not None:
            size = [N if d == -1 else d for d in global_scale_shape]
            arguments["global_scale"] = torch.from_numpy(np.asarray(rng.uniform(0.01, 0.1, size), dtype=np.float32))
            arguments["global_scale"] *= 2.0**exponent
            s = (s * arguments["global_scale"].numpy().astype(np.float64)).astype(np.float32).astype(np.float64)
    elif weight_format in ("mxfp4", "mxfp8"):
        scales = torch.from_numpy(rng.integers(115 + exponent, 128 + exponent, (G, N), dtype=np.uint8))
        s = e8m0(scales.numpy())
    elif super_dtype is not None:
        negative = 64 if scales_dtype == torch.int8 else 0
        scales = torch.from_numpy(rng.integers(0, 128, (G, N)) - negative).to(scales_dtype)
        arguments["super_scales"], s = _two_levels(rng, scales, K, group_size, super_dtype, 2.0 ** (exponent - 10))
    else:
        shape = (G, N // 128 if block_scales else N)
        sizes = rng.uniform(0.5, 1.5, shape) / 16 * rng.choice([1.0, 1.0, 1.0, -1.0], shape)
        scales = torch.from_numpy(sizes * 2.0**exponent).to(scales_dtype)
        s = to_numpy(scales).repeat(128 if block_scales else 1, axis=1)
    s = s[group]

    offset = OFFSETS.get(weight_format)
    if offset is not None:
        exact = (q - offset) * s
        magnitude = np.abs(exact)
    elif weight_format in ("uint4", "uint5", "uint6", "uint8"):
        if zeros_dtype in (None, torch.uint8):
            zeros = torch.from_numpy(rng.integers(0, min(largest + 2, 256), (G, N), dtype=np.uint8))
        else:
            zeros = torch.from_numpy(rng.uniform(-1, largest + 2, (G, N))).to(zeros_dtype)
        z = to_numpy(zeros).astype(np.float64)[group]
        exact, magnitude = (q - z) * s, (q + np.abs(z)) * np.abs(s)
        arguments["zeros"] = zeros
    elif weight_format.endswith("_bias"):
        if super_dtype is not None and zeros_dtype == torch.uint8:
            zeros = torch.from_numpy(rng.integers(0, 64, (G, N), dtype=np.uint8))
            arguments["super_zeros"], b = _two_levels(rng, zeros, K, group_size, super_dtype, -(2.0 ** (exponent - 6)))
        else:
            zeros = torch.from_numpy(rng.uniform(-1, 1, (G, N)) * 2.0**exponent).to(zeros_dtype or scales_dtype)
            b = to_numpy(zeros)
        b = b[group]
        exact, magnitude = q * s + b, q * np.abs(s) + np.abs(b)
        arguments["zeros"] = zeros
    elif weight_format == "lut4":
        values = np.random.default_rng(0).uniform(-1, 1, 16)  # one table for all seeds, because experts share it
        arguments["lut"] = torch.from_numpy(np.sort(values).astype(np.float32))
        exact = arguments["lut"].numpy().astype(np.float64)[codes] * s
        magnitude = np.abs(exact)
    else:
        exact = (e4m3(codes) if is_e4m3 else E2M1[codes]) * s
        magnitude = np.abs(exact)
    raw_magnitude = magnitude if offset is None else (q + offset) * np.abs(s)
    if weight_format in PLANES:
        arguments["b_high"] = pack_high(codes, bits)
    words = pack(codes & 15, 4) if weight_format in PLANES else pack(codes, bits)
    return Weight(words, scales, arguments, exact, magnitude, raw_magnitude, np.abs(s) + magnitude)


def _two_levels(
    rng: np.random.Generator, codes: torch.Tensor, K: int, group_size: int, dtype: torch.dtype, unit: float
) -> tuple[torch.Tensor, np.ndarray]:
    """Returns random scales `[ceil(K / 256), N]` of blocks of 256 k, and their fp32 products with the codes."""
    values = torch.from_numpy(rng.uniform(0.5, 1.5, (-(-K // 256), codes.shape[1])) * unit).to(dtype)
    rows = np.arange(codes.shape[0]) * group_size // 256
    products = codes.numpy().astype(np.float64) * to_numpy(values)[rows]
    return values, products.astype(np.float32).astype(np.float64)


def planned(M: int, weight: Weight, dtype: torch.dtype):
    """Returns the plan of a product of M rows on this machine's GPU."""
    # Imported here because `make mutate` reads this file without the built package.
    from torch_marlin_metal.gpu.planning import plan

    K, N = weight.exact.shape
    zeros = weight.arguments.get("zeros")
    return plan(
        M,
        N,
        K,
        weight_format=weight.arguments["weight_format"],
        group_size=weight.arguments["group_size"],
        dtype=dtype,
        scales_dtype=weight.scales.dtype if weight.scales.dtype in DTYPES else None,
        zeros_dtype=torch.uint8 if zeros is None else zeros.dtype,
    )


def sums_raw_codes(device: str) -> bool:
    """Returns whether a device has a kernel that sums codes before it subtracts a fixed offset.

    On mps, gemv is such a kernel. Tests of products on mps therefore use the larger bound of gemv and need not ask the
    planner which kernel computes the product. A test that names a kernel uses that kernel's bound.
    """
    return device == "mps"


def gemm(
    a: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    perm: np.ndarray | None = None,
    raw_codes: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the exact product of the rounded inputs and, for each element, the error bound for a's dtype.

    `raw_codes` is for kernels that sum the codes of uint4b8 before they subtract the offset.
    """
    rows = to_numpy(a)
    if perm is not None:
        rows = rows[..., perm]
    exact = rows @ weight.exact
    weighted = np.abs(rows) @ (weight.raw_magnitude if raw_codes else weight.magnitude)
    if bias is not None:
        exact = exact + to_numpy(bias)
        weighted = weighted + np.abs(to_numpy(bias))
    flushed = TINY[torch.float32] * weight.steps.sum(0)
    return exact, UNIT_ROUNDOFF[a.dtype] * np.abs(exact) + TINY[a.dtype] + flushed + 16 * 2.0**-24 * weighted


def check_gemm(result: torch.Tensor, exact: np.ndarray, bound: np.ndarray) -> float:
    """Asserts that each element is within its bound, or is the right infinity if the dtype cannot represent the result.

    Returns the largest error / bound.
    """
    got = to_numpy(result)
    assert got.shape == exact.shape, (got.shape, exact.shape)
    largest = torch.finfo(result.dtype).max
    beyond = np.abs(exact) - bound > largest
    assert np.array_equal(got[beyond], np.copysign(np.inf, exact[beyond]))
    unsure = (np.abs(exact) + bound > largest) & np.isinf(got) & (np.sign(got) == np.sign(exact))
    inside = ~beyond & ~unsure
    share = np.abs(got - exact)[inside] / bound[inside]
    worst = float(share.max()) if share.size else 0.0
    assert worst <= 1.0, f"error is {worst:.3g} times the bound"  # a NaN fails too
    return worst
