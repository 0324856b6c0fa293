"""Split layers of several processes compute what one process computes."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import torch_marlin_metal.integrations.peft  # noqa: F401
from tests.support.linear_layers import activations, layer_of
from tests.support.models import IDS, SIZES
from torch_marlin_metal import quantize_model
from torch_marlin_metal.layers.fuse import fuse_projections, unfused
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.parallel import MarlinColwiseParallel, MarlinRowwiseParallel

HIDDEN, WIDE = 128, 384


class Block(nn.Module):
    """The MLP of a decoder layer, which is split by N first and by K second."""

    def __init__(self, weight_format: str) -> None:
        super().__init__()
        self.up = layer_of(weight_format, K=HIDDEN, N=WIDE)
        self.down = layer_of(weight_format, K=WIDE, N=HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


def error_of(call) -> str:
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "no error"


def compare(rank: int, world: int, file: str) -> None:
    """Runs in each process."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    plan = {"up": MarlinColwiseParallel(), "down": MarlinRowwiseParallel()}
    try:
        for weight_format, dtype in (("uint4b8", torch.float32), ("uint4", torch.bfloat16), ("nvfp4", torch.float16)):
            whole = Block(weight_format)
            split = parallelize_module(copy.deepcopy(whole), mesh, plan)
            x = activations(3, HIDDEN, dtype=dtype)
            hidden, part = whole.up(x), split.up(x)
            columns = slice(rank * WIDE // world, (rank + 1) * WIDE // world)
            assert torch.equal(part, hidden[:, columns])
            check_sum(whole.down, hidden, split.down(hidden[:, columns].contiguous()), dtype)
            with torch.autocast("cpu", torch.bfloat16):
                check_sum(whole.down, hidden.bfloat16(), split.down(hidden[:, columns].contiguous()), torch.bfloat16)
            first, second = split(x), copy.deepcopy(split)(x)
            assert torch.equal(first, second)
            everyone = [torch.empty_like(first) for _ in range(world)]
            dist.all_gather(everyone, first)
            assert all(torch.equal(first, other) for other in everyone)
            compiled = torch.compile(split, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(x), first)
        check_generate(mesh)
        check_errors(rank, world, mesh, plan)
    finally:
        dist.destroy_process_group()


def check_sum(layer: MarlinLinear, a: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> None:
    """Compares a sum of products with fp64 and the bound of docs/numerics.md for one product."""
    assert y.dtype == dtype
    x, w = a.double().numpy(), layer.dequantize().double().numpy().T
    wanted = x @ w + layer.bias.double().numpy()
    size = np.abs(x) @ np.abs(w) + np.abs(layer.bias.double().numpy())
    rounding = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[y.dtype]
    assert (np.abs(y.double().numpy() - wanted) <= 2.0**-18 * size + rounding * np.abs(wanted) + 1e-7).all()


def check_generate(mesh) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)).eval()
    quantize_model(model, "uint4", 32, progress=False)
    alone = model.generate(IDS, max_new_tokens=8, do_sample=False)
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan = {f"model.layers.*.{name}": MarlinColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": MarlinRowwiseParallel() for name in rows}
    parallelize_module(model, mesh, plan)
    assert {type(layer).__name__ for layer in model.model.layers.modules()} >= {"ColumnPart", "RowPart"}
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), alone)


def check_errors(rank: int, world: int, mesh, plan) -> None:
    again = parallelize_module(Block("uint4b8"), mesh, plan)
    assert "MarlinColwiseParallel: expected a MarlinLinear that is not split, got ColumnPart" in error_of(
        lambda: parallelize_module(again, mesh, plan)
    )
    assert "expected a MarlinLinear that is not split, got Linear" in error_of(
        lambda: parallelize_module(nn.Linear(8, 8), mesh, MarlinRowwiseParallel())
    )
    for style in (ColwiseParallel(), RowwiseParallel()):  # torch's own styles would leave buffers whole
        assert "only support nn.Linear" in error_of(lambda s=style: parallelize_module(Block("uint4b8").up, mesh, s))
    x = activations(2, HIDDEN).requires_grad_()
    assert "MarlinColwiseParallel: a: expected activations without a gradient" in error_of(lambda: again(x))
    assert fuse_projections(again, [("up", "down")]).left[0][1] == "one is a ColumnPart"
    assert "layer 'up': expected a whole weight, got one process' part of it (ColumnPart)" in error_of(
        lambda: list(unfused(again))
    )
    assert "MarlinLoraLinear: layer 'down': expected a MarlinLinear with a whole weight, got a RowPart" in error_of(
        lambda: get_peft_model(again, LoraConfig(target_modules=["down"]))
    )
    hooked = Block("uint4b8")
    add_hook_to_module(hooked.up, ModelHook())
    assert "MarlinColwiseParallel: expected a MarlinLinear with the forward of its class" in error_of(
        lambda: parallelize_module(hooked, mesh, plan)
    )
    odd = layer_of("uint4b8", K=HIDDEN, N=7)
    assert "split_columns: count: expected a divisor of 7" in error_of(
        lambda: parallelize_module(odd, mesh, plan["up"])
    )
    other = layer_of("uint4b8", K=HIDDEN, N=WIDE)
    order = torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(0)).int()
    other.perm = order.flip(0) if rank == world - 1 else order
    assert f"got another perm in rank {world - 1}" in error_of(lambda: parallelize_module(other, mesh, plan["up"]))
    if rank == world - 1:
        other.b_packed = other.b_packed ^ 1
    other.perm = None
    assert f"got another packed words in rank {world - 1}" in error_of(
        lambda: parallelize_module(other, mesh, plan["up"])
    )


@pytest.mark.parametrize("world", [2])
def test_split_layers_compute_what_one_process_computes(world, tmp_path):
    processes.spawn(compare, (world, str(tmp_path / "rendezvous")), nprocs=world)
