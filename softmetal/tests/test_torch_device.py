"""Compares PyTorch's functions on `device="mps"` on Linux with the same functions on CPU tensors."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def same(on_mps: Tensor, on_cpu: Tensor) -> None:
    assert on_mps.device == torch.device("mps", 0)
    assert torch.equal(on_mps.cpu(), on_cpu)


# ---- memory --------------------------------------------------------------------------------------------------------


def test_new_memory_is_filled_with_nan() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.empty(1000, dtype=dtype, device="mps").isnan().all()
    assert torch.empty(1000, dtype=torch.int32, device="mps").eq(-1).all()


def test_a_data_pointer_is_an_object_not_memory() -> None:
    x = torch.zeros(1000, device="mps")
    assert x.untyped_storage().data_ptr() == x.data_ptr()
    assert x[3:].data_ptr() == x.data_ptr() + 12
    assert torch.empty(0, device="mps").untyped_storage().data_ptr() == 0


def test_memory_is_counted() -> None:
    before = torch.mps.current_allocated_memory()
    x = torch.empty(1 << 18, dtype=torch.float32, device="mps")
    assert torch.mps.current_allocated_memory() == before + (1 << 20)
    assert torch.mps.driver_allocated_memory() >= before + (1 << 20)
    del x
    assert torch.mps.current_allocated_memory() == before
    assert torch.mps.recommended_max_memory() > 1 << 30
    torch.mps.empty_cache()


def test_too_much_memory_is_refused() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="MPS backend out of memory"):
        torch.empty(1 << 60, dtype=torch.uint8, device="mps")
    torch.mps.set_per_process_memory_fraction(1e-6)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="max allowed"):
            torch.empty(1 << 20, device="mps")
    finally:
        torch.mps.set_per_process_memory_fraction(1.7)
    assert torch.zeros(1 << 20, device="mps").sum() == 0


def test_float64_is_refused_as_on_a_mac() -> None:
    message = "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"
    for make in (
        lambda: torch.zeros(3, dtype=torch.float64, device="mps"),
        lambda: torch.zeros(3, dtype=torch.float64).to("mps"),
        lambda: torch.zeros(3, device="mps").double(),
    ):
        with pytest.raises(TypeError, match=message):
            make()


# ---- copies, views, operators --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (3, 5, 7)).to(dtype)
    same(x.to("mps"), x)
    same(x.transpose(0, 2).to("mps"), x.transpose(0, 2))
    assert x.transpose(0, 2).to("mps").stride() == x.transpose(0, 2).stride()
    same(x[:, 1::2, 3:].to("mps"), x[:, 1::2, 3:])
    assert torch.equal(x.to("mps")[1:, ::2].cpu(), x[1:, ::2])


def test_copies_convert_and_broadcast() -> None:
    x = torch.randn(4, 6)
    same(x.to("mps").to(torch.float16), x.to(torch.float16))
    y = torch.zeros(3, 4, 6, device="mps")
    y[1:, ::2] = x.to("mps")[::2].half()
    expected = torch.zeros(3, 4, 6)
    expected[1:, ::2] = x[::2].half().float()
    same(y, expected)
    z = torch.complex(x, -x)
    same(z.to("mps").conj().resolve_conj(), z.conj().resolve_conj())
    same(z.to("mps").conj().imag, z.conj().imag)


def test_views_share_memory() -> None:
    x = torch.arange(24, dtype=torch.float32, device="mps")
    x.view(4, 6).t()[2] = -1
    assert x.tolist() == [-1.0 if i % 6 == 2 else float(i) for i in range(24)]
    y = torch.empty(0, device="mps").set_(x.untyped_storage(), 2, (3, 2), (4, 1))
    assert y.tolist() == [[-1, 3], [6, 7], [10, 11]]
    with pytest.raises(RuntimeError, match="need more than the storage's 96 bytes"):
        torch.empty(0, device="mps").set_(x.untyped_storage(), 20, (5,), (1,))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.select(1, 1).add_(3),
        lambda x: x[:, :, 2].mul_(x[:, :, 1]),
        lambda x: x.transpose(0, 1)[0].addcmul_(x[:, 1], x[:, 2]),
        lambda x: x[:, 1].clamp_(max=5),
    ],
)
def test_operators_in_place_change_what_a_view_shows_and_nothing_else(change: Callable[[Tensor], object]) -> None:
    on_cpu = torch.arange(24.0).reshape(2, 3, 4)
    on_mps = on_cpu.to("mps", copy=True)
    change(on_cpu)
    change(on_mps)
    same(on_mps, on_cpu)


def test_resize_keeps_values() -> None:
    x = torch.arange(6, dtype=torch.float32, device="mps")
    x.resize_(2, 3)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    x.resize_(100)
    assert x[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert x[6:].isnan().all()


OPERATORS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x @ x.t(),
    lambda x: torch.einsum("ij,kj->ik", x, x),
    lambda x: torch.cat([x, x[:2]]).sort(0).values,
    lambda x: x[x[:, 0] > 0],
    lambda x: x.softmax(-1).cumsum(0),
    lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    lambda x: torch.where(x > 0, x, -x).sum(1, keepdim=True),
    lambda x: x.clone().index_add_(0, torch.tensor([0, 0], device=x.device), x[2:4]),
    lambda x: torch.linalg.svdvals(x),
    lambda x: x.masked_fill(x < 0, 0).topk(2).values,
    lambda x: torch.fft.rfft(x).abs(),
]


@pytest.mark.parametrize("number", range(len(OPERATORS)))
def test_operators(number: int) -> None:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    on_mps = OPERATORS[number](x.to("mps"))
    assert on_mps.is_mps
    torch.testing.assert_close(on_mps.cpu(), OPERATORS[number](x))


def test_printing_and_scalars() -> None:
    assert repr(torch.tensor([1.5, 2], device="mps")) == "tensor([1.5000, 2.0000], device='mps:0')"
    assert torch.tensor(3, device="mps").item() == 3
    assert float(torch.tensor(0.25, dtype=torch.bfloat16, device="mps")) == 0.25


def test_mixing_devices_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="mps") + torch.ones(3)
    with pytest.raises(RuntimeError, match=r"aten::mm: expected all tensors on mps, got one of sizes .3, 3. on cpu"):
        torch.ones(3, 3, device="mps") @ torch.ones(3, 3)
    x = torch.arange(4.0, device="mps")
    assert x[torch.tensor([2, 0])].tolist() == [2, 0]  # as on a Mac, indices and scalars on the CPU are accepted
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]


# ---- modules, autograd ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.norm(x + self.convolution(x.transpose(1, 2)).transpose(1, 2)).relu()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).pow(2).sum().backward()
    return [p.grad.cpu() for p in model.parameters()]


def test_training_step_equals_the_cpus() -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 5, 8)
    on_mps = copy.deepcopy(model).to("mps")
    for ours, theirs in zip(gradients(on_mps, x.to("mps")), gradients(model, x), strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(on_mps.parameters(), model.parameters(), strict=True):
        # Both devices take the step with the CPU's gradients. With their own gradients, a rounding error could become a
        # full step, because AdamW divides each gradient by its magnitude, which may be near zero.
        ours.grad.copy_(theirs.grad)
    for m in (model, on_mps):
        torch.optim.AdamW(m.parameters(), lr=0.1).step()
    for ours, theirs in zip(on_mps.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
    assert copy.deepcopy(on_mps).norm.weight.is_mps


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    attend = nn.functional.scaled_dot_product_attention
    expected = attend(q, k, v, is_causal=causal)
    torch.testing.assert_close(attend(q.to("mps"), k.to("mps"), v.to("mps"), is_causal=causal).cpu(), expected)
    on_mps = q.to("mps").requires_grad_()
    attend(on_mps, k.to("mps"), v.to("mps"), is_causal=causal).sum().backward()
    attend(q.requires_grad_(), k, v, is_causal=causal).sum().backward()
    torch.testing.assert_close(on_mps.grad.cpu(), q.grad)


def test_attention_with_a_mask_of_booleans() -> None:
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    mask = torch.ones(6, 6, dtype=torch.bool).tril(2)
    attend = nn.functional.scaled_dot_product_attention
    got = attend(q.to("mps"), k.to("mps"), v.to("mps"), attn_mask=mask.to("mps"))
    torch.testing.assert_close(got.cpu(), attend(q, k, v, attn_mask=mask))


def test_transposed_convolution_with_bias() -> None:
    x, w, b = torch.randn(1, 4, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(3)
    leaves = [t.to("mps").requires_grad_() for t in (x, w, b)]
    nn.functional.conv_transpose2d(*leaves, stride=2).sum().backward()
    expected = [t.clone().requires_grad_() for t in (x, w, b)]
    nn.functional.conv_transpose2d(*expected, stride=2).sum().backward()
    for ours, theirs in zip(leaves, expected, strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 3).to("mps")
    with torch.autocast("mps", dtype=dtype):
        y = layer(torch.randn(2, 4, device="mps"))
        assert y.dtype == dtype
        assert y.float().softmax(-1).dtype == torch.float32
    y.sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_save_and_load() -> None:
    layer = nn.Linear(4, 3).to("mps")
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")
    assert torch.equal(loaded["weight"], layer.weight.detach().cpu())
    file.seek(0)
    same(torch.load(file)["weight"], layer.weight.detach().cpu())


# ---- torch.mps, torch.accelerator ----------------------------------------------------------------------------------


def test_the_device_is_the_accelerator() -> None:
    assert torch.backends.mps.is_available()
    assert torch.backends.mps.is_built()
    assert torch.backends.mps.get_name() == "softmetal"
    assert torch.mps.device_count() == 1
    assert torch.accelerator.current_accelerator() == torch.device("mps")
    assert torch.accelerator.device_count() == 1
    torch.accelerator.synchronize()
    with torch.device("mps"):
        assert torch.ones(2).is_mps
    with pytest.raises(RuntimeError, match="expected mps device 0, got 1"):
        torch.zeros(1, device="mps:1")


def test_seeds() -> None:
    draws = []
    for _ in range(2):
        torch.mps.manual_seed(7)
        draws.append(torch.randn(5, device="mps").tolist() + torch.rand(3, device="mps").tolist())
    assert draws[0] == draws[1]
    state = torch.mps.get_rng_state()
    after = torch.randperm(9, device="mps").tolist()
    torch.mps.set_rng_state(state)
    assert torch.randperm(9, device="mps").tolist() == after
    generators = [torch.Generator("mps").manual_seed(3) for _ in range(2)]
    first, second = (torch.rand(4, device="mps", generator=g).tolist() for g in generators)
    assert first == second
    assert torch.rand(4, device="mps", generator=generators[0]).tolist() != first
    host = torch.random.get_rng_state()
    torch.rand(4, device="mps")
    assert torch.equal(torch.random.get_rng_state(), host)


SLOW = """
kernel void twice(device float* x, uint i [[thread_position_in_grid]]) { for (int k = 0; k < 5000; ++k) x[i] += 1; }
"""


def test_events() -> None:
    library = torch.mps.compile_shader(SLOW)
    x = torch.zeros(64, device="mps")
    start, end = torch.mps.Event(enable_timing=True), torch.mps.Event(enable_timing=True)
    assert end.query()
    start.record()
    library.twice(x)
    end.record()
    assert not end.query()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) > 0
    end.wait()
    assert x[0].item() == 5000


def test_events_of_any_device() -> None:
    """transformers' generate waits for a copy with torch.Event, so torch.Event must work on mps."""
    library = torch.mps.compile_shader(SLOW)
    x, copied = torch.zeros(64, device="mps"), torch.zeros(64)
    start, end = (torch.Event(device="mps", enable_timing=True) for _ in range(2))
    start.record()
    library.twice(x)
    copied.copy_(x, non_blocking=True)
    end.record()
    end.synchronize()
    assert copied[0] == 5000
    assert end.query()
    assert start.elapsed_time(end) > 0
    end.wait()


def test_host_alias_storage() -> None:
    x = torch.zeros(4, device="mps")
    torch.mps.synchronize()  # torch.zeros has only encoded a command
    alias = torch.mps._host_alias_storage(x.untyped_storage())
    torch.empty(0).set_(alias, 0, (4,))[2] = 9
    assert x.tolist() == [0, 0, 9, 0]
    del x
    assert len(alias) == 16
