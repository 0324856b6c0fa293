"""Compares plans, chips, tiles and rooflines with values computed by hand, and with the software device's counters."""

import functools
import itertools
import json
import math
from contextlib import contextmanager

import pytest
import torch

import torch_marlin_metal as tmm
from tests.support.programs import run_python
from torch_marlin_metal import profiling
from torch_marlin_metal.profiling import AppleSiliconGPU

OPS = torch.ops.torch_marlin_metal


def test_figures_have_sources():
    assert AppleSiliconGPU.names()[:3] == ("M1", "M1 Pro", "M1 Max")
    for name in AppleSiliconGPU.names():
        gpu = AppleSiliconGPU.from_name(f"Apple {name}")
        assert all(figure.source and figure.value > 0 for figure in gpu.figures.values())
        assert gpu.name in str(gpu) and "assumed" not in gpu.figures["dram_gbs"].source
    m1 = AppleSiliconGPU.from_name("M1")
    assert m1.flop_per_second() == pytest.approx(2.617e12, rel=1e-3)
    assert m1.matrix_flop_per_second == pytest.approx(2.617e12 * 16 / 18, rel=1e-3)
    assert AppleSiliconGPU.from_name("M3 Max", 30).dram_bytes_per_second == 300e9
    assert AppleSiliconGPU.from_name("M4 Max").flop_per_second() == pytest.approx(16.2e12, rel=2e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AppleSiliconGPU.from_name("M9"), r"from_name: name: expected one of M1, .*, got 'M9'"),
        (lambda: AppleSiliconGPU.from_name("M1", 9), r"from_name: cores: expected 7 to 8 for M1, got 9"),
        (lambda: tmm.profiling.plan(0, 8, 8, gpu="M1"), r"plan: M: expected 1 to \d+, got 0"),
        (lambda: tmm.profiling.plan(1, 8, 12, gpu="M1"), r"plan: K: expected a multiple of 8, got 12"),
        (
            lambda: tmm.profiling.plan(1, 8, 8, gpu="M1", group_size=5),
            r"plan: group_size: expected one of 16, .*, or K = 8 for uint4b8, got 5",
        ),
        (
            lambda: tmm.profiling.plan(1, 8, 8, gpu="M1", variant="fast"),
            r"plan: variant: expected one of auto, .*, got 'fast'",
        ),
        (
            lambda: tmm.profiling.plan(1, 8, 8, gpu="M1", dtype=torch.int8),
            r"plan: dtype: expected float16, .*, got torch.int8",
        ),
        (
            lambda: tmm.profiling.plan(1, 8, 8, gpu="M1", weight_format="int3"),
            r"expected one of uint4b8, .*, got 'int3'",
        ),
        (lambda: profiling.tile_table("M1", torch.int8), r"tile_table: dtype: expected float16, .*, got torch.int8"),
        (lambda: profiling.occupancy("fast", "M1"), r"occupancy: kernel: expected one of gemv, .*, got 'fast'"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_plan_lists_every_candidate():
    plan = tmm.profiling.plan(33, 4096, 4096, group_size=64, gpu="M1")
    assert plan.chosen in plan.candidates
    assert [c.seconds for c in plan.candidates] == sorted(c.seconds for c in plan.candidates)
    assert {c.variant for c in plan.candidates} == {
        "fused", "double_buffered", "single_stage", "striped", "two_pass"
    }  # fmt: skip
    assert plan.reason.startswith("shares what it decodes") and plan.reason in " ".join(str(plan).split())
    named = tmm.profiling.plan(33, 4096, 4096, group_size=64, gpu="M1", variant="striped")
    assert named.reason == "the call names its variant"
    text = str(plan)
    assert plan.chosen.dispatches[0].function in text and "on M1 (8 cores)" in text
    for candidate in plan.candidates:
        assert candidate.seconds == pytest.approx(sum(d.seconds for d in candidate.dispatches))
    assert tmm.profiling.plan(3, 64, 64, gpu="M1", weight_format="nf4", group_size=-1).group_size == 64


def test_two_pass_is_planned_and_not_taken():
    two_pass = tmm.profiling.plan(4096, 4096, 4096, gpu="M1", variant="two_pass").chosen
    assert [d.kernel for d in two_pass.dispatches] == ["dequantize", "torch.matmul"]
    peak = 2 * 4096**3 / 2.617e12  # PyTorch's product reaches 0.88 of the peak rate on an M1 Pro
    assert two_pass.dispatches[1].seconds == pytest.approx(peak / 0.88, rel=0.01)
    assert tmm.profiling.plan(4096, 4096, 4096, gpu="M1").chosen.variant != "two_pass"
    rounded = tmm.profiling.plan(4096, 4096, 4096, gpu="M1", variant="rounded")
    assert rounded.chosen.variant == "two_pass" and len({candidate.variant for candidate in rounded.candidates}) == 5


def test_roofline(tmp_path):
    roof = profiling.roofline("M1", [(1, 4096, 4096), (4096, 4096, 4096)], group_size=128)
    few, many = roof.points
    assert few.intensity < roof.gpu.balance < many.intensity
    assert many.attainable == roof.gpu.matrix_flop_per_second
    moved = 4096 * 4096 / 2 + 4096 * 4096 / 128 * 2 + 2 * 4096 * 2  # codes, scales, and one row of input and output
    assert few.intensity == pytest.approx(2 * 4096 * 4096 / moved)
    assert few.attainable == pytest.approx(few.intensity * 68.25e9 * 0.88)
    roof.plot(tmp_path / "roof.png")
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")


def test_tile_memory_by_hand():
    rows = {(row.variant, row.tile): row for row in profiling.tile_table("M1").rows}
    row = rows["double_buffered", (64, 64, 32)]
    activations, codes, scales = 2 * 64 * 32 * 2, 2 * 32 * 64 * 2, 2 * 2 * 2 * 64 * 4
    assert row.threadgroup_bytes == activations + codes + scales + 80 and row.simdgroups == 8
    assert row.flop_per_byte == pytest.approx(2 * 64 * 64 * 32 / (64 * 32 * 2 + 64 * 32 / 2))
    held = math.floor(min(61440 / row.threadgroup_bytes, 106496 / (256 * row.half_registers), 3072 / 256))
    assert row.occupancy.threadgroups == held
    assert row.waves(128, 128, 8) == 4 / (8 * held)
    assert profiling.occupancy("double_buffered", "M1")[64, 64, 32] == row.occupancy
    gemv = rows["gemv", (4, 128, 16)]
    launch = tmm.profiling.plan(4, 4096, 4096, group_size=128, gpu="M1", variant="gemv").chosen.dispatches[0]
    assert gemv.simdgroups * 32 == launch.threads[0] and gemv.threadgroup_bytes == gemv.simdgroups * 4 * 128 * 4
    assert {variant for variant, _ in rows} == {"gemv", "fused", "double_buffered", "single_stage", "striped"}


def test_selection_guide_covers_every_row():
    guide = profiling.selection_guide("M1", 4096, 4096, rows=range(1, 41))
    assert guide[0].first == 1 and guide[-1].last == 40
    assert all(b.first == a.last + 1 for a, b in itertools.pairwise(guide))
    assert guide[0].variant == "gemv" and guide[-1].variant == "fused"


def test_selection_guide_claims_no_row_that_was_not_planned():
    """From 65 to 72 rows, an M1 uses blocks of 24 rows; below and above, blocks of 32."""
    guide = profiling.selection_guide("M1", 4096, 4096)
    chosen = {M: choice.tile for choice in guide for M in range(choice.first, choice.last + 1)}
    assert set(chosen) == {*range(1, 129), 192, 256, 512, 1024, 2048, 4096}
    for M in (49, 64, 65, 72, 73, 96, 97):
        assert chosen[M] == tmm.profiling.plan(M, 4096, 4096, gpu="M1").chosen.tile
    assert chosen[64] != chosen[65]
    sparse = profiling.selection_guide("M1", 4096, 4096, rows=(64, 96))
    assert [(choice.first, choice.last) for choice in sparse] == [(64, 64), (96, 96)]


def test_without_a_mac():
    program = (
        "from torch_marlin_metal import profiling\n"
        "for call in (profiling.AppleSiliconGPU.current, profiling.trace().__enter__, lambda: profiling.plan(1, 8, 8)):\n"
        "    try: call()\n"
        "    except (RuntimeError, ValueError) as error: print(type(error).__name__, error)\n"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first.startswith("RuntimeError AppleSiliconGPU.current: this machine has no GPU")
    assert second.startswith("RuntimeError profiling.trace: needs a Mac")
    assert third.startswith("ValueError plan: gpu: expected one of M1, ")


def test_trace_calls(mps, monkeypatch, tmp_path):
    """A fake profiler records trace's calls of PyTorch's profiler, in order.

    Only a Mac can show whether Instruments and Xcode can read the trace.
    """
    calls = []

    @contextmanager
    def recorded(name, *arguments):
        calls.append((name, *arguments))
        try:
            yield
        finally:
            calls.append(("end of " + name,))

    for name in ("profile", "metal_capture"):
        monkeypatch.setattr(torch.mps.profiler, name, functools.partial(recorded, name))
    enabled = [True]
    monkeypatch.setattr(torch.mps.profiler, "is_metal_capture_enabled", lambda: enabled[0])
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)

    with profiling.trace():
        calls.append(("work",))
    assert calls == [("profile", "interval", False), ("work",), ("end of profile",)]
    calls.clear()
    path = tmp_path / "a.gputrace"
    with pytest.raises(KeyError), profiling.trace(capture=path, wait_until_completed=True):
        raise KeyError
    capture, marks = ("metal_capture", str(path)), ("profile", "interval", True)
    assert calls == [capture, marks, ("end of profile",), ("end of metal_capture",)]
    calls.clear()
    enabled[0] = False
    with pytest.raises(RuntimeError, match="MTL_CAPTURE_ENABLED=1"), profiling.trace(capture=path):
        calls.append(("work",))
    enabled[0] = True
    with pytest.raises(ValueError, match=r"expected a name that ends in \.gputrace, got 'a\.trace'"):
        profiling.trace(capture="a.trace").__enter__()
    path.touch()
    with pytest.raises(FileExistsError, match="exists"):
        profiling.trace(capture=path).__enter__()
    assert calls == []


def test_command_line(capsys):
    from typer.testing import CliRunner

    from torch_marlin_metal.cli.app import app

    done = CliRunner().invoke(app, ["plan", "16", "4096", "4096", "--gpu", "M1", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["chosen"]["variant"] == "fused"
    done = CliRunner().invoke(app, ["profile", "--gpu", "M2", "--shape", "512,512", "--rows", "1", "--json"])
    value = json.loads(done.stdout)
    assert value["gpu"]["name"] == "M2" and value["choices"]["512,512"][0]["first"] == 1
    assert CliRunner().invoke(app, ["profile", "--gpu", "M2", "--shape", "512"]).exit_code == 2


def test_cores_of_a_chip():
    from typer.testing import CliRunner

    from torch_marlin_metal.cli.app import app

    def planned(*options: str) -> dict:
        done = CliRunner().invoke(app, ["plan", "1", "4096", "14336", "--json", *options])
        return json.loads(done.stdout)

    fewer, all_cores = planned("--gpu", "M3 Max", "--cores", "30"), planned("--gpu", "M3 Max")
    assert (fewer["cores"], all_cores["cores"]) == (30, 40)
    # Apple specifies memory bandwidths of 300 and 400 GB/s.
    assert fewer["chosen"]["estimated_seconds"] > 1.2 * all_cores["chosen"]["estimated_seconds"]
    assert "expected 30 to 40 for M3 Max, got 41" in planned("--gpu", "M3 Max", "--cores", "41")["error"]
    assert "--cores: expected --gpu with it, got 8" in planned("--cores", "8")["error"]


def weight(N: int, K: int) -> dict[str, torch.Tensor]:
    return {
        "b_packed": torch.randint(-(2**31), 2**31 - 1, (K // 8, N), dtype=torch.int32),
        "scales": torch.rand(K // 64, N).half(),
    }


@pytest.mark.parametrize(("M", "variant"), [(3, "gemv"), (8, "fused"), (33, "fused"), (64, "double_buffered:64x64x32")])
def test_counts_of_the_software_device(mps, monkeypatch, M, variant):
    """The device runs the planned dispatches, and counts the matrix products and bytes of complete tiles."""
    import softmetal

    monkeypatch.setenv("TORCH_MARLIN_METAL_GPU", "M1")
    N, K = 256, 512
    tensors = {name: tensor.to(mps) for name, tensor in weight(N, K).items()}
    a = torch.rand(M, K).half().to(mps)
    softmetal.faults()
    out = OPS.gemm(a, **tensors, weight_format="uint4b8", group_size=64, variant=variant)
    assert torch.isfinite(out.cpu()).all()
    counted = [c for c in softmetal.counters() if c.kernel.startswith(("gem", "reduce"))]
    chosen = tmm.profiling.plan(M, N, K, group_size=64, gpu="M1", variant=variant.split(":")[0]).candidates
    planned = next(c for c in chosen if variant in (c.variant, f"{c.variant}:{'x'.join(map(str, c.tile))}"))
    assert [c.kernel for c in counted] == [d.function for d in planned.dispatches]
    rows_computed = {"gemv": 0, "fused": -(-M // 8) * 8, "double_buffered": M}[variant.split(":")[0]]
    assert sum(count.mmas for count in counted) == rows_computed * N * K / 8**3
    for count, dispatch in zip(counted, planned.dispatches, strict=True):
        assert count.threadgroups == math.prod(dispatch.grid)
        if dispatch.kernel != "reduce":
            assert count.distinct_bytes_read is not None
            rows = M if len(planned.dispatches) == 1 or planned.dispatches[1].kernel == "reduce" else None
            if rows is not None:
                distinct = K * N // 2 + K // 64 * N * 2 + rows * K * 2
                assert distinct <= count.distinct_bytes_read <= distinct + 64


def test_an_unknown_gpu_is_planned_as_its_family(mps, monkeypatch):
    """The software device reports the family Apple7, so it is planned as Apple7, with any number of cores."""
    monkeypatch.delenv("TORCH_MARLIN_METAL_GPU", raising=False)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M5 Ultra")
    for cores, name in ((80, "M1 Ultra"), (10, "M1"), (20, "M1 Pro")):
        monkeypatch.setattr(torch.backends.mps, "get_core_count", lambda cores=cores: cores)
        planned = AppleSiliconGPU.planned()
        assert (planned.name, planned.cores, planned.family) == (name, cores, 7)


def test_planned_gpu_follows_the_variable(mps, monkeypatch):
    monkeypatch.delenv("TORCH_MARLIN_METAL_GPU", raising=False)
    assert AppleSiliconGPU.planned().name == "M1"
    monkeypatch.setenv("TORCH_MARLIN_METAL_GPU", "M4 Max")
    assert tmm.profiling.plan(1, 64, 64).gpu == AppleSiliconGPU.from_name("M4 Max")
    monkeypatch.setenv("TORCH_MARLIN_METAL_GPU", "M99")
    with pytest.raises(ValueError, match=r"TORCH_MARLIN_METAL_GPU: expected one of M1, .*, got 'M99'"):
        AppleSiliconGPU.planned()
