"""The timers of tuner and benchmark separate the device's time from the host's. The tests use a fake clock."""

import sys

import pytest
import torch

import torch_marlin_metal as tmm
from lab.mac.mlx_product import lazy_clock
from tests.support import reference
from torch_marlin_metal import tuning
from torch_marlin_metal.gpu.tuning import chains
from torch_marlin_metal.gpu.tuning.chains import Chain, gpu_clock, product_chain, wall_clock

OPS = torch.ops.torch_marlin_metal

HOST, DEVICE, WAIT = 40.0, 28.0, 100.0


@pytest.fixture
def time_of(monkeypatch):
    """Returns a function that makes chains on a fake clock.

    The clock adds HOST seconds for a call, DEVICE for its work, and WAIT at the end.
    """
    now, waiting = [0.0], [0]
    monkeypatch.setattr(chains.time, "perf_counter", lambda: now[0])

    def step(state, index):
        now[0] += HOST
        waiting[0] += 1
        return index

    def finish(state):
        now[0] += DEVICE * waiting[0] + (WAIT if waiting[0] else 0)
        waiting[0] = 0

    return lambda clock: Chain(0, step, finish, clock)


def test_the_clock_of_a_lazy_library_has_neither_the_host_nor_the_wait(time_of) -> None:
    measured = time_of(lazy_clock).measure(5)
    assert (measured.seconds, measured.host_seconds) == (DEVICE, HOST)


def test_the_clock_on_the_wall_has_all_of_them(time_of) -> None:
    measured = time_of(wall_clock).measure(5)
    assert (measured.seconds, measured.host_seconds) == (HOST + DEVICE + WAIT / 5, HOST)


def test_each_device_has_its_clock() -> None:
    assert product_chain(torch.ones(1, 8), lambda state, index: state).clock is wall_clock


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_each_link_reads_its_product_and_keeps_the_activations(device, dtype) -> None:
    """A NaN in any product must reach the end of the chain. Finite products, even large ones, must not change it."""
    a = reference.random(2, 8, dtype=dtype).to(device)
    largest = 1e4 * torch.ones(2, 4, dtype=dtype, device=device)
    links = 5
    end = product_chain(a, lambda state, index: largest).run(links, a)
    assert torch.equal(end, a)
    for poisoned in range(links):
        chain = product_chain(a, lambda state, index, at=poisoned: largest * torch.nan if index == at else largest)
        assert chain.run(links, a).isnan().all(), f"{poisoned}: the chain does not read this product"


@pytest.mark.parametrize(("seconds", "calls", "measured"), [(0.06, 1, {1}), (0.04, 2, {1, 2}), (1e-3, 10, {1, 2})])
def test_a_long_call_is_measured_alone(monkeypatch, seconds, calls, measured) -> None:
    now, seen = [0.0], set()
    monkeypatch.setattr(chains.time, "perf_counter", lambda: now[0])

    def clock(chain, count):
        seen.add(count)
        now[0] += count * seconds
        return chains.Measured(seconds, 0.0)

    assert chains._calls(Chain(0, lambda state, index: index, lambda state: None, clock)) == calls
    assert seen == measured


@pytest.fixture
def gpu_chain(mps):
    """Returns a chain of products only, because PyTorch's addition would run on the CPU of the software device."""
    weight = tmm.quantize_weight(torch.randn(64, 64) / 8, "uint4b8", group_size=64).to("mps")
    a = torch.randn(2, 64, dtype=torch.float16, device="mps")

    def step(state, index):
        return OPS.gemm(state, weight.b_packed, weight.scales, weight_format="uint4b8", group_size=64)

    return Chain(a, step, lambda state: torch.mps.synchronize(), gpu_clock)


@pytest.mark.skipif(sys.platform == "darwin", reason="reads the software Metal device's counts")
def test_the_gpus_time_is_of_one_command_buffer(gpu_chain) -> None:
    import softmetal

    interval = tuning.commit_interval()
    try:
        tuning.set_commit_interval(1e-9)  # each product outside a measurement commits
        gpu_chain.measure(1)  # the first product queries the GPU for the planner
        before = softmetal.stream_counts()
        measured = gpu_chain.measure(3)
        after = softmetal.stream_counts()
    finally:
        tuning.set_commit_interval(interval)
    assert measured.seconds > 0
    assert measured.host_seconds > 0
    assert not measured.has_gaps
    # One commit for each of the three products before the measurement, and one for the measured products.
    assert after.commits - before.commits == 4
    assert after.waits - before.waits == 1


def test_a_commit_in_between_is_told(gpu_chain) -> None:
    def step(state, index):
        product = gpu_chain.step(state, index)
        torch.mps.synchronize()
        return product

    assert Chain(gpu_chain.first, step, gpu_chain.finish, gpu_clock).measure(2).has_gaps


def test_a_failing_chain_ends_its_measurement(gpu_chain) -> None:
    calls = []

    def step(state, index):
        calls.append(index)
        if len(calls) > 2:
            raise KeyError(index)
        return gpu_chain.step(state, index)

    with pytest.raises(KeyError):
        Chain(gpu_chain.first, step, gpu_chain.finish, gpu_clock).measure(2)
    assert gpu_chain.measure(2).seconds > 0
    with pytest.raises(RuntimeError, match="_end_gpu_time: this thread has begun no measurement"):
        torch.ops.torch_marlin_metal._end_gpu_time()
