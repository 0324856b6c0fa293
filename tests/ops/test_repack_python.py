"""The Python packers and gptq_perm: known words, round trips through the operators, and every error."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_marlin_metal.repack import (
    gptq_perm,
    pack_awq,
    pack_awq_zeros,
    pack_codes,
    pack_gptq,
    pack_gptq_zeros,
    unpack_codes,
)

ops = torch.ops.torch_marlin_metal
seeds = st.integers(0, 2**31 - 1)
# Hypothesis refuses function-scoped fixtures, but `device` is a string that is the same for every example.
many = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def words(tensor: torch.Tensor) -> list[str]:
    return [f"{word & 0xFFFFFFFF:08X}" for word in tensor.flatten().tolist()]


def random_codes(seed: int, *shape: int, device: str) -> torch.Tensor:
    codes = np.random.default_rng(seed).integers(0, 16, shape, dtype=np.uint8)
    return torch.from_numpy(codes).to(device)


def column(*codes: int, device: str) -> torch.Tensor:
    return torch.tensor(codes, dtype=torch.uint8, device=device)


def numpy_pack(codes: torch.Tensor) -> np.ndarray:
    """Packs codes by the layout's definition, in 64-bit integers."""
    q = codes.cpu().numpy().astype(np.uint64).reshape(-1, 8, codes.shape[1])
    return sum(q[:, j] << np.uint64(4 * j) for j in range(8)).astype(np.uint32).view(np.int32)


@pytest.mark.parametrize(
    ("codes", "word"), [((0, 1, 2, 3, 4, 5, 6, 7), "76543210"), ((15, 0, 8, 7, 3, 12, 1, 9), "91C3780F")]
)
def test_golden_words_of_gptq(codes, word, device):
    assert words(pack_codes(column(*codes, device=device).unsqueeze(1))) == [word]


@pytest.mark.parametrize(
    ("codes", "word"), [((0, 1, 2, 3, 4, 5, 6, 7), "75316420"), ((15, 0, 8, 7, 3, 12, 1, 9), "9C70138F")]
)
def test_golden_words_of_awq(codes, word, device):
    row = column(*codes, device=device).unsqueeze(0)
    assert words(pack_awq_zeros(row)) == [word]
    assert words(pack_awq(pack_codes(row.expand(8, 8)))) == [word] * 8


def test_golden_block_of_awq(device):
    k, n = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    codes = ((k + 2 * n) % 16).to(torch.uint8).to(device)
    packed = pack_codes(codes)
    assert words(packed) == [
        "76543210",
        "98765432",
        "BA987654",
        "DCBA9876",
        "FEDCBA98",
        "10FEDCBA",
        "3210FEDC",
        "543210FE",
    ]
    assert words(pack_awq(packed)) == [
        "EA62C840",
        "FB73D951",
        "0C84EA62",
        "1D95FB73",
        "2EA60C84",
        "3FB71D95",
        "40C82EA6",
        "51D93FB7",
    ]


@pytest.mark.parametrize(
    ("zeros", "version", "rule", "word"),
    [
        ((8, 8, 7, 9, 1, 15, 3, 6), 2, "word", "63F19788"),
        ((8, 8, 7, 9, 1, 15, 3, 6), 1, "word", "52E08677"),
        ((8, 8, 0, 8, 8, 8, 8, 8), 1, "word", "77776F77"),  # GPTQModel's and AutoRound's borrow
        ((8, 8, 0, 8, 8, 8, 8, 8), 1, "masked", "77777F77"),
        ((8, 8, 16, 8, 8, 8, 8, 8), 1, "unmasked", "77777F77"),
    ],
)
def test_golden_zero_points(zeros, version, rule, word, device):
    packed = pack_gptq_zeros(column(*zeros, device=device).unsqueeze(0), version, rule=rule)
    assert words(packed) == [word]
    unpacked = ops.gptq_unpack_zeros(packed, checkpoint_version=version, rule=rule)
    assert unpacked.flatten().tolist() == list(zeros)


@many
@given(seeds, st.integers(1, 40), st.integers(1, 40))
def test_codes_round_trip(device, seed, rows, N):
    codes = random_codes(seed, 8 * rows, N, device=device)
    packed = pack_codes(codes)
    assert packed.dtype == torch.int32
    assert np.array_equal(packed.cpu().numpy(), numpy_pack(codes))
    assert torch.equal(unpack_codes(packed), codes)
    # Views with other strides give the same words.
    assert torch.equal(pack_codes(codes.T.contiguous().T), packed)


@many
@given(seeds, st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_gptq_round_trip(device, seed, rows, N, act_order):
    qweight = pack_codes(random_codes(seed, 8 * rows, N, device=device))
    perm = None
    if act_order:
        order = np.random.default_rng(seed).permutation(8 * rows).astype(np.int32)
        perm = torch.from_numpy(order).to(device)
    packed = ops.gptq_repack(qweight, perm=perm)
    if perm is not None:
        assert torch.equal(unpack_codes(packed), unpack_codes(qweight)[perm.long()])
    back = pack_gptq(packed, perm=perm)
    assert torch.equal(back, qweight)
    assert back.data_ptr() != packed.data_ptr()
    assert torch.equal(ops.gptq_repack(back, perm=perm), packed)


@many
@given(seeds, st.integers(1, 20), st.integers(1, 6))
def test_awq_round_trip(device, seed, rows, columns):
    packed = pack_codes(random_codes(seed, 8 * rows, 8 * columns, device=device))
    qweight = pack_awq(packed)
    assert list(qweight.shape) == [8 * rows, columns]
    assert torch.equal(ops.awq_repack(qweight), packed)
    zeros = random_codes(seed, rows, 8 * columns, device=device)
    assert torch.equal(ops.awq_unpack_zeros(pack_awq_zeros(zeros)), zeros)


@many
@given(seeds, st.integers(1, 20), st.integers(1, 6), st.sampled_from([(2, "word"), (1, "word"), (1, "masked")]))
def test_zero_points_round_trip(device, seed, G, columns, stored):
    version, rule = stored
    zeros = random_codes(seed, G, 8 * columns, device=device)
    qzeros = pack_gptq_zeros(zeros, version, rule=rule)
    assert torch.equal(ops.gptq_unpack_zeros(qzeros, checkpoint_version=version, rule=rule), zeros)
    # The opposite round trip, from words to zero points and back, preserves any word.
    assert torch.equal(
        pack_gptq_zeros(ops.gptq_unpack_zeros(qzeros, checkpoint_version=version, rule=rule), version, rule=rule),
        qzeros,
    )


def test_every_code_in_every_position(device):
    codes = torch.arange(16, dtype=torch.uint8).repeat(8, 1)  # [8, 16]: each position holds each code
    codes = codes.to(device)
    assert torch.equal(unpack_codes(pack_codes(codes)), codes)
    assert torch.equal(ops.awq_repack(pack_awq(pack_codes(codes))), pack_codes(codes))


def test_perm_of_the_worked_example(device):
    g_idx = torch.tensor([0, 2, 1, 3, 0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3], dtype=torch.int32, device=device)
    perm = gptq_perm(g_idx, 4)
    assert perm is not None
    assert perm.dtype == torch.int32
    assert perm.device == g_idx.device
    assert perm.tolist() == [0, 4, 11, 12, 2, 5, 10, 13, 1, 6, 9, 14, 3, 7, 8, 15]
    qweight = pack_codes(torch.arange(16, dtype=torch.uint8, device=device).unsqueeze(1))
    assert words(ops.gptq_repack(qweight, perm=perm)) == ["DA52CB40", "F873E961"]


@many
@given(seeds, st.integers(1, 30), st.sampled_from([8, 16, 32]))
def test_perm_sorts_groups_stably(device, seed, rows, group_size):
    K = 8 * rows
    shuffled = np.random.default_rng(seed).permutation(np.arange(K) // group_size)
    perm = gptq_perm(torch.from_numpy(shuffled).to(device), group_size)
    expected = np.argsort(shuffled, kind="stable")
    if np.array_equal(shuffled, np.arange(K) // group_size):
        assert perm is None
    else:
        assert np.array_equal(perm.cpu().numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("K", "group_size"), [(64, 16), (72, 32), (64, -1), (64, 64), (40, 128)])
def test_trivial_groups_need_no_perm(dtype, K, group_size, device):
    size = K if group_size == -1 else group_size
    assert gptq_perm((torch.arange(K) // size).to(dtype).to(device), group_size) is None


def test_all_zero_groups_are_read_as_no_act_order(device):
    with pytest.warns(UserWarning, match=r"g_idx is all zero for K 64 and group_size 16"):
        assert gptq_perm(torch.zeros(64, dtype=torch.int32, device=device), 16) is None


def test_act_order_with_a_short_last_group(device):
    g_idx = torch.arange(40).flip(0) // 16  # groups of 16, 16 and 8
    perm = gptq_perm(g_idx.to(device), 16)
    assert perm is not None
    assert (g_idx[perm.cpu().long()] == torch.arange(40) // 16).all()


@pytest.mark.parametrize(
    ("g_idx", "group_size", "message"),
    [
        (torch.zeros(16), 8, r"g_idx: expected int32 or int64, got torch.float32"),
        (torch.zeros(2, 8, dtype=torch.int32), 8, r"g_idx: expected shape \[K\], got \[2, 8\]"),
        (torch.zeros(0, dtype=torch.int32), 8, r"g_idx: expected shape \[K\], got \[0\]"),
        (torch.arange(16) // 4, 8, r"g_idx: expected groups 0..1 \(K 16, group_size 8\), got 0..3"),
        (torch.arange(16) // 8 - 1, 8, r"g_idx: expected groups 0..1 .*, got -1..0"),
        (torch.tensor([0] * 9 + [1] * 7), 8, r"g_idx: expected 8 rows in group 0 of 2, got 9"),
        (torch.tensor([0] * 8 + [1] * 16), 16, r"g_idx: expected 16 rows in group 0 of 2, got 8"),
        (torch.arange(16) // 8, 0, r"group_size: expected -1 or a positive number, got 0"),
    ],
)
def test_perm_refuses(g_idx, group_size, message):
    with pytest.raises(ValueError, match="gptq_perm: " + message):
        gptq_perm(g_idx, group_size)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack_codes(torch.zeros(8, 2)), r"pack_codes: codes: expected uint8, got torch.float32"),
        (
            lambda: pack_codes(torch.zeros(8, dtype=torch.uint8)),
            r"pack_codes: codes: expected two dim.*got shape \[8\]",
        ),
        (
            lambda: pack_codes(torch.zeros(12, 2, dtype=torch.uint8)),
            r"pack_codes: codes: expected K to be a multiple of 8",
        ),
        (
            lambda: pack_codes(torch.full((8, 1), 16, dtype=torch.uint8)),
            r"pack_codes: codes: expected codes 0..15, got 16",
        ),
        (lambda: unpack_codes(torch.zeros(1, 2)), r"unpack_codes: b_packed: expected int32, got torch.float32"),
        (lambda: unpack_codes(torch.zeros(2, dtype=torch.int32)), r"unpack_codes: b_packed: expected two dimensions"),
        (lambda: pack_gptq(torch.zeros(1, 2)), r"pack_gptq: b_packed: expected int32"),
        (
            lambda: pack_gptq(torch.zeros(1, 2, dtype=torch.int32), perm=torch.zeros(8, dtype=torch.int32)),
            r"pack_gptq: perm: expected a permutation of 0..7",
        ),
        (
            lambda: pack_gptq(torch.zeros(1, 2, dtype=torch.int32), perm=torch.arange(8)),
            r"pack_gptq: perm: expected int32, got torch.int64",
        ),
        (
            lambda: pack_gptq(torch.zeros(1, 2, dtype=torch.int32), perm=torch.arange(7, dtype=torch.int32)),
            r"pack_gptq: perm: expected shape \[8\], got \[7\]",
        ),
        (
            lambda: pack_awq(torch.zeros(1, 4, dtype=torch.int32)),
            r"pack_awq: b_packed: expected N to be a multiple of 8",
        ),
        (lambda: pack_awq_zeros(torch.zeros(1, 8)), r"pack_awq_zeros: zeros: expected uint8"),
        (
            lambda: pack_gptq_zeros(torch.zeros(1, 8, dtype=torch.uint8), 3),
            r"pack_gptq_zeros: checkpoint_version: expected 1 or 2, got 3",
        ),
        (
            lambda: pack_gptq_zeros(torch.zeros(1, 8, dtype=torch.uint8), 1, rule="other"),
            r"pack_gptq_zeros: rule: expected 'word', 'masked' or 'unmasked', got 'other'",
        ),
        (
            lambda: pack_gptq_zeros(torch.zeros(1, 8, dtype=torch.uint8), 1, rule="unmasked"),
            r"pack_gptq_zeros: zeros: expected 1..16 .*, got 0",
        ),
        (
            lambda: pack_gptq_zeros(torch.full((1, 8), 16, dtype=torch.uint8), 2),
            r"pack_gptq_zeros: zeros: expected codes 0..15, got 16",
        ),
        (
            lambda: pack_gptq_zeros(torch.zeros(1, 12, dtype=torch.uint8), 2),
            r"pack_gptq_zeros: zeros: expected N to be a multiple of 8, got shape \[1, 12\]",
        ),
    ],
)
def test_packs_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()
