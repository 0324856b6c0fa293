"""Repacking gives words that were computed by hand, and inverts an independent packer."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_marlin_metal as tmm
from tests.support.reference import pack

OPS = torch.ops.torch_marlin_metal

AWQ_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)  # column 8c + j is in this nibble of word c


def int32(*words: int) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def codes(seed: int, K: int, N: int) -> np.ndarray:
    return np.random.default_rng([seed, K, N]).integers(0, 16, (K, N), dtype=np.uint8)


def pack_columns(values: np.ndarray, nibbles=range(8)) -> torch.Tensor:
    grouped = values.reshape(values.shape[0], -1, 8).astype(np.uint64)
    words = sum(grouped[:, :, j] << np.uint64(4 * nibble) for j, nibble in enumerate(nibbles))
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def test_packed_words_hold_k_from_the_lowest_nibble(device):
    column = np.array([15, 0, 8, 7, 3, 12, 1, 9], dtype=np.uint8)[:, None]
    assert torch.equal(pack(column), int32(0x91C3780F)[None])
    dense = OPS.dequantize(
        pack(column).to(device), torch.ones(1, 1, device=device), weight_format="uint4b8", group_size=8
    )
    assert dense.flatten().tolist() == [7, -8, 0, -1, -5, 4, -7, 1]


def test_gptq_repack_without_perm_is_a_copy(device):
    words = pack(codes(0, 24, 7)).to(device)
    out = tmm.ops.gptq_repack(words)
    assert torch.equal(out, words)
    assert out.data_ptr() != words.data_ptr()


def test_gptq_repack_of_a_worked_act_order_example(device):
    """group_size is 4, column q[k] = k, and perm is the stable argsort of [0,2,1,3,0,1,2,3,3,2,1,0,0,1,2,3]."""
    perm = torch.tensor([0, 4, 11, 12, 2, 5, 10, 13, 1, 6, 9, 14, 3, 7, 8, 15], dtype=torch.int32, device=device)
    words = int32(0x76543210, 0xFEDCBA98)[:, None].to(device)
    assert torch.equal(tmm.ops.gptq_repack(words, perm=perm).cpu(), int32(0xDA52CB40, 0xF873E961)[:, None])


def test_gptq_zeros_of_a_worked_example(device):
    zeros = [8, 8, 7, 9, 1, 15, 3, 6]
    version2, version1 = int32(0x63F19788)[None].to(device), int32(0x52E08677)[None].to(device)
    assert tmm.ops.gptq_unpack_zeros(version2, checkpoint_version=2).flatten().tolist() == zeros
    for rule in ("word", "masked", "unmasked"):
        assert tmm.ops.gptq_unpack_zeros(version1, checkpoint_version=1, rule=rule).flatten().tolist() == zeros


@pytest.mark.parametrize(
    ("word", "rule", "zeros"),
    [
        (0x77776F77, "word", [8, 8, 0, 8, 8, 8, 8, 8]),  # the writer subtracted 0x11111111 with a borrow
        (0x77777F77, "masked", [8, 8, 0, 8, 8, 8, 8, 8]),
        (0x77777F77, "unmasked", [8, 8, 16, 8, 8, 8, 8, 8]),
        (0xEEEEEEEF, "word", [0] * 8),  # 0 - 0x11111111
        (0xFFFFFFFF, "masked", [0] * 8),
    ],
)
def test_gptq_zero_rules_differ_where_a_raw_nibble_is_15(word, rule, zeros, device):
    got = tmm.ops.gptq_unpack_zeros(int32(word)[None].to(device), checkpoint_version=1, rule=rule)
    assert got.flatten().tolist() == zeros


def test_awq_words_of_worked_examples(device):
    """The word 0x75316420 has 0..7 in columns 0..7. The block has q[k][n] = (k + 2n) mod 16."""
    rows = int32(0xEA62C840, 0xFB73D951, 0x0C84EA62, 0x1D95FB73, 0x2EA60C84, 0x3FB71D95, 0x40C82EA6, 0x51D93FB7)
    expected = int32(0x76543210, 0x98765432, 0xBA987654, 0xDCBA9876, 0xFEDCBA98, 0x10FEDCBA, 0x3210FEDC, 0x543210FE)
    assert torch.equal(tmm.ops.awq_repack(rows[:, None].to(device)).cpu(), expected[None])
    zeros = tmm.ops.awq_unpack_zeros(int32(0x75316420, 0x9C70138F)[None].to(device))
    assert zeros.flatten().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 15, 0, 8, 7, 3, 12, 1, 9]


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 40), N=st.integers(1, 70), use_perm=st.booleans())
@settings(max_examples=60, deadline=None)
def test_gptq_repack_moves_whole_rows(seed, rows, N, use_perm):
    q = codes(seed, 8 * rows, N)
    perm = np.random.default_rng(seed).permutation(8 * rows).astype(np.int32)
    got = tmm.ops.gptq_repack(pack(q), perm=torch.from_numpy(perm) if use_perm else None)
    assert torch.equal(got, pack(q[perm] if use_perm else q))


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 200), columns=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_transposed_words(seed, rows, columns):
    words = pack(codes(seed, 8 * columns, rows))
    assert torch.equal(tmm.ops.transpose_words(words.t().contiguous()), words)


def test_transposed_words_of_each_device(device):
    words = pack(codes(0, 40, 67))
    by_rows = words.t().contiguous().to(device)
    got = tmm.ops.transpose_words(by_rows)
    assert torch.equal(got.cpu(), words)
    assert got.is_contiguous()  # gemm refuses other tensors
    got.zero_()
    assert torch.equal(by_rows.cpu(), words.t())


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 40), columns=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_awq_round_trip(seed, rows, columns):
    q = codes(seed, 8 * rows, 8 * columns)
    assert torch.equal(tmm.ops.awq_repack(pack_columns(q, AWQ_NIBBLE)), pack(q))
    assert np.array_equal(tmm.ops.awq_unpack_zeros(pack_columns(q, AWQ_NIBBLE)).numpy(), q)


@given(seed=st.integers(0, 2**32 - 1), groups=st.integers(1, 40), columns=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_gptq_zeros_round_trip(seed, groups, columns):
    z = codes(seed, groups, 8 * columns)
    assert np.array_equal(tmm.ops.gptq_unpack_zeros(pack_columns(z), checkpoint_version=2).numpy(), z)
    words = pack_columns(z).numpy().view(np.uint32)
    stored = torch.from_numpy((words - np.uint32(0x11111111)).view(np.int32))
    assert np.array_equal(tmm.ops.gptq_unpack_zeros(stored, checkpoint_version=1).numpy(), z)
    masked = pack_columns((z - 1) & 15)
    assert np.array_equal(tmm.ops.gptq_unpack_zeros(masked, checkpoint_version=1, rule="masked").numpy(), z)


def test_every_code_in_every_position(device):
    q = np.stack([(np.arange(16) + shift) % 16 for shift in range(16)], axis=1).astype(np.uint8)
    awq = tmm.ops.awq_repack(pack_columns(q, AWQ_NIBBLE).to(device))
    assert torch.equal(awq.cpu(), pack(q))
    dense = OPS.dequantize(
        awq, torch.ones(1, 16, device=device), weight_format="uint4b8", group_size=16, dtype=torch.float32
    )
    assert np.array_equal(dense.cpu().numpy(), q.astype(np.float32) - 8)


def test_empty_inputs(device):
    empty = torch.empty(0, 4, dtype=torch.int32, device=device)
    assert tmm.ops.gptq_repack(empty).shape == (0, 4)
    assert tmm.ops.awq_repack(empty).shape == (0, 32)
    assert tmm.ops.gptq_unpack_zeros(empty, checkpoint_version=1).shape == (0, 32)
    assert tmm.ops.awq_unpack_zeros(empty).shape == (0, 32)
    assert tmm.ops.transpose_words(empty).shape == (4, 0)
