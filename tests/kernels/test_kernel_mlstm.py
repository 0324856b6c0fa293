"""The mLSTM kernels agree with the fp64 recurrence. Memory around the tensors is NaN; most cases use checked mode."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from allpairspy import AllPairs

from tests.support.kernels.launch import number
from tests.support.kernels.mlstm_problems import (
    REGIMES,
    Run,
    Sequence,
    check_close,
    check_states,
    make_inputs,
    reference,
    run,
)
from tests.support.samples import covering

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
AXES: dict[str, list[Any]] = {
    "dtype": FLOATS,
    "gate_dtype": FLOATS,
    "sizes": [(1, 1), (1, 2), (2, 3)],
    # Lengths: one token, one less and one more than a block of 32, complete chunks, and several tails.
    "S": [1, 16, 31, 32, 33, 64, 77, 100],
    "chunk_size": [16, 32, 64, 128],
    # Sizes: one; the widths of a lane, fragment, simdgroup and tile; and sizes between these.
    "DK": [1, 8, 24, 33, 64, 72],
    "DV": [1, 7, 32, 48, 65, 96],
    "m0": [None, 0.0, 20.0, -20.0],
    "tokens_first": [False, True],
    "offset": [0, 1, 4],
    "gap": [0, 3, 8],
    "vectors": [True, True, False],
    "gate_simdgroups": [1, 2, 5],
    "simdgroups": [1, 2, 3, 8],
    "segment": [0, 1, 2],
}


def cases() -> list[Any]:
    result = []
    rows = list(AllPairs([list(enumerate(v)) for v in AXES.values()]))
    sample = covering([{*enumerate(row), i % len(REGIMES)} for i, row in enumerate(rows)])
    for i, values in enumerate(rows):
        case = dict(zip(AXES, (v for _, v in values), strict=True))
        options = {name: case.pop(name) for name in ("gate_simdgroups", "simdgroups", "segment")}
        B, H = case.pop("sizes")
        # Gates other than "plain" need a result type with small rounding errors and a large range.
        wide = case["dtype"] is torch.float32
        regime = list(REGIMES)[i % len(REGIMES)] if wide else "plain"
        case["m0"] = case["m0"] if wide else case["m0"] and case["m0"] / 10
        p = Sequence(**case, B=B, H=H, regime=regime, seed=i)
        marks = () if i in sample else pytest.mark.whole
        result.append(pytest.param(p, options, id=f"{p.regime}-{p.S}-{p.chunk_size}-{p.DK}x{p.DV}-{i}", marks=marks))
    return result


@pytest.mark.parametrize(("p", "options"), cases())
def test_a_sequence_agrees_with_the_recurrence(p: Sequence, options: dict[str, int], everything: bool) -> None:
    if not everything and p.seed % 3 != 0 and p.S * p.DK * p.DV > 40000:
        p = replace(p, S=min(p.S, 33), DK=min(p.DK, 33), DV=min(p.DV, 48))
    check_close(p, run(p, **options), reference(make_inputs(p)))


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("chunk_size", [64, 256])
def test_every_regime_of_gates_agrees_over_long_chunks(regime: str, chunk_size: int) -> None:
    """Runs in fast mode."""
    for m0 in (None, 20.0, -20.0):
        p = Sequence(S=512, DK=32, DV=48, chunk_size=chunk_size, regime=regime, m0=m0)
        check_close(p, run(p, checked=False), reference(make_inputs(p)))


def test_a_forget_gate_of_minus_infinity_resets_the_state() -> None:
    p = Sequence(S=96, DK=32, DV=32, chunk_size=64)
    inputs = dict(make_inputs(p))
    inputs["f"] = inputs["f"].clone()
    inputs["f"][..., 40] = -np.inf
    whole = run(p, inputs=inputs).read("H")
    rest = {name: x[:, :, 40:] for name, x in inputs.items()}
    after = reference(rest | {"f": torch.where(rest["f"].isinf(), 0.0, rest["f"])})
    assert np.abs(whole[:, :, 40:] - after.h).max() < 2e-4 * np.abs(after.h).max()


@pytest.mark.parametrize("save_every", [1, 2, 4])
def test_saved_states_do_not_depend_on_how_many_are_saved(save_every: int) -> None:
    """All saved states have the same bits as if every state were saved.

    The stabilizers of all chunks are always saved.
    """
    p = Sequence(S=128, DK=40, DV=72, chunk_size=16, m0=3.0)
    every, some = (Run(p, make_inputs(p), {}, save_every=n) for n in (1, save_every))
    for states in (every, some):
        states.gates(flags=0)
        states.states()
    exact = reference(make_inputs(p))
    for name, state in (("StatesC", exact.C), ("StatesN", exact.n)):
        kept = some.read(name)[:, :, : p.chunks // save_every]
        assert np.array_equal(kept, every.read(name)[:, :, : p.chunks : save_every])
        wanted = state[:, :, : p.S : p.chunk_size * save_every]
        assert np.abs(kept - wanted).max() < 1e-5 * np.abs(wanted).max()
    assert np.abs(every.read("StatesM") - exact.m[:, :, :: p.chunk_size]).max() < 2e-5
    check_states(p, some, exact, np.s_[:, :, -1])


@pytest.mark.parametrize("groups", [1, 3])
def test_output_uses_the_states_that_it_is_given(groups: int) -> None:
    """If the caller passes the states, mlstm_gates reads their stabilizers and does not write them."""
    p = Sequence(S=64, DK=24, DV=40, chunk_size=16)
    whole = run(p)
    given = Run(p, make_inputs(p), {})
    for name in ("StatesC", "StatesN", "StatesM"):
        given.buffers[name] = whole.buffers[name]
    before = whole.read("StatesM")
    given.gates(simdgroups=2, groups=groups, flags=number("kMlstmForOutput") | number("kMlstmGivenM"))
    given.output()
    assert np.array_equal(given.read("H"), whole.read("H"))
    assert np.array_equal(whole.read("StatesM"), before)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("DK", "DV"), [(1, 1), (8, 128), (33, 130), (72, 260)])
@pytest.mark.parametrize(("offset", "simdgroups"), [(0, 1), (1, 4), (4, 16)])
def test_a_step_agrees_with_the_recurrence(dtype: torch.dtype, DK: int, DV: int, offset: int, simdgroups: int) -> None:
    regimes = ["plain", "strong", "kept", "large"] if dtype is torch.float32 else ["plain"]
    for regime in regimes:
        p = Sequence(S=1, DK=DK, DV=DV, chunk_size=16, B=2, dtype=dtype, regime=regime, m0=-2.0, offset=offset)
        got = Run(p, make_inputs(p), {})
        got.step(simdgroups)
        exact = reference(make_inputs(p))
        tolerance = {torch.float32: 2e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
        assert np.abs(got.read("H") - exact.h).max() < tolerance * np.abs(exact.h).max()
        check_states(p, got, exact, np.s_[:, :, 1])


def test_the_order_of_threadgroups_changes_no_bit() -> None:
    p = Sequence(S=100, DK=72, DV=96, chunk_size=64, B=2, m0=1.0)
    first, second = (run(p, seed=seed, gate_simdgroups=3) for seed in (1, 2))
    for name in ("H", "OutN", "OutM", "FinalC", "FinalN", "FinalM"):
        assert np.array_equal(first.read(name), second.read(name)), name


def test_segments_change_no_bit() -> None:
    p = Sequence(S=100, DK=40, DV=48, chunk_size=16, m0=1.0)
    whole, pieces = run(p), run(p, segment=3, simdgroups=1, gate_simdgroups=1)
    for name in ("H", "OutN", "OutM", "FinalC", "FinalN", "FinalM"):
        assert np.array_equal(whole.read(name), pieces.read(name)), name


@pytest.mark.parametrize("name", ["q", "k", "v", "i", "f"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_stays_in_its_tokens_and_columns(name: str, value: float) -> None:
    """A NaN or inf in token 45 of head 1 does not change earlier tokens, other heads or, if in v, other columns."""
    p = Sequence(S=80, DK=24, DV=40, chunk_size=64, H=3)
    inputs = dict(make_inputs(p))
    inputs[name] = inputs[name].clone()
    inputs[name][(0, 1, 45, 7) if inputs[name].dim() == 4 else (0, 1, 45)] = value
    clean, got = run(p).read("H"), run(p, inputs=inputs).read("H")
    assert np.array_equal(got[:, [0, 2]], clean[:, [0, 2]])
    assert np.array_equal(got[:, 1, :45], clean[:, 1, :45])
    if name == "v":
        others = np.arange(p.DV) != 7
        assert np.array_equal(got[0, 1][:, others], clean[0, 1][:, others])
    if np.isnan(value):
        columns = [7] if name == "v" else slice(None)
        later = slice(45, 46) if name == "q" else slice(45, None)
        assert np.isnan(got[0, 1, later][:, columns]).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_each_token_with_a_value_that_is_not_finite(dtype: torch.dtype) -> None:
    """If token t of v is infinite in column t, column t of h is infinite from token t on, and unchanged before."""
    p = Sequence(S=37, DK=8, DV=40, chunk_size=64, dtype=dtype)
    inputs = dict(make_inputs(p))
    clean = run(p, inputs=inputs).read("H")
    inputs["v"] = inputs["v"].clone()
    tokens = torch.arange(p.S)
    inputs["v"][:, :, tokens, tokens] = np.inf
    got = run(p, inputs=inputs).read("H")
    seen = np.arange(p.S)[:, None] >= np.arange(p.DV)
    assert np.isinf(got[..., seen]).all()
    assert np.array_equal(got[..., ~seen], clean[..., ~seen])


def test_no_work_is_done_twice() -> None:
    """Each simdgroup writes and reads its part of a state once, computes no extra products and needs one barrier."""
    p = Sequence(S=128, DK=32, DV=96, chunk_size=64)
    got = run(p, simdgroups=4)
    states, output = got.counters["mlstm_states"], got.counters["mlstm_output"]
    assert states.mmas == p.heads * p.DK // 8 * p.DV // 8 * p.S // 8
    assert states.threadgroup_barriers == 0
    # Each of the four blocks of queries multiplies its own block of keys: 12 score fragments, 10 of which are
    # multiplied with v. Two of the blocks also multiply an earlier block of keys: 16 score fragments, all of which are
    # multiplied with v.
    blocks = p.heads * p.S // 32
    scores = blocks * (12 + 16 // 2) * p.DK // 8
    values = blocks * (10 + 16 // 2) * p.DV // 8
    assert output.mmas == blocks * 4 * p.DK // 8 * p.DV // 8 + scores + values
    assert output.threadgroup_barriers == blocks
    # Scores are stored in pairs of fragments: six for the own block and eight for another block, plus one sum per
    # query.
    assert output.threadgroup_bytes_written == blocks * 4 * (128 * (6 + 8 // 2) + 32)
    assert states.buffers is not None and output.buffers is not None
    state_bytes = p.heads * p.DK * p.DV * 4
    assert states.buffers[number("kSlotStatesC")]["bytes_written"] == 2 * state_bytes
    assert states.buffers[number("kSlotFinalC")]["bytes_written"] == state_bytes
    assert output.buffers[number("kSlotStatesC")]["bytes_read"] == blocks // p.heads * state_bytes
