"""The repack kernels, on the software Metal device, give the same bits as NumPy."""

import numpy as np
import pytest
import torch

from tests.support.kernels.launch import launch_elementwise, parameters, place, place_output
from tests.support.reference import pack

# (K, N): one word, and sizes just below and above those of a threadgroup.
SHAPES = [(8, 1), (8, 64), (40, 63), (32, 65), (72, 130)]
STORED_ZEROS = {"plain": 0, "word": 1, "masked": 2, "unmasked": 3}
# AutoAWQ, packing_utils.py: nibble i of a word holds column AWQ_ORDER[i].
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def codes(K: int, N: int) -> np.ndarray:
    return np.random.default_rng([K, N]).integers(0, 16, (K, N), dtype=np.uint8)


def pack_along_n(values: np.ndarray, order: list[int]) -> torch.Tensor:
    rows, N = values.shape
    words = np.zeros((rows, N // 8), np.uint32)
    for nibble, column in enumerate(order):
        words |= values[:, column::8].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32))


def check_gptq_repack(K: int, N: int, perm: np.ndarray | None, code_bits: int = 4) -> None:
    q = codes(K, N) * np.uint8(17 if code_bits == 8 else 1)
    rows = K * code_bits // 32
    out = place_output((rows, N), torch.int32)
    buffers = {
        "Packed": place(pack(q, code_bits)),
        "Out": out,
        "Params": parameters("RepackParams", rows=rows, columns=N, code_bits=code_bits),
    }
    if perm is not None:
        buffers["Perm"] = place(torch.from_numpy(perm.astype(np.int32)))
        q = np.where(((perm >= 0) & (perm < K))[:, None], q[perm % K], 0)
    launch_elementwise("gptq_repack", N, rows, buffers, constants={"has_perm": perm is not None})
    assert torch.equal(out.read((rows, N), torch.int32), pack(q, code_bits))


@pytest.mark.parametrize("has_perm", [False, True])
@pytest.mark.parametrize(("K", "N"), SHAPES)
def test_gptq_repack(K: int, N: int, has_perm: bool) -> None:
    check_gptq_repack(K, N, np.random.default_rng(K).permutation(K) if has_perm else None)


def test_gptq_repack_of_bytes() -> None:
    check_gptq_repack(40, 63, np.random.default_rng(40).permutation(40), code_bits=8)


def test_gptq_repack_perm_beyond_range() -> None:
    """An index out of range reads nothing and gives code 0."""
    perm = np.arange(32)
    perm[[5, 9]] = [32, -1]
    check_gptq_repack(32, 64, perm)


@pytest.mark.parametrize(("K", "N"), [(8, 8), (40, 504), (32, 512), (40, 520)])
def test_awq_repack(K: int, N: int) -> None:
    q = codes(K, N)
    out = place_output((K // 8, N), torch.int32)
    buffers = {
        "Packed": place(pack_along_n(q, AWQ_ORDER)),
        "Out": out,
        "Params": parameters("RepackParams", rows=K // 8, columns=N // 8),
    }
    launch_elementwise("awq_repack", N // 8, K // 8, buffers)
    assert torch.equal(out.read((K // 8, N), torch.int32), pack(q))


@pytest.mark.parametrize(("G", "N"), [(1, 8), (4, 512), (5, 520)])
@pytest.mark.parametrize("rule", [*STORED_ZEROS, "awq"])
def test_unpack_zeros(G: int, N: int, rule: str) -> None:
    stored = codes(G, N)
    order = AWQ_ORDER if rule == "awq" else list(range(8))
    words = pack_along_n(stored, order)
    expected = {
        "plain": stored,
        "masked": (stored + 1) & 15,
        "unmasked": stored + 1,
        "awq": stored,
    }
    if rule == "word":
        plus_one = (words.numpy().view(np.uint32) + np.uint32(0x11111111))[..., None]
        expected["word"] = ((plus_one >> (4 * np.arange(8, dtype=np.uint32))) & 15).reshape(G, N).astype(np.uint8)
    out = place_output((G, N), torch.uint8)
    fields = {"rows": G, "columns": N // 8, "stored_zeros": STORED_ZEROS.get(rule, 0)}
    buffers = {"Packed": place(words), "Out": out, "Params": parameters("RepackParams", **fields)}
    launch_elementwise("awq_unpack_zeros" if rule == "awq" else "gptq_unpack_zeros", N // 8, G, buffers)
    assert np.array_equal(out.read((G, N), torch.uint8).numpy(), expected[rule])
