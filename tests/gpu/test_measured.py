"""`profile --measure` times kernels that do the stated work. Times on the software device mean nothing."""

import json

import pytest
import torch
from typer.testing import CliRunner

from torch_marlin_metal.cli.app import app
from torch_marlin_metal.gpu import measured
from torch_marlin_metal.gpu.device import AppleSiliconGPU
from torch_marlin_metal.gpu.tuning import chains

ROWS = 64


@pytest.fixture
def small(mps, monkeypatch):
    """Makes the measurements small enough for the software device."""
    for module, name, value in (
        (measured, "ROUNDS", 2),
        (measured, "SIMDGROUPS_PER_CORE", 8),
        (measured, "STRIP_COLUMNS", 256),
        (measured, "READ_BYTES", ROWS * 256 * 4),
        (chains, "WARM_SECONDS", 0.01),
        (chains, "CHAIN_SECONDS", 1e-5),
    ):
        monkeypatch.setattr(module, name, value)


def test_kernels_do_the_work_that_is_timed(small) -> None:
    import softmetal

    gpu = AppleSiliconGPU.planned()
    state = torch.zeros(4, device="mps")
    work = measured._memory_chains(gpu, state) | measured._compute_chains(gpu, state)
    simdgroups = gpu.cores * measured.SIMDGROUPS_PER_CORE
    torch.mps.synchronize()
    for name, chain in work.items():
        with softmetal.checked():
            chain.run(1, state)
            torch.mps.synchronize()
            record = softmetal.counters()[-1]
        assert not softmetal.faults(), name
        assert record.kernel in ("touch", "read_all", "read_strips", "multiply_all", "primitive")
        if name.startswith("read"):
            counts = record.buffers[1]
            assert counts["bytes_read"] == counts["distinct_read"] == measured.READ_BYTES, name
        if name.startswith("matrix"):
            assert record.mmas == simdgroups * measured.ROUNDS * measured.CHAINS, name
        if name in ("simd_sum", "shuffle, varying index", "shuffle, fixed distance"):
            assert record.simd_operations == simdgroups * measured.ROUNDS * measured.CHAINS, name
    assert state.tolist() == [1.0, 0.0, 0.0, 0.0]  # `touch` sets the first element


def test_profile_measures_beside_the_model(small, monkeypatch) -> None:
    few = {name: measured.PRIMITIVES[name] for name in ("fma", "simd_sum")}  # few, because each is a kernel to compile
    monkeypatch.setattr(measured, "PRIMITIVES", few)
    done = CliRunner().invoke(app, ["profile", "--shape", "64,64", "--rows", "1", "--measure", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["measured"]
    assert list(found)[:3] == ["dispatch", "read", "read in strips"]
    assert set(measured.PRIMITIVES) | {"matrix fp16", "matrix fp32", "matrix peak, fp32"} <= set(found)
    assert all(row["measured"] > 0 and row["model"] > 0 for row in found.values())
    gpu = AppleSiliconGPU.planned()
    assert found["read"]["model"] == pytest.approx(gpu.reachable_dram_bytes_per_second / 1e9)
    assert found["matrix fp32"]["model"] == gpu.figures["matrix_clocks_fp32"].value
    rates = {"GB/s", "TFLOP/s", "us", "clocks"}
    assert {row["unit"] for row in found.values()} == rates


def test_figures_follow_from_times(mps) -> None:
    gpu = AppleSiliconGPU.from_name("M1")
    operations = gpu.cores * measured.SIMDGROUPS_PER_CORE * measured.ROUNDS * measured.CHAINS
    of_a_clock = operations / (4 * gpu.cores * gpu.clock_hz)  # seconds if each operation takes one clock
    names = ("matrix fp16", "matrix fp32", *measured.PRIMITIVES)
    seconds = dict.fromkeys(names, 1e-05 + 20 * of_a_clock)
    seconds |= dict.fromkeys(("read", "read in strips"), measured.READ_BYTES / 50e9)
    found = {row.name: row.measured for row in measured._figures(gpu, seconds, 1e-5)}
    assert found["dispatch"] == pytest.approx(10.0)
    assert found["read"] == found["read in strips"] == pytest.approx(50.0)
    assert [found[name] for name in names] == [pytest.approx(20.0)] * len(names)
    assert found["matrix peak, fp32"] == pytest.approx(gpu.matrix_flop_per_second / 1e12 * 18 / 20)
