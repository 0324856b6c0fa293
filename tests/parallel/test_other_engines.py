"""DDP, FSDP2 and accelerate with packed layers give the results and gradients of a single process."""

import copy
import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.linear_layers import activations, layer_of
from tests.support.processes import error_of, run
from torch_marlin_metal import MarlinLinear

K, N = 128, 96


def network() -> nn.Sequential:
    """Returns a packed layer between two float layers, which train."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, K), layer_of("uint4", K=K, N=N), nn.Linear(N, 8))


def gradient(model: nn.Module, weight: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(x).square().mean().backward()
    found = weight.grad
    return found.full_tensor() if isinstance(found, DTensor) else found.clone()


def compare(rank: int, world: int) -> None:
    """Runs in each process. Every engine averages the gradients of the processes' own inputs."""
    inputs = [activations(4, K) * (1 + r) for r in range(world)]
    whole = network()
    wanted = torch.stack([gradient(whole, whole[0].weight, x) for x in inputs]).mean(0)
    y = whole(inputs[rank])

    ddp = DistributedDataParallel(copy.deepcopy(whole))
    torch.testing.assert_close(gradient(ddp, ddp.module[0].weight, inputs[rank]), wanted)
    assert torch.equal(ddp(inputs[rank]), y)
    assert "doesn't have any parameter that requires a gradient" in error_of(
        lambda: DistributedDataParallel(layer_of("uint4", K=K, N=N))
    )

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}  # as torchrun does
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    prepared = Accelerator(cpu=True).prepare(copy.deepcopy(whole))
    assert isinstance(prepared, DistributedDataParallel)
    torch.testing.assert_close(gradient(prepared, prepared.module[0].weight, inputs[rank]), wanted)

    sharded = copy.deepcopy(whole)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world,)))
    torch.testing.assert_close(gradient(sharded, sharded[0].weight, inputs[rank]), wanted)
    layer = sharded[1]
    assert isinstance(layer, MarlinLinear) and isinstance(sharded[0].weight, DTensor)
    assert torch.equal(sharded(inputs[rank]), y)
    assert torch.equal(layer.b_packed, whole[1].b_packed)  # FSDP2 does not split buffers
    dist.barrier()


def test_other_engines_of_pytorch(tmp_path) -> None:
    run(compare, 2, tmp_path)
