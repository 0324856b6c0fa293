"""The mLSTM modules in transformers' xLSTM model, against transformers' own layer, in 4 bit, and in the example."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import torch_marlin_metal as tmm
from examples import xlstm as example


@pytest.fixture
def config():
    transformers = pytest.importorskip("transformers", reason="transformers (development packages) is not installed")
    return transformers.xLSTMConfig(
        vocab_size=50, hidden_size=128, num_hidden_layers=2, num_heads=4, chunk_size=16, autocast_kernel_dtype="float32"
    )


def transformers_model(config, device):
    from transformers import xLSTMForCausalLM

    torch.manual_seed(0)
    model = xLSTMForCausalLM(config).to(device).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate_preact" in name:  # with random weights, the gates differ between tokens
                parameter.add_(0.3 * torch.randn(parameter.shape).to(device))
    return model


def put_cells(model) -> int:
    layers = [module for module in model.modules() if hasattr(module, "mlstm_backend")]
    for layer in layers:
        layer.mlstm_backend = tmm.xlstm.MLSTMCell()
    return len(layers)


def test_the_cell_inside_transformers_model(config, device):
    """With our cell, logits and gradients equal those of transformers' cell, for a prompt and for later tokens."""
    model = transformers_model(config, device)
    letters = torch.randint(50, (2, 37), generator=torch.Generator().manual_seed(0)).to(device)

    def run():
        with torch.no_grad():
            prompt = model(letters[:, :30], use_cache=True)
            step = model(letters[:, 30:31], cache_params=prompt.cache_params, use_cache=True)
            rest = model(letters[:, 31:], cache_params=step.cache_params, use_cache=True)
        loss = model(letters, labels=letters, use_cache=False).loss
        weight = model.get_parameter("backbone.blocks.0.mlstm_layer.fgate_preact.weight")
        (grad,) = torch.autograd.grad(loss, weight)
        return [x.cpu() for x in (prompt.logits, step.logits, rest.logits, loss.detach(), grad)]

    expected = run()
    assert put_cells(model) == 2
    for got, want in zip(run(), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


def test_the_layer_is_that_of_transformers(config, device):
    theirs = transformers_model(config, device).backbone.blocks[0].mlstm_layer
    layer = tmm.xlstm.MLSTMLayer(128, 4).to(device)
    layer.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 21, 128, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        expected, states = theirs(x)
        y, state = layer(x)
        torch.testing.assert_close(y.cpu(), expected.cpu(), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(state.C.cpu(), states[0].cpu(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_are_the_sequence_in_4_bit_too(dtype, device):
    torch.manual_seed(0)
    layer = tmm.xlstm.MLSTMLayer(64, 2, bias=True).to(dtype)
    with torch.no_grad():
        layer.igate_preact.weight.normal_()
    report = tmm.quantize_model(layer, "uint4b8", group_size=32, exclude="*gate_preact", progress=False)
    assert len(report.converted) == 4
    layer.to(device)
    x = torch.randn(2, 19, 64).to(dtype).to(device)
    whole, final = layer(x)
    y, state = layer(x[:, :11])
    parts = [y]
    for t in range(11, 19):
        y, state = layer(x[:, t : t + 1], state)
        parts.append(y)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(torch.cat(parts, 1).cpu(), whole.cpu(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state.C.cpu(), final.C.cpu(), rtol=tolerance, atol=tolerance)


def test_the_layer_says_which_heads_fit():
    with pytest.raises(ValueError, match="num_heads: expected a divisor of the sizes of queries and values, 32 and 64"):
        tmm.xlstm.MLSTMLayer(64, 3)


def test_the_cell_takes_states_of_other_dtypes_and_gives_the_output_alone():
    q = torch.randn(1, 2, 5, 8, dtype=torch.bfloat16)
    gate = torch.randn(1, 2, 5)
    C, n, m = torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 8), torch.zeros(1, 2, 1)
    h, state = tmm.xlstm.MLSTMCell()(q, q, q, gate, gate, C.bfloat16(), n.bfloat16(), m.bfloat16())
    assert [x.dtype for x in state] == [torch.float32] * 3
    assert state[2].shape == (1, 2, 1)
    assert torch.equal(tmm.xlstm.MLSTMCell()(q, q, q, gate, gate, return_last_states=False), h)


def test_the_cell_wants_the_whole_state():
    q, gate = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5)
    message = "MLSTMCell: c_initial, n_initial, m_initial: expected all three or none, got c_initial, m_initial only"
    with pytest.raises(ValueError, match=message):
        tmm.xlstm.MLSTMCell()(q, q, q, gate, gate, c_initial=torch.ones(1, 2, 8, 8), m_initial=torch.ones(1, 2, 1))


def test_no_tokens_leave_the_state_alone(device):
    layer = tmm.xlstm.MLSTMLayer(64, 2).to(device)
    _, state = layer(torch.randn(2, 3, 64, device=device))
    y, same = layer(torch.randn(2, 0, 64, device=device), state)
    assert y.shape == (2, 0, 64)
    assert all(torch.equal(a, b) for a, b in zip(state, same, strict=True))


def test_the_example_learns_and_its_steps_agree_with_its_chunks(monkeypatch):
    clock = itertools.count(0, 0.01)  # a fake clock gives 150 steps on any machine
    monkeypatch.setattr(example, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    torch.manual_seed(0)
    text = torch.arange(3000) % 7  # each letter determines the next
    model = example.LanguageModel(7, width=32, heads=2, depth=1)
    before = example.loss_of(model, text[None, :129]).item()
    example.train(model, text, 1.5, "cpu", Console(quiet=True))
    assert example.loss_of(model, text[None, :129]).item() < 0.7 * before
    assert example.check_steps(model, text[None, :40]) < 1e-5
    assert len(example.write(model, list("abcdefg"), "abc", 20, "cpu")) == 23
