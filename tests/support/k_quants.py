"""Encodes weights as the k-quants of GGUF files, rounded to the nearest code. The package gguf only decodes them.

The layouts are those of ggml-common.h and of the decoders in ggml-quants.c (llama.cpp). This encoder does not search
for the best scale, so its errors are larger than llama.cpp's. To check a layout, decode it with gguf.
"""

import numpy as np

BLOCK = 256
Bytes = np.ndarray


def _half(values: np.ndarray) -> Bytes:
    """Returns fp16 numbers as bytes `[B, 2]`."""
    return values.astype(np.float16).reshape(-1, 1).view(np.uint8)


def _divided(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.divide(values, by, out=np.zeros(np.broadcast_shapes(values.shape, by.shape), np.float32), where=by != 0)


def _signed(x: np.ndarray, largest: int, scale_limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes `[B, G, n]` from -largest to largest - 1, the codes of the groups' scales, and d `[B, 1]`."""
    scale = np.abs(x).max(2) / largest
    d = (scale.max(1, keepdims=True) / scale_limit).astype(np.float16).astype(np.float32)
    sc = np.rint(_divided(scale, d)).clip(0, scale_limit)
    return np.rint(_divided(x, (d * sc)[..., None])).clip(-largest, largest - 1), sc, d


def _with_minimum(x: np.ndarray, largest: int, scale_limit: int) -> tuple[np.ndarray, ...]:
    """Returns codes from 0 to `largest`, the codes of scales and minimums, d and dmin."""
    low = -np.minimum(x.min(2), 0)
    scale = (x.max(2) + low) / largest
    d, dmin = ((one.max(1, keepdims=True) / scale_limit).astype(np.float16).astype(np.float32) for one in (scale, low))
    sc, m = (np.rint(_divided(one, by)).clip(0, scale_limit) for one, by in ((scale, d), (low, dmin)))
    q = np.rint(_divided(x + (dmin * m)[..., None], (d * sc)[..., None])).clip(0, largest)
    return q, sc.astype(np.uint8), m.astype(np.uint8), d, dmin


def _six_bits(sc: np.ndarray, m: np.ndarray) -> Bytes:
    first = [one[:, :4] | (one[:, 4:] >> 4) << 6 for one in (sc, m)]
    return np.concatenate([*first, (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4], 1)


def _nibbles(q: np.ndarray, run: int) -> Bytes:
    """Packs 4-bit codes `[B, 256]`: of two runs, the first fills the low nibbles of `run` bytes, the second the high ones."""
    runs = q.reshape(len(q), -1, 2, run)
    return ((runs[:, :, 0] & 15) | (runs[:, :, 1] & 15) << 4).reshape(len(q), -1)


def _planes(q: np.ndarray, bits: int, run: int) -> Bytes:
    """Packs codes of 1 or 2 bits `[B, 256]`. Each of 8 / bits runs fills one bit position of the same `run` bytes."""
    runs = q.reshape(len(q), -1, 8 // bits, run)
    parts = [runs[:, :, part] << bits * part for part in range(8 // bits)]
    return np.bitwise_or.reduce(parts).reshape(len(q), -1)


def _q2_k(x: np.ndarray) -> list[Bytes]:
    q, sc, m, d, dmin = _with_minimum(x.reshape(-1, 16, 16), 3, 15)
    return [sc | m << 4, _planes(q.astype(np.uint8).reshape(-1, 256), 2, 32), _half(d), _half(dmin)]


def _q3_k(x: np.ndarray) -> list[Bytes]:
    q, sc, d = _signed(x.reshape(-1, 16, 16), 4, 31)
    codes, factors = (q + 4).astype(np.uint8).reshape(-1, 256), (sc + 32).astype(np.uint8)
    low = (factors[:, :8] & 15) | (factors[:, 8:] & 15) << 4
    high = np.bitwise_or.reduce([(factors[:, 4 * part : 4 * part + 4] >> 4) << 2 * part for part in range(4)])
    return [_planes(codes >> 2, 1, 32), _planes(codes & 3, 2, 32), low, high, _half(d)]


def _q4_k(x: np.ndarray) -> list[Bytes]:
    q, sc, m, d, dmin = _with_minimum(x.reshape(-1, 8, 32), 15, 63)
    return [_half(d), _half(dmin), _six_bits(sc, m), _nibbles(q.astype(np.uint8), 32)]


def _q5_k(x: np.ndarray) -> list[Bytes]:
    q, sc, m, d, dmin = _with_minimum(x.reshape(-1, 8, 32), 31, 63)
    codes = q.astype(np.uint8).reshape(-1, 256)
    return [_half(d), _half(dmin), _six_bits(sc, m), _planes(codes >> 4, 1, 32), _nibbles(codes, 32)]


def _q6_k(x: np.ndarray) -> list[Bytes]:
    q, sc, d = _signed(x.reshape(-1, 16, 16), 32, 127)
    codes = (q + 32).astype(np.uint8).reshape(-1, 256)
    return [_nibbles(codes, 64), _planes(codes >> 4, 2, 32), sc.astype(np.int8).view(np.uint8), _half(d)]


ENCODERS = {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}


def encode(values: np.ndarray, kind: str) -> Bytes:
    """Encodes `[..., K]` as blocks of a k-quant, uint8 `[..., bytes per row]`. K is a multiple of 256."""
    parts = ENCODERS[kind](values.reshape(-1, BLOCK).astype(np.float32))
    return np.concatenate(parts, 1).reshape(*values.shape[:-1], -1)
