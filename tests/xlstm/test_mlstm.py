"""Compares the mLSTM on each device with the fp64 recurrence (mlstm_reference.py). Both get the same rounded inputs."""

import sys

import numpy as np
import pytest
import torch

import torch_marlin_metal  # noqa: F401  registers the operators
from tests.support import mlstm_reference
from tests.support.mlstm_cases import REGIMES, Problem, Regime, array, make, relative_to_max
from tests.support.programs import run_python

OPS = torch.ops.torch_marlin_metal
CHUNKS = (16, 32, 64, 128, 256)
NUMERATOR, STATE, HIDDEN, ILL_CONDITIONED, STABILISER = 5e-5, 1e-5, 2e-4, 1e-2, 2e-5


def reference(problem: Problem, **options) -> mlstm_reference.Result:
    inputs, state = problem.arrays()
    return mlstm_reference.recurrence(*inputs, **state, **options)


def check_state(got, expected: mlstm_reference.Result, slots=np.s_[-1]) -> None:
    C, n, m = got
    assert relative_to_max(C, expected.C[:, :, slots]) <= STATE
    assert relative_to_max(n, expected.n[:, :, slots]) <= STATE
    assert np.abs(array(m) - expected.m[:, :, slots]).max() <= STABILISER


def hidden_bound(regime: Regime, m0: float | None) -> float:
    # A large m0 makes exp(-m) tiny, for any gates. At m0 = 20, even the recurrence in fp32 has errors of up to 3e-3.
    return ILL_CONDITIONED if regime.ill_conditioned or (m0 or 0) > 8 else HIDDEN


def check_all(problem: Problem, device: str, chunk_size: int, bound: float) -> None:
    """Compares mlstm, and mlstm_states followed by mlstm_output, with the recurrence."""
    inputs, state = problem.on(device)
    expected = reference(problem)
    h, *final = OPS.mlstm(*inputs, **state, chunk_size=chunk_size)
    assert relative_to_max(h, expected.h) <= bound
    check_state(final, expected)

    states = OPS.mlstm_states(*inputs[1:], **state, chunk_size=chunk_size)
    check_state(states, expected, np.s_[::chunk_size])
    h, N, M = OPS.mlstm_output(*inputs, *states, chunk_size=chunk_size)
    assert relative_to_max(h, expected.h) <= bound
    assert np.abs(array(M) - expected.M).max() <= STABILISER
    # If the denominator exceeds fp32's range, it is infinite and h is 0.
    in_range = expected.N < 1e38
    error = np.abs(array(N) - expected.N)[in_range] / expected.N[in_range]
    assert error.max(initial=0.0) <= bound
    assert np.isposinf(array(N)[expected.N > 3.41e38]).all()
    numerator = np.where(in_range, array(N) + 1e-6, 0)[..., None] * array(h)
    exact = np.where(in_range, expected.N + 1e-6, 0)[..., None] * expected.h
    assert np.abs(numerator - exact).max() <= NUMERATOR * max(np.abs(exact).max(), 1e-30)


SAMPLE = [(regime, CHUNKS[at % 3], (None, 20.0, -20.0)[at % 3]) for at, regime in enumerate(REGIMES)]
SAMPLE += [(regime, CHUNKS[(at + 1) % 4], None) for at, regime in enumerate(REGIMES)]


@pytest.mark.parametrize(("regime", "chunk_size", "m0"), SAMPLE, ids=str)
def test_regimes(regime, chunk_size, m0, device):
    S = 2 * chunk_size if chunk_size < 64 else chunk_size
    problem = make(B=1, H=2, S=S, DK=24, DV=40, regime=regime, m0=m0)
    check_all(problem, device, chunk_size, hidden_bound(regime, m0))


@pytest.mark.whole
def test_all_regimes(device):
    for sizes in ((2, 3, 256, 24, 48), (1, 2, 256, 64, 72)):
        for regime in REGIMES:
            for chunk_size in CHUNKS:
                for m0 in (None, 20.0, -20.0):
                    check_all(make(*sizes, regime, m0), device, chunk_size, hidden_bound(regime, m0))


@pytest.mark.parametrize(
    ("B", "H", "S", "DK", "DV"),
    [(2, 3, 48, 24, 48), (1, 3, 16, 1, 1), (2, 1, 32, 65, 7), (1, 2, 16, 7, 66), (3, 2, 80, 33, 31)],
)
def test_shapes_with_heads_odd_sizes_and_an_odd_number_of_chunks(B, H, S, DK, DV, device):
    check_all(make(B, H, S, DK, DV, m0=0.5), device, 16, HIDDEN)


@pytest.mark.large
@pytest.mark.parametrize("chunk_size", [0, 64, 128, 256])
def test_large_shapes(chunk_size, device):
    problem = make(1, 2, 256, 256, 512, m0=1.0)
    inputs, state = problem.on(device)
    expected = reference(problem)
    h, *final = OPS.mlstm(*inputs, **state, chunk_size=chunk_size)
    assert relative_to_max(h, expected.h) <= HIDDEN
    check_state(final, expected)


@pytest.mark.parametrize("S", [0, 1, 2, 3, 5, 7, 17, 65, 93])
def test_tails(S, device):
    problem = make(1, 2, S, 24, 40, m0=-1.0)
    inputs, state = problem.on(device)
    expected = reference(problem)
    h, *final = OPS.mlstm(*inputs, **state, chunk_size=(0, 16, 32, 64)[S % 4])
    assert h.shape == (1, 2, S, 40)
    assert relative_to_max(h, expected.h) <= HIDDEN
    check_state(final, expected)


def test_tensors_without_heads_or_batches(device):
    for B, H in ((0, 2), (1, 0)):
        inputs, state = make(B, H, 5, 8, 8, m0=0.0).on(device)
        assert OPS.mlstm(*inputs, **state)[0].shape == (B, H, 5, 8)
        inputs, state = make(B, H, 64, 8, 8, m0=0.0).on(device)
        kept = OPS.mlstm_states(*inputs[1:], **state, chunk_size=16, save_states_every=2)
        assert [x.shape for x in kept] == [(B, H, 3, 8, 8), (B, H, 3, 8), (B, H, 3)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("gate_dtype", [torch.float32, None], ids=["gates_fp32", "gates_alike"])
@pytest.mark.parametrize("f", [0, 3])
def test_half_precision(dtype, bound, gate_dtype, f, device):
    problem = make(1, 2, 69, 24, 40, Regime(f, 0), m0=None, dtype=dtype, gate_dtype=gate_dtype or dtype)
    inputs, _ = problem.on(device)
    expected = reference(problem)
    h, *final = OPS.mlstm(*inputs)
    assert h.dtype == dtype
    assert all(x.dtype == torch.float32 for x in final)
    assert relative_to_max(h, expected.h) <= bound
    check_state(final, expected)  # the inputs are exact, and sums and states are fp32, so the fp32 bound holds


def test_four_calls_with_the_state_passed_on_give_the_results_of_one(device):
    problem = make(2, 3, 93, 24, 40)
    inputs, _ = problem.on(device)
    whole = OPS.mlstm(*inputs)
    state, parts = {}, []
    for begin, end in ((0, 20), (20, 21), (21, 64), (64, 93)):
        h, C, n, m = OPS.mlstm(*(x[:, :, begin:end] for x in inputs), **state)
        parts.append(h)
        state = {"C0": C, "n0": n, "m0": m}
    assert relative_to_max(torch.cat(parts, 2), array(whole[0])) <= HIDDEN
    check_state(state.values(), reference(problem))


def test_steps_are_the_sequence(device):
    problem = make(2, 3, 9, 24, 40, m0=0.3)
    inputs, state = problem.on(device)
    expected = reference(problem)
    carried = tuple(state.values())
    for t in range(9):
        kept = [x.clone() for x in carried]
        before = carried
        h, *carried = OPS.mlstm_step(*(x[:, :, t] for x in inputs), *carried)
        assert relative_to_max(h, expected.h[:, :, t]) <= HIDDEN
        check_state(carried, expected, np.s_[t + 1])
        assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))  # the step must not change its input


# In checked mode, inexact functions get a different error in every run. Tests that compare bits use fast mode instead.
bitwise = pytest.mark.large


@bitwise
@pytest.mark.parametrize("every", [2, 4])
def test_states_are_kept_bit_by_bit(every, device):
    inputs, state = make(1, 2, 128, 24, 40, m0=0.5).on(device)
    all_states = OPS.mlstm_states(*inputs[1:], **state, chunk_size=16)
    kept = OPS.mlstm_states(*inputs[1:], **state, chunk_size=16, save_states_every=every)
    for each, some in zip(all_states, kept, strict=True):
        assert torch.equal(each[:, :, ::every], some)
    final = OPS.mlstm(*inputs, **state, chunk_size=16)[1:]
    assert all(torch.equal(x[:, :, -1], y) for x, y in zip(kept, final, strict=True))
    h, _, _ = OPS.mlstm_output(*inputs, *kept, chunk_size=16 * every)  # mlstm_states had smaller chunks, of 16 tokens
    assert relative_to_max(h, array(OPS.mlstm(*inputs, **state)[0])) <= HIDDEN


def same_bits(got, expected) -> None:
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.cpu(), b.cpu())


@bitwise
def test_a_single_token_may_have_any_stride(device):
    inputs, state = make(1, 2, 1, 8, 12, m0=0.5).on(device)
    far = [x.as_strided(x.shape, (*x.stride()[:2], 2**40, *x.stride()[3:])) for x in inputs]
    same_bits(OPS.mlstm(*far, **state), OPS.mlstm(*inputs, **state))


@bitwise
def test_views_and_offsets(device):
    """Inputs may have the layouts that models use.

    In memory, the heads of a token may be adjacent, and so may the gates. A tensor may be part of a larger storage.
    """
    inputs, state = make(2, 3, 37, 24, 40, m0=0.5).on(device)
    expected = OPS.mlstm(*inputs, **state)

    def heads_inside(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def inside_nan(x):
        """Places a tensor in a larger storage of NaN, with NaN between the rows."""
        storage = torch.full([s + 2 for s in x.shape], float("nan"), dtype=x.dtype, device=x.device)
        view = storage[tuple(slice(1, -1) for _ in x.shape)]
        return view.copy_(x)

    def strided(x):
        return torch.stack((x, torch.full_like(x, float("nan"))), -1)[..., 0]

    for change in (heads_inside, inside_nan, strided):
        changed_state = {n: inside_nan(x) if change is inside_nan else strided(x) for n, x in state.items()}
        same_bits(OPS.mlstm(*(change(x) for x in inputs), **changed_state), expected)
    token = [x[:, :, 5] for x in inputs]
    alone = OPS.mlstm_step(*(x.contiguous() for x in token), *state.values())
    for change in (lambda x: x, inside_nan, strided):
        same_bits(OPS.mlstm_step(*(change(x) for x in token), *(strided(x) for x in state.values())), alone)
    inputs = [x[:, :, :32] for x in inputs]
    states = OPS.mlstm_states(*(inside_nan(x) for x in inputs[1:]), **state, chunk_size=16)
    same_bits(states, OPS.mlstm_states(*inputs[1:], **state, chunk_size=16))
    outputs = OPS.mlstm_output(*(strided(x) for x in inputs), *(inside_nan(x) for x in states), chunk_size=16)
    same_bits(outputs, OPS.mlstm_output(*inputs, *states, chunk_size=16))


def test_every_output_is_written():
    """On the CPU, new tensors are filled with NaN. On mps, checked mode reports reads of uninitialized memory."""
    torch.use_deterministic_algorithms(True)  # new tensors are filled with NaN
    try:
        inputs, state = make(1, 3, 48, 20, 37, m0=0.5).on("cpu")
        states = OPS.mlstm_states(*inputs[1:], **state, chunk_size=16)
        results = [*states, *OPS.mlstm_output(*inputs, *states, chunk_size=16), *OPS.mlstm(*inputs)]
        results += OPS.mlstm_step(*(x[:, :, 0] for x in inputs), *state.values())
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(x.isfinite().all() for x in results)


@bitwise
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("argument", range(5), ids="qkvif")
def test_a_token_never_sees_a_later_one(argument, bad, device):
    inputs, _ = make(1, 2, 48, 8, 8).on(device)
    clean = OPS.mlstm(*inputs, chunk_size=32)[0].cpu()
    changed = [x.clone() for x in inputs]
    changed[argument][0, 1, 37] = bad
    h = OPS.mlstm(*changed, chunk_size=32)[0].cpu()
    assert torch.equal(h[0, 0], clean[0, 0])
    assert torch.equal(h[0, 1, :37], clean[0, 1, :37])
    # an infinite forget gate does not decay the state, so the result is finite
    if argument == 4 and bad == float("inf"):
        assert h.isfinite().all()
    else:
        assert not h[0, 1, 37].isfinite().any()


@bitwise
def test_the_same_bits_twice(device):
    inputs, state = make(2, 3, 93, 24, 72, m0=0.5).on(device)
    once = OPS.mlstm(*inputs, **state)
    same_bits(OPS.mlstm(*inputs, **state), once)


def test_the_same_bits_whatever_the_number_of_threads():
    inputs, state = make(1, 1, 93, 24, 200, m0=0.5).on("cpu")  # the kernel divides the columns of the only head
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(OPS.mlstm(*inputs, **state))
    finally:
        torch.set_num_threads(threads)
    same_bits(results[1], results[0])
    same_bits(results[2], results[0])


def test_an_input_gate_of_minus_ten_thousand_gives_zero(device):
    inputs, _ = make(1, 2, 40, 8, 8, Regime(3, -1e4, 0)).on(device)
    h, C, n, _ = OPS.mlstm(*inputs)
    assert not h.any()
    assert not C.any()
    assert not n.any()


def test_fp64_is_the_reference_on_the_cpu():
    for regime in REGIMES:
        problem = make(2, 3, 64, 12, 20, regime, m0=0.5, dtype=torch.float64)
        inputs, state = problem.on("cpu")
        expected = reference(problem)
        chunks = mlstm_reference.by_chunks(*problem.arrays()[0], 16, **problem.arrays()[1])
        states = OPS.mlstm_states(*inputs[1:], **state, chunk_size=16)
        h, N, M = OPS.mlstm_output(*inputs, *states, chunk_size=16)
        at = np.s_[:, :, ::16]
        found = (h, N, M, *states)
        exact = (expected.h, expected.N, expected.M, expected.C[at], expected.n[at], expected.m[at])
        by_chunks = (chunks.h, chunks.N, chunks.M, chunks.C, chunks.n, chunks.m)
        bound = 1e-11 if regime.ill_conditioned else 1e-12
        for got, value, other in zip(found, exact, by_chunks, strict=True):
            largest = np.abs(value).max()
            assert np.abs(array(got) - value).max() <= bound * largest
            assert np.abs(other - value).max() <= bound * largest


def test_memory_grows_with_the_sequence_only():
    """For 65,536 tokens, inputs and h take 17 MB.

    One entry for each pair of tokens would take 16 GB, and one state for each token 64 MB.
    """
    program = """
import resource, torch, torch_marlin_metal as tmm
x = torch.zeros(1, 1, 65536, 16)
gate = torch.zeros(1, 1, 65536)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tmm.xlstm.mlstm(x, x, x, gate, gate)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout) * unit < 24e6
