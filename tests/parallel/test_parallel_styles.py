"""Layers that are split over several processes give the results of a single process."""

import copy
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_marlin_metal.integrations.peft  # noqa: F401
from tests.support.linear_layers import activations, layer_of
from tests.support.models import IDS, same, tensors
from tests.support.processes import error_of, meshes, run
from tests.support.split_llama import divisible_llama, llama_plan
from torch_marlin_metal import MarlinExperts, quantize_model, quantize_weight
from torch_marlin_metal.layers import ExpertWeights
from torch_marlin_metal.layers.experts import silu_gate
from torch_marlin_metal.layers.fuse import fuse_projections, unfused
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.parallel import (
    MarlinColwiseParallel,
    MarlinExpertParallel,
    MarlinRowwiseParallel,
    SplitPlan,
    agreement,
)

HIDDEN, WIDE = 128, 768


class Block(nn.Module):
    """The MLP of a decoder layer. The first product is split by N and the second by K."""

    def __init__(self, weight_format: str) -> None:
        super().__init__()
        self.up = layer_of(weight_format, K=HIDDEN, N=WIDE)
        self.down = layer_of(weight_format, K=WIDE, N=HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


def compare(rank: int, world: int) -> None:
    """Runs in each process."""
    plan = {"up": MarlinColwiseParallel(), "down": MarlinRowwiseParallel()}
    for mesh in meshes(world):
        if rank < mesh.size():
            for weight_format, dtype in (
                ("uint4b8", torch.float32),
                ("uint4", torch.bfloat16),
                ("nvfp4", torch.float16),
            ):
                check_block(rank, mesh, plan, weight_format, dtype)
            check_experts(mesh)
            check_generate(mesh)
    mesh = meshes(world)[1]
    if rank < 2:
        check_errors(rank, 2, mesh, plan)
        check_plans(rank, mesh)
        check_pipelining(rank, mesh)


def check_block(rank: int, mesh: DeviceMesh, plan, weight_format: str, dtype: torch.dtype) -> None:
    world = mesh.size()
    whole = Block(weight_format)
    split = parallelize_module(copy.deepcopy(whole), mesh, plan)
    x = activations(3, HIDDEN, dtype=dtype)
    hidden, part = whole.up(x), split.up(x)
    columns = slice(rank * WIDE // world, (rank + 1) * WIDE // world)
    assert torch.equal(part, hidden[:, columns])
    gathered = parallelize_module(copy.deepcopy(whole.up), mesh, MarlinColwiseParallel(gather=True))
    assert torch.equal(gathered(x), hidden) and torch.equal(gathered(x[None]), hidden[None])
    check_sum(whole.down, hidden, split.down(hidden[:, columns].contiguous()), dtype)
    with torch.autocast("cpu", torch.bfloat16):
        check_sum(whole.down, hidden.bfloat16(), split.down(hidden[:, columns].contiguous()), torch.bfloat16)
    many = activations(200, HIDDEN, dtype=dtype)  # more bytes than processes send directly to each other
    check_sum(whole.down, torch.nn.functional.silu(whole.up(many)), split(many), dtype)
    for rows in (x, many):
        first = split(rows)
        assert torch.equal(first, copy.deepcopy(split)(rows))
        everyone = [torch.empty_like(first) for _ in range(world)]
        dist.all_gather(everyone, first, group=mesh.get_group())
        assert all(torch.equal(first, other) for other in everyone)
    first = split(x)
    if weight_format == "uint4b8":
        compiled = torch.compile(split, fullgraph=True, backend="aot_eager")
        y = compiled(x)
        assert torch.equal(y, compiled(x))
        if world <= 2:
            assert torch.equal(y, first)
        else:  # compiled, gloo adds more than two parts in its own order
            torch.testing.assert_close(y, first, rtol=1e-5, atol=1e-6)


def check_experts(mesh: DeviceMesh) -> None:
    """Compares split experts with all experts in one process. Some ids name no expert."""
    E, H, inner = 12, 64, 96
    torch.manual_seed(0)
    weights = [
        [quantize_weight(torch.randn(n, k) / 8, "uint4", 32) for n, k in ((inner, H), (inner, H), (H, inner))]
        for _ in range(E)
    ]
    whole = MarlinExperts(
        ExpertWeights.from_packed([w[:2] for w in weights]),
        ExpertWeights.from_packed([w[2:] for w in weights]),
        silu_gate,
    )
    split = parallelize_module(copy.deepcopy(whole), mesh, MarlinExpertParallel())
    assert split.num_experts == E // mesh.size() and split.gate_up.b_packed.untyped_storage().nbytes() == (
        whole.gate_up.b_packed.untyped_storage().nbytes() // mesh.size()
    )
    x, ids = activations(5, H), torch.randint(-1, E + 1, (5, 2))
    ids[0] = torch.tensor([-1, E])  # this token has no expert
    routing = torch.rand(5, 2)
    exact = torch.zeros(5, H, dtype=torch.float64)
    size = torch.zeros(5, H, dtype=torch.float64)
    for t, s in ((t, s) for t in range(5) for s in range(2) if 0 <= ids[t, s] < E):
        gate, up, down = (w.dequantize().double() for w in weights[ids[t, s]])
        a = torch.nn.functional.silu(x[t].double() @ gate) * (x[t].double() @ up)
        exact[t] += routing[t, s].double() * (a @ down)
        size[t] += routing[t, s].double() * (
            a.abs() @ down.abs() + x[t].abs().double() @ (gate.abs() + up.abs()) @ down.abs()
        )
    y = split(x, ids, routing)
    assert y[0].abs().max() == 0 and (y.double() - exact).abs().le(2.0**-16 * size + 1e-6).all()
    assert torch.equal(y, split(x, ids, routing))
    half = split(x.bfloat16(), ids, routing)
    assert half.dtype == torch.bfloat16 and torch.allclose(
        half.float(), whole(x.bfloat16(), ids, routing).float(), 0.02, 0.02
    )
    assert "activations without a gradient" in error_of(lambda: split(x.requires_grad_(), ids, routing))
    assert "and are not split, got ExpertPart" in error_of(
        lambda: parallelize_module(split, mesh, MarlinExpertParallel())
    )
    if mesh.size() == 2:
        few = MarlinExperts(
            ExpertWeights.from_packed([w[:2] for w in weights[:3]]),
            ExpertWeights.from_packed([w[2:] for w in weights[:3]]),
            silu_gate,
        )
        assert "a number of processes that divides 3 experts, got 2" in error_of(
            lambda: parallelize_module(few, mesh, MarlinExpertParallel())
        )


def check_sum(layer: MarlinLinear, a: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> None:
    """Compares a sum of products with fp64, within the bound of docs/use/operators.md for one product."""
    assert y.dtype == dtype
    x, w = a.double().numpy(), layer.dequantize().double().numpy().T
    wanted = x @ w + layer.bias.double().numpy()
    size = np.abs(x) @ np.abs(w) + np.abs(layer.bias.double().numpy())
    rounding = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[y.dtype]
    assert (np.abs(y.double().numpy() - wanted) <= 2.0**-18 * size + rounding * np.abs(wanted) + 1e-7).all()


def check_generate(mesh: DeviceMesh) -> None:
    model = divisible_llama()
    quantize_model(model, "uint4", 32, progress=False)
    alone = model.generate(IDS, max_new_tokens=8, do_sample=False)
    SplitPlan(mesh, llama_plan()).apply(model)
    assert {type(layer).__name__ for layer in model.model.layers.modules()} >= {"ColumnPart", "RowPart"}
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), alone)


def check_plans(rank: int, mesh: DeviceMesh) -> None:
    """A plan that fails halfway leaves the model unchanged."""
    model = Block("uint4b8")
    model.extra = layer_of("uint4b8", K=HIDDEN, N=7)
    model.dense = nn.Linear(8, 8)
    before = tensors(model)
    columns, rows = MarlinColwiseParallel(), MarlinRowwiseParallel()

    def error(plan) -> str:
        said = error_of(lambda: SplitPlan(mesh, plan).apply(model))
        kinds = {type(module) for name, module in model.named_modules() if name}
        assert kinds == {MarlinLinear, nn.Linear} and same(tensors(model), before)
        assert not isinstance(model.dense.weight, DTensor)
        return said

    both = {"up": columns, "down": rows}
    assert "layer 'extra': split_columns: count: expected a divisor of 7" in error(both | {"extra": columns})
    foreign = {"dense": ColwiseParallel()}
    assert "layer 'extra': split_columns" in error(both | foreign | {"extra": columns})
    assert "got down.proj, which the model lacks" in error(both | {"down.proj": columns})
    assert "layer 'down': RowwiseParallel is no style for a MarlinLinear" in error({"down": RowwiseParallel()})
    assert "layer 'dense': MarlinColwiseParallel is no style for a Linear" in error(both | {"dense": columns})
    model.mixed = layer_of("uint4b8" if rank == 0 else "uint4", K=HIDDEN, N=WIDE)
    before = tensors(model)
    assert (
        "layer 'mixed': MarlinColwiseParallel: expected the same package and weight in every process, got another "
        in (said := error(both | {"mixed": columns}))
    )
    assert "weight format" in said and "in rank 1 of the group than in rank 0" in said
    agreement.__version__ = "0.0.1" if rank == 1 else agreement.__version__
    assert "got another version in rank 1" in error(both)
    square = SimpleNamespace(ndim=2)
    assert "mesh: expected one dimension, got 2" in error_of(lambda: SplitPlan(square, both))
    assert "plan: expected at least one name" in error_of(lambda: SplitPlan(mesh, {}))


def check_errors(rank: int, world: int, mesh, plan) -> None:
    again = parallelize_module(Block("uint4b8"), mesh, plan)
    assert "MarlinColwiseParallel: expected a MarlinLinear that is not split, got ColumnPart" in error_of(
        lambda: parallelize_module(again, mesh, plan)
    )
    assert "expected a MarlinLinear that is not split, got Linear" in error_of(
        lambda: parallelize_module(nn.Linear(8, 8), mesh, MarlinRowwiseParallel())
    )
    for style in (ColwiseParallel(), RowwiseParallel()):  # torch's own styles would not split buffers
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


def check_pipelining(rank: int, mesh: DeviceMesh) -> None:
    """PyTorch's own pipeline runs packed layers on the CPU, two microbatches one after the other."""
    blocks = [Block("uint4b8"), Block("uint4")]
    x = activations(4, HIDDEN)
    stage = PipelineStage(blocks[rank], rank, 2, torch.device("cpu"), group=mesh.get_group())
    schedule = ScheduleGPipe(stage, 2)
    with torch.no_grad():
        if rank == 0:
            schedule.step(x)
        else:
            assert torch.equal(schedule.step(), blocks[1](blocks[0](x)))


def test_split_layers_compute_what_one_process_computes(tmp_path):
    run(compare, 4, tmp_path)
