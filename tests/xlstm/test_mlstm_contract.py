"""Tests the mLSTM operators under opcheck, compile, export, autocast and gradients, and the error of each bad input."""

import re

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import torch_marlin_metal as tmm
from tests.ops.test_contract import utils
from tests.support.mlstm_cases import REGIMES, Regime, array, make

OPS = torch.ops.torch_marlin_metal
# In checked mode, inexact functions get a different error in every run. Tests that compare two runs therefore use fast
# mode.
repeatable = pytest.mark.large
NAMES = ("q", "k", "v", "i", "f", "C0", "n0", "m0")


@repeatable
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("m0", [None, 0.5])
def test_opcheck_mlstm(m0, requires_grad, device):
    inputs, state = make(1, 2, 18, 8, 12, m0=m0).on(device)
    for x in (*inputs, *state.values()):
        x.requires_grad_(requires_grad)
    torch.library.opcheck(OPS.mlstm.default, inputs, {**state, "chunk_size": 16}, test_utils=utils(device))
    if state:
        token = tuple(x[:, :, 0].detach().requires_grad_(requires_grad) for x in inputs)
        torch.library.opcheck(OPS.mlstm_step.default, (*token, *state.values()), test_utils=utils(device))


@repeatable
def test_opcheck_the_two_halves(device):
    inputs, state = make(1, 2, 32, 8, 12, m0=0.5).on(device)
    torch.library.opcheck(
        OPS.mlstm_states.default,
        inputs[1:],
        {**state, "chunk_size": 16, "save_states_every": 2},
        test_utils=utils(device),
    )
    states = OPS.mlstm_states(*inputs[1:], chunk_size=16)
    torch.library.opcheck(OPS.mlstm_output.default, (*inputs, *states), {"chunk_size": 16}, test_utils=utils(device))


def test_meta_tensors():
    inputs, state = make(2, 3, 48, 8, 12, m0=0.5, dtype=torch.bfloat16).on("meta")
    h, final = tmm.xlstm.mlstm(*inputs, tmm.xlstm.MLSTMState(*state.values()))
    assert (h.shape, h.dtype) == ((2, 3, 48, 12), torch.bfloat16)
    assert [x.shape for x in final] == [(2, 3, 8, 12), (2, 3, 8), (2, 3)]
    assert {x.dtype for x in final} == {torch.float32}
    states = tmm.xlstm.mlstm_states(*inputs[1:], chunk_size=16)
    assert [x.shape for x in states] == [(2, 3, 4, 8, 12), (2, 3, 4, 8), (2, 3, 4)]
    assert [x.shape for x in tmm.xlstm.mlstm_output(*inputs, states, chunk_size=16)] == [
        (2, 3, 48, 12),
        *[(2, 3, 48)] * 2,
    ]


@repeatable
def test_compile_with_a_dynamic_length_compiles_once(device):
    compiled_graphs = CompileCounterWithBackend("inductor")
    torch._dynamo.reset()

    def block(q, k, v, i, f):
        h, state = tmm.xlstm.mlstm(q, k, v, i, f)
        return torch.tanh(h) + 1, state.C * 2

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=compiled_graphs)
    counts = []
    for S in (5, 33, 70):
        inputs, _ = make(1, 2, S, 8, 12).on(device)
        torch.testing.assert_close(compiled(*inputs), block(*inputs))
        counts.append(compiled_graphs.frame_count)
    assert counts[1:] == counts[:1] * 2  # the first length is traced twice, because eps is not a tensor


@repeatable
def test_compile_forward_and_backward_with_a_dynamic_length(device):
    compiled_graphs = CompileCounterWithBackend("inductor")
    torch._dynamo.reset()

    def loss(*inputs):
        h, state = tmm.xlstm.mlstm(*inputs)
        return h.square().sum() + state.C.sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=compiled_graphs)
    counts = []
    for S in (20, 70):
        inputs = [x.requires_grad_() for x in make(1, 2, S, 8, 12).on(device)[0]]
        expected = torch.autograd.grad(loss(*inputs), inputs)
        torch.testing.assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)
        counts.append(compiled_graphs.frame_count)
    assert counts[0] == counts[1]


@repeatable
def test_export_with_a_dynamic_length(device):
    class Model(torch.nn.Module):
        def forward(self, q, k, v, i, f):
            return tmm.xlstm.mlstm(q, k, v, i, f)[0]

    length = torch.export.Dim("length", min=2, max=4096)
    inputs, _ = make(1, 2, 20, 8, 12).on(device)
    program = torch.export.export(Model(), inputs, dynamic_shapes=[{2: length}] * 5)
    assert OPS.mlstm.default in [node.target for node in program.graph.nodes if node.op == "call_function"]
    inputs, _ = make(1, 2, 41, 8, 12).on(device)
    assert torch.equal(program.module()(*inputs), Model()(*inputs))


@repeatable
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_all_but_gates_and_states(dtype, device):
    (q, k, v, i, f), state = make(1, 2, 20, 8, 12, m0=0.5).on(device)
    with torch.autocast(device, dtype=dtype):
        got = OPS.mlstm(q, k, v, i, f, **state)
    expected = OPS.mlstm(q.to(dtype), k.to(dtype), v.to(dtype), i, f, **state)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def weighted_sum(outputs, seed: int = 0) -> torch.Tensor:
    """Returns the sum of h, C, n and m with fixed random weights."""
    generator = torch.Generator().manual_seed(seed)
    total = 0
    for x in outputs:
        weights = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        total = total + (x.double() * weights).sum() if x.device.type == "cpu" else total + (x * weights.to(x)).sum()
    return total


GRADIENTS = [
    (20, REGIMES[0], None, 1e-6, 16),
    (20, REGIMES[1], 5.0, 0.1, 16),
    (37, Regime(1, -3), -2.0, 0.05, 16),
    (5, REGIMES[0], 0.3, 0.0, 0),
    (18, Regime(-5, 2), 1.0, 0.3, 16),
    (0, REGIMES[0], 1.0, 1e-6, 0),
]


@pytest.mark.parametrize(("S", "regime", "m0", "eps", "chunk_size"), GRADIENTS, ids=str)
def test_gradients_against_differences_of_the_recurrence_in_fp64(S, regime, m0, eps, chunk_size):
    """Checks gradients through every output, including the stabilizer. In fp64, the operator uses the recurrence."""
    problem = make(1, 2, S, 3, 4, regime, m0, dtype=torch.float64)
    tensors = [x.requires_grad_() for x in (*problem.inputs, *problem.state.values())]

    def run(*x):
        return OPS.mlstm(*x[:5], **dict(zip(("C0", "n0", "m0"), x[5:], strict=False)), eps=eps, chunk_size=chunk_size)

    assert torch.autograd.gradcheck(run, tensors, atol=1e-6)


@pytest.mark.parametrize("regime", [REGIMES[0], REGIMES[1], REGIMES[2], REGIMES[4], REGIMES[5]], ids=str)
def test_gradients_in_fp32_against_fp64(regime, device):
    problem = make(1, 2, 93, 24, 40, regime, m0=0.5)
    wide = [x.double().requires_grad_() for x in (*problem.inputs, *problem.state.values())]
    narrow = [x.detach().to(device).requires_grad_() for x in (*problem.inputs, *problem.state.values())]
    for chunk_size in (0, 16):
        results = []
        for x in (wide, narrow):
            outputs = OPS.mlstm(*x[:5], C0=x[5], n0=x[6], m0=x[7], chunk_size=chunk_size)
            results.append(torch.autograd.grad(weighted_sum(outputs), x))
        for name, exact, got in zip(NAMES, *results, strict=True):
            scale = exact.abs().max()
            assert (exact - got.cpu().double()).abs().max() <= 1e-4 * scale + 1e-30, (
                name
            )  # exp(-120) is near the smallest fp32 numbers


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str)
def test_gradients_have_the_dtypes_of_their_tensors(dtype, bound, device):
    problem = make(1, 2, 40, 16, 24, REGIMES[1], dtype=dtype)
    wide = [x.double().requires_grad_() for x in problem.inputs]
    narrow = [x.detach().to(device).requires_grad_() for x in problem.inputs]
    exact = torch.autograd.grad(weighted_sum(OPS.mlstm(*wide)), wide)
    got = torch.autograd.grad(weighted_sum(OPS.mlstm(*narrow)), narrow)
    for x, e, g in zip(narrow, exact, got, strict=True):
        assert g.dtype == x.dtype
        assert (e - g.cpu().double()).abs().max() <= bound * e.abs().max()


@repeatable
def test_gradients_of_a_step_are_those_of_a_sequence_of_one(device):
    inputs, state = make(1, 2, 1, 8, 12, m0=0.5).on(device)
    tensors = [x.requires_grad_() for x in (*inputs, *state.values())]
    whole = torch.autograd.grad(weighted_sum(OPS.mlstm(*inputs, **state)), tensors)
    h, *final = OPS.mlstm_step(*(x[:, :, 0] for x in inputs), *state.values())
    step = torch.autograd.grad(weighted_sum((h.unsqueeze(2), *final)), tensors)
    torch.testing.assert_close(step, whole)


def test_other_derivatives_are_refused_by_name(device):
    inputs, state = make(1, 2, 16, 8, 12, m0=0.5).on(device)
    q = inputs[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(OPS.mlstm(q, *inputs[1:])[0].square().sum(), q)
    assert grad.abs().sum() > 0
    with pytest.raises(ValueError, match="torch_marlin_metal::mlstm: expected first derivatives only"):
        torch.autograd.grad(OPS.mlstm(q, *inputs[1:])[0].square().sum(), q, create_graph=True)
    k = inputs[1].clone().requires_grad_()
    message = "torch_marlin_metal::mlstm_states: k: expected a tensor that does not require grad"
    with pytest.raises(ValueError, match=message):
        OPS.mlstm_states(k, *inputs[2:], chunk_size=16)
    states = OPS.mlstm_states(*inputs[1:], **state, chunk_size=16)
    with pytest.raises(ValueError, match=message.replace("states: k", "output: q")):
        OPS.mlstm_output(q, *inputs[1:], *states, chunk_size=16)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs[2], torch.ones_like(inputs[2]))
        with pytest.raises(ValueError, match="torch_marlin_metal::mlstm: v: expected no forward-mode tangent"):
            OPS.mlstm(*inputs[:2], dual, *inputs[3:])


@repeatable
def test_inference_mode_and_no_grad(device):
    inputs, _ = make(1, 2, 16, 8, 12).on(device)
    expected = array(OPS.mlstm(*inputs)[0])
    with torch.inference_mode():
        assert np.array_equal(array(OPS.mlstm(*inputs)[0]), expected)
    inputs[0].requires_grad_()
    with torch.no_grad():
        assert not OPS.mlstm(*inputs)[0].requires_grad


def call(device, op="mlstm", **changes):
    """Returns the arguments of a correct call, with `changes` applied."""
    inputs, state = make(1, 2, 32, 8, 12, m0=0.5).on(device)
    arguments = dict(zip(NAMES, (*inputs, *state.values()), strict=True))
    if op == "mlstm_step":
        for name in "qkvif":
            arguments[name] = arguments[name][:, :, 0]
    if op in ("mlstm_output", "mlstm_step"):
        for name in "Cnm":
            arguments[name] = arguments.pop(f"{name}0")
    if op == "mlstm_states":
        del arguments["q"]
    if op == "mlstm_output":
        kvif = [arguments[name] for name in "kvif"]
        arguments.update(zip("Cnm", OPS.mlstm_states(*kvif, chunk_size=16), strict=True))
    if op in ("mlstm_states", "mlstm_output"):
        arguments["chunk_size"] = 16
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    return getattr(OPS, op)(**arguments)


ERRORS = {
    "integer queries": ("mlstm", {"q": torch.Tensor.int},
        "q: expected float16, bfloat16, float32 or float64 [B, H, S, DK] with DK >= 1, got int32 [1, 2, 32, 8]"),
    "rank": ("mlstm", {"q": lambda x: x[0]},
        "q: expected float16, bfloat16, float32 or float64 [B, H, S, DK] with DK >= 1, got float32 [2, 32, 8]"),
    "no DK": ("mlstm", {"q": lambda x: x[..., :0]}, "[B, H, S, DK] with DK >= 1, got float32 [1, 2, 32, 0]"),
    "no DV": ("mlstm", {"v": lambda x: x[..., :0]}, "v: expected [B, H, S, DV] with DV >= 1, got float32 [1, 2, 32, 0]"),
    "dtype of keys": ("mlstm", {"k": torch.Tensor.half},
        "k: expected float32 [B, H, S, DK] = [1, 2, 32, 8], got float16 [1, 2, 32, 8]"),
    "DK of keys": ("mlstm", {"k": lambda x: x[..., :7]},
        "k: expected float32 [B, H, S, DK] = [1, 2, 32, 8], got float32 [1, 2, 32, 7]"),
    "length of values": ("mlstm", {"v": lambda x: x[:, :, :31]},
        "v: expected float32 [B, H, S, DV] = [1, 2, 32, 12], got float32 [1, 2, 31, 12]"),
    "heads of gates": ("mlstm", {"i": lambda x: x[:, :1]},
        "i: expected float16, bfloat16 or float32 [B, H, S] = [1, 2, 32], got float32 [1, 1, 32]"),
    "shape of the other gate": ("mlstm", {"f": lambda x: x[..., :31]},
        "f: expected float32 (the dtype of i) [B, H, S] = [1, 2, 32], got float32 [1, 2, 31]"),
    "batch of keys": ("mlstm", {"k": lambda x: torch.cat((x, x))},
        "k: expected float32 [B, H, S, DK] = [1, 2, 32, 8], got float32 [2, 2, 32, 8]"),
    "dtype of one gate": ("mlstm", {"f": torch.Tensor.half},
        "f: expected float32 (the dtype of i) [B, H, S] = [1, 2, 32], got float16 [1, 2, 32]"),
    "integer gates": ("mlstm", {"i": torch.Tensor.int}, "i: expected float16, bfloat16 or float32 [B, H, S]"),
    "states in half": ("mlstm", {"C0": torch.Tensor.half},
        "C0: expected float32 [B, H, DK, DV] = [1, 2, 8, 12], got float16 [1, 2, 8, 12]"),
    "shape of C0": ("mlstm", {"C0": lambda x: x.transpose(-1, -2)},
        "C0: expected float32 [B, H, DK, DV] = [1, 2, 8, 12], got float32 [1, 2, 12, 8]"),
    "shape of n0": ("mlstm", {"n0": lambda x: x[..., :4]},
        "n0: expected float32 [B, H, DK] = [1, 2, 8], got float32 [1, 2, 4]"),
    "shape of m0": ("mlstm", {"m0": lambda x: x.unsqueeze(-1)},
        "m0: expected float32 [B, H] = [1, 2], got float32 [1, 2, 1]"),
    "one state": ("mlstm", {"n0": None}, "C0, n0, m0: expected all three or none, got only C0 m0"),
    "chunk size": ("mlstm", {"chunk_size": 48},
        "chunk_size: expected one of 16, 32, 64, 128, 256, or 0 for the planner's choice, got 48"),
    "eps": ("mlstm", {"eps": -1.0}, "eps: expected a number >= 0, got -1.000000"),
    "chunk size of states": ("mlstm_states", {"chunk_size": 0},
        "chunk_size: expected one of 16, 32, 64, 128, 256, got 0"),
    "length of states": ("mlstm_states", {"chunk_size": 64},
        "k: expected [B, H, S, DK] with S a multiple of chunk_size = 64 (use mlstm for other lengths), "
        "got float32 [1, 2, 32, 8]"),
    "length of kept states": ("mlstm_states", {"save_states_every": 3},
        "S a multiple of chunk_size * save_states_every = 16 * 3 (use mlstm for other lengths)"),
    "more chunks between kept states than an integer counts tokens": ("mlstm_states", {"save_states_every": 2**60},
        f"S a multiple of chunk_size * save_states_every = 16 * {2**60} (use mlstm for other lengths)"),
    "a product of 0 by overflow": ("mlstm_states", {"save_states_every": 2**62},
        f"S a multiple of chunk_size * save_states_every = 16 * {2**62} (use mlstm for other lengths)"),
    "no states kept": ("mlstm_states", {"save_states_every": 0}, "save_states_every: expected at least 1, got 0"),
    "chunk size of output": ("mlstm_output", {"chunk_size": 8},
        "chunk_size: expected one of 16, 32, 64, 128, 256, got 8"),
    "length of output": ("mlstm_output", {"chunk_size": 64},
        "k: expected [B, H, S, DK] with S a multiple of chunk_size = 64 (use mlstm for other lengths)"),
    "slots": ("mlstm_output", {"chunk_size": 32},
        "C: expected float32 [B, H, S / chunk_size + 1, DK, DV] = [1, 2, 2, 8, 12], got float32 [1, 2, 3, 8, 12]"),
    "states of a step in half": ("mlstm_step", {"n": torch.Tensor.half},
        "n: expected float32 [B, H, DK] = [1, 2, 8], got float16 [1, 2, 8]"),
    "initial states in half": ("mlstm_states", {"m0": torch.Tensor.half},
        "m0: expected float32 [B, H] = [1, 2], got float16 [1, 2]"),
    "chunk states in half": ("mlstm_output", {"m": torch.Tensor.half},
        "m: expected float32 [B, H, S / chunk_size + 1] = [1, 2, 3], got float16 [1, 2, 3]"),
    "a sequence for a step": ("mlstm_step", {"q": lambda x: x.unsqueeze(2)},
        "q: expected float16, bfloat16, float32 or float64 [B, H, DK] with DK >= 1, got float32 [1, 2, 1, 8]"),
    "state of a step": ("mlstm_step", {"C": lambda x: x.transpose(-1, -2)},
        "C: expected float32 [B, H, DK, DV] = [1, 2, 8, 12], got float32 [1, 2, 12, 8]"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_bad_input(case, device):
    op, changes, message = ERRORS[case]
    call(device, op)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        call(device, op, **changes)
    assert str(error.value).startswith(f"torch_marlin_metal::{op}: ")


@pytest.mark.parametrize(("state", "got"), [((1, 2), "2 values"), (torch.zeros(3), "Tensor")], ids=["pair", "tensor"])
@pytest.mark.parametrize("op", ["mlstm", "mlstm_step", "mlstm_states"])
def test_a_state_has_three_tensors(op, state, got):
    (q, *rest), _ = make(1, 2, 16, 8, 12).on("cpu")
    arguments = {"mlstm": (q, *rest), "mlstm_step": (x[:, :, 0] for x in (q, *rest)), "mlstm_states": rest}[op]
    options = {"chunk_size": 16} if op == "mlstm_states" else {}
    message = f"torch_marlin_metal::{op}: state: expected the tensors C, n and m, got {got}"
    with pytest.raises(ValueError, match=message):
        getattr(tmm.xlstm, op)(*arguments, state=state, **options)


def test_states_are_three_tensors():
    inputs, _ = make(1, 2, 16, 8, 12).on("cpu")
    message = "torch_marlin_metal::mlstm_output: states: expected the tensors C, n and m, got 1 values"
    with pytest.raises(ValueError, match=message):
        tmm.xlstm.mlstm_output(*inputs, (inputs[0],), chunk_size=16)


def test_wide_queries_want_wide_states():
    problem = make(1, 2, 4, 8, 12, m0=0.5, dtype=torch.float64)
    with pytest.raises(ValueError, match=re.escape("C0: expected float64 [B, H, DK, DV]")):
        OPS.mlstm(*problem.inputs, **{name: x.float() for name, x in problem.state.items()})


def test_different_devices(mps):
    for op in ("mlstm", "mlstm_states", "mlstm_output", "mlstm_step"):
        for name in ("v", "f", "m" if op in ("mlstm_output", "mlstm_step") else "m0"):
            message = (
                f"torch_marlin_metal::{op}: {name}: expected a tensor on mps:0 like the first argument, got float32 "
            )
            with pytest.raises(ValueError, match=re.escape(message)):
                call(mps, op, **{name: torch.Tensor.cpu})
