"""Cases of MLX's attention kernels: one pass and two passes for few queries, tiles for many."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from .case import Array, Case, Generator, Launch, Launches, outputs, stored

_TILED_HEADERS = ("steel/attn/kernels/steel_attention.h",)
_WORDS = {"float32": "float", "float16": "float16_t", "bfloat16": "bfloat16_t"}
_OFF: dict[str, bool | int] = dict.fromkeys(
    ("has_mask", "query_transposed", "bool_mask", "float_mask", "has_sinks", "do_causal"), False
)
# The number of query heads that one simdgroup computes if 8 heads share a key head. This number is part of the mangled
# names of the kernel's variables.
_HEADS_PER_SIMDGROUP = 8


def _vector_launches(name: str, size: int, queries: int) -> Launches:
    def launches(rng: Generator) -> list[Launch]:
        found = []
        for n in (77, 130):
            heads, kv_heads = 4, 2
            shapes = ((heads, queries, size), (kv_heads, n, size), (kv_heads, n, size))
            q, k, v = (stored(rng.normal(0, 1, shape), name) for shape in shapes)
            stride = [np.uint64(n * size), np.uint64(size)]
            buffers = [q, k, v, outputs(q.shape, name), heads // kv_heads, n, *stride, *stride, 0.125]
            found.append(Launch(f"{queries} queries, {n} keys", buffers, (1024, 1, 1), groups=(heads, queries, 1)))
        return found

    return launches


def _steel_attention_launches(name: str, tile: tuple[int, ...], q_length: int, k_length: int
                              ) -> Launches:  # fmt: skip
    def launches(rng: Generator) -> list[Launch]:
        BQ, BK, D, WM = tile
        heads, kv_heads = 2, 1
        q = stored(rng.normal(0, 1, (heads, q_length, D)), name)
        k, v = (stored(rng.normal(0, 1, (kv_heads, k_length, D)), name) for _ in range(2))
        blocks, whole = (-(-q_length // BQ), -(-k_length // BK)), (q_length // BQ, k_length // BK)
        params = struct.pack("6if8i", 1, heads, D, q_length, k_length, heads // kv_heads, D**-0.5, *blocks, *whole,
                             q_length % BQ, k_length % BK, k_length - q_length, 0)[:60]  # fmt: skip
        params = params[:56] + b"\0" * (-56 % 8)
        for length, count in ((q_length, heads), (k_length, kv_heads), (k_length, kv_heads), (q_length, heads)):
            params += struct.pack("3q", count * length * D, length * D, D)
        buffers = [q, k, v, outputs(q.shape, name), params]
        return [Launch(f"{q_length} queries, {k_length} keys", buffers, (32, WM, 1), groups=(blocks[0], heads, 1))]

    return launches


def _attention() -> Iterator[Case]:
    for name, word in _WORDS.items():
        for size, queries, causal in ((64, 1, False), (128, 2, True)):
            constants = _OFF | {"do_causal": causal, "blocks": 1}
            yield Case("attention", f"sdpa_vector_{word}_{size}_{size}", ("sdpa_vector.h",),
                       f"sdpa_vector<{word}, {size}, {size}>", _vector_launches(name, size, queries),
                       tuple(constants.items()))  # fmt: skip
        for (BQ, BK, D, WM), lengths, causal in (
            ((32, 32, 64, 4), (64, 64), False),
            ((32, 16, 128, 4), (45, 71), True),
        ):
            flags = {"align_Q": lengths[0] % BQ == 0, "align_K": lengths[1] % BK == 0, "has_mask": False,
                     "do_causal": causal, "has_sinks": False, "save_lse": False}  # fmt: skip
            yield Case("attention", f"steel_attention_{name}_bq{BQ}_bk{BK}_bd{D}_bv{D}_wm{WM}_wn1_maskbool_",
                       _TILED_HEADERS, f"attention<{word}, {BQ}, {BK}, {D}, {D}, {WM}, 1, bool, float>",
                       _steel_attention_launches(name, (BQ, BK, D, WM), *lengths), tuple(flags.items()))  # fmt: skip


def _first_pass_launches(name: str, size: int, queries: int, shared: int, blocks: int, masked: bool
                         ) -> Launches:  # fmt: skip
    """Returns launches that compute a partial result for each block of keys.

    `shared` query heads use the same key head.
    """

    def launches(rng: Generator) -> list[Launch]:
        found = []
        for n in (77, 130):
            kv_heads = 2
            heads = shared * kv_heads
            shapes = ((heads, queries, size), (kv_heads, n, size), (kv_heads, n, size))
            q, k, v = (stored(rng.normal(0, 1, shape), name) for shape in shapes)
            stride = [np.uint64(n * size), np.uint64(size)]
            sums, largest = (outputs((heads, queries, blocks), "float32") for _ in range(2))
            buffers = [q, k, v, outputs((heads, queries, blocks, size), name), sums, largest, None, n, *stride, *stride]
            buffers.append(0.125)
            if masked:
                mask = rng.integers(0, 4, (heads, queries, n)) > 0
                sinks = stored(rng.normal(0, 1, heads), name)
                buffers += [mask, None, np.int32(1), np.int32(n), np.int32(queries * n), sinks]
            found.append(Launch(f"{queries} queries, {n} keys in {blocks}", buffers, (32, shared, queries),
                                groups=(kv_heads, 1, blocks)))  # fmt: skip
        return found

    return launches


def _second_pass_launches(name: str, size: int, blocks: int) -> Launches:
    def launches(rng: Generator) -> list[Launch]:
        heads, queries = 3, 2
        shape = (heads, queries, blocks)
        partials = stored(rng.normal(0, 1, (*shape, size)), name)
        sums: Array = rng.uniform(0.5, 5, shape).astype(np.float32)
        largest: Array = rng.normal(0, 2, shape).astype(np.float32)
        buffers = [partials, sums, largest, outputs((heads, queries, size), name), blocks]
        return [Launch(f"{queries} queries, {blocks} blocks", buffers, (1024, 1, 1), groups=(heads, queries, 1))]

    return launches


def _two_passes() -> Iterator[Case]:
    for name, word in _WORDS.items():
        for size, queries, masked in ((64, 1, False), (128, 2, True)):
            blocks = 8
            constants = _OFF | {"do_causal": False, "blocks": blocks}
            if masked:
                constants |= {"has_mask": True, "bool_mask": True, "has_sinks": True}
            yield Case("attention", f"sdpa_vector_2pass_1_{word}_{size}_{size}", ("sdpa_vector.h",),
                       f"sdpa_vector_2pass_1<{word}, {size}, {size}>",
                       _first_pass_launches(name, size, queries, 2, blocks, masked), tuple(constants.items()))  # fmt: skip
        shared = 8
        constants = _OFF | {"blocks": 32}
        yield Case("attention", f"sdpa_vector_2pass_1_gqa_{shared}_{word}_64_64", ("sdpa_vector.h",),
                   f"sdpa_vector_2pass_1_gqa<{word}, 64, 64, {shared}, {_HEADS_PER_SIMDGROUP}>",
                   _first_pass_launches(name, 64, 1, shared, 4, masked=False), tuple(constants.items()))  # fmt: skip
        for size in (64, 128):
            yield Case("attention", f"sdpa_vector_2pass_2_{word}_{size}", ("sdpa_vector.h",),
                       f"sdpa_vector_2pass_2<{word}, {size}>", _second_pass_launches(name, size, 64),
                       tuple(constants.items()))  # fmt: skip


def cases() -> Iterator[Case]:
    yield from _attention()
    yield from _two_passes()
