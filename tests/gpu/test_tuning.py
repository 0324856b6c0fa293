"""The tuner times the right candidates and keeps the fastest. The operators then use this candidate."""

import dataclasses
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import torch_marlin_metal as tmm
from tests.support import reference
from tests.support.dispatches import dispatches_of
from tests.support.programs import run_python
from torch_marlin_metal import tuning
from torch_marlin_metal.cli.app import app
from torch_marlin_metal.gpu.tuning.table import Machine, TunedRange
from torch_marlin_metal.gpu.tuning.tuner import MOST_CANDIDATES, ROWS, candidates

OPS = torch.ops.torch_marlin_metal

PRODUCT = tuning.Product(N=64, K=128, weight_format="uint4b8", group_size=32)
software = pytest.mark.skipif(sys.platform == "darwin", reason="reads the software Metal device's counters")
uses_mps = pytest.mark.usefixtures("mps")


@pytest.fixture(autouse=True)
def models_choice():
    yield
    if torch.backends.mps.is_available():
        tuning.use(None)


def table_of(*ranges: tuple[int, int, str], machine: Machine | None = None) -> tuning.TuningTable:
    entries = tuple(TunedRange(PRODUCT, first, last, variant, 1e-6, "gemv", 1.5) for first, last, variant in ranges)
    return tuning.TuningTable(machine or Machine.current(), entries)


def kernels_for(M: int, **changes) -> list[str]:
    """Returns the names of the kernels that a product of M rows dispatches."""
    product = dataclasses.replace(PRODUCT, **changes)
    weight = product.make_weight("mps")
    a = torch.ones(M, product.K, dtype=product.torch_dtype, device="mps")
    return [record.kernel for record in dispatches_of(lambda: OPS.gemm(a, **weight.arguments()))]


@software
@uses_mps
@pytest.mark.large
def test_a_table_takes_the_place_of_the_models_choice():
    before = {M: kernels_for(M) for M in (2, 9)}
    tuning.use(table_of((1, 2, "single_stage"), (3, 8, "double_buffered:64x64x32")))
    assert kernels_for(2)[0].startswith("gemm_single_stage")
    assert kernels_for(3)[0].startswith("gemm_double_buffered_64x64x32_uint4b8_float16")
    assert kernels_for(9) == before[9]
    assert not kernels_for(2, dtype="float32")[0].startswith("gemm_single_stage")
    assert not kernels_for(2, group_size=64)[0].startswith("gemm_single_stage")
    tuning.use(None)
    assert {M: kernels_for(M) for M in (2, 9)} == before


@uses_mps
def test_a_tuned_product_is_right_and_a_variant_that_is_asked_for_is_taken():
    weight = reference.make_weight("uint4b8", PRODUCT.K, PRODUCT.N, PRODUCT.group_size)
    a = reference.random(3, PRODUCT.K, dtype=torch.float16)
    tuning.use(table_of((1, 64, "two_pass")))
    moved = weight.to("mps")
    dense = OPS.dequantize(moved.b_packed, moved.scales, **moved.arguments, dtype=torch.float16)
    auto = OPS.gemm(a.to("mps"), moved.b_packed, moved.scales, **moved.arguments)
    assert torch.equal(auto, a.to("mps") @ dense)
    exact, bound = reference.gemm(a, weight, raw_codes=True)
    named = OPS.gemm(a.to("mps"), moved.b_packed, moved.scales, **moved.arguments, variant="gemv")
    reference.check_gemm(named, exact, bound)


@uses_mps
def test_an_unknown_variant_and_another_machine_are_refused():
    tuning.use(table_of((1, 2, "single_stage")))
    with pytest.raises(ValueError, match="no kernel variant 'fastest'"):
        tuning.use(table_of((1, 2, "fastest")))
    other = dataclasses.replace(Machine.current(), gpu="Apple M9")
    with pytest.raises(ValueError, match=r"tuning\.use: table: expected one of .*, got one of .*Apple M9"):
        tuning.use(table_of((1, 2, "gemv"), machine=other))
    assert tmm.profiling.plan(2, PRODUCT.N, PRODUCT.K, group_size=PRODUCT.group_size).chosen.variant == "single_stage"


def counted(chains):
    """Returns the costs of chains, computed from counters: 1000 for each matrix product, and 1 for each thread."""
    import softmetal

    costs = {}
    for name, chain in chains.items():
        torch.mps.synchronize()
        softmetal.faults()
        chain.finish(chain.step(chain.first, 0))
        records = softmetal.counters()
        costs[name] = [float(sum(r.threads + 1000 * r.mmas for r in records))] * 3
    return costs


@software
@uses_mps
@pytest.mark.large
def test_the_least_cost_wins_for_the_rows_that_were_measured():
    seen = []

    def timer(chains):
        seen.append(counted(chains))
        return seen[-1]

    found = tuning.tune([PRODUCT], rows=(1, 33), timer=timer, cold_bytes=1, progress=False)
    assert found.machine == Machine.current()
    assert [(entry.first_rows, entry.last_rows) for entry in found.ranges] == [(1, 1), (33, 33)]
    for entry, costs in zip(found.ranges, seen, strict=True):
        assert len(costs) > 1
        assert entry.times == {name: values[0] for name, values in costs.items()}
        least = min(values[0] for values in costs.values())
        model = costs[entry.model_variant][0]
        if model > 1.02 * least:
            assert costs[entry.variant][0] == least
            assert entry.speedup == pytest.approx(model / least)
        else:
            assert (entry.variant, entry.speedup) == (entry.model_variant, 1.0)
    # For one row, gemv has the lowest cost, because other kernels compute the matrix products of a full tile.
    assert found.ranges[0].variant.startswith("gemv")


@uses_mps
def test_the_models_choice_stays_unless_another_is_clearly_faster():
    def timer(gain):
        def times(chains):
            model = next(iter(chains))
            return {name: [1.0 if name == model else 1 / gain] * 3 for name in chains}

        return times

    same = tuning.tune([PRODUCT], rows=(40,), timer=timer(1.01), compare=False, cold_bytes=1, progress=False).ranges[0]
    assert (same.variant, same.speedup) == (same.model_variant, 1.0)
    other = tuning.tune([PRODUCT], rows=(40,), timer=timer(1.5), compare=False, cold_bytes=1, progress=False).ranges[0]
    assert other.variant != other.model_variant
    assert other.speedup == pytest.approx(1.5)


@uses_mps
def test_differences_within_the_spread_of_the_rounds_change_nothing():
    def timer(model_times, other_times):
        return lambda chains: {name: other_times if i else model_times for i, name in enumerate(chains)}

    def chosen(*times):
        found = tuning.tune(
            [PRODUCT], rows=(40,), timer=timer(*times), compare=False, cold_bytes=1, progress=False
        ).ranges[0]
        return found.variant == found.model_variant

    # The median ratio is 1.1 in both cases. In the first case, the ratios range from 0.9 to 1.3.
    assert chosen([0.9, 1.0, 1.1, 1.2, 1.3], [1.0] * 5)
    assert not chosen([1.08, 1.09, 1.1, 1.11, 1.12], [1.0] * 5)


@software
@uses_mps
@pytest.mark.parametrize("gpu", ["M1", "M1 Max", "M4 Max"])
def test_tuning_that_confirms_the_planner_changes_no_plan(monkeypatch, gpu):
    monkeypatch.setenv("TORCH_MARLIN_METAL_GPU", gpu)
    product = dataclasses.replace(PRODUCT, N=4096, K=1024, group_size=64)
    rows = iter(ROWS)

    def choices(tuned):
        arguments = {"group_size": product.group_size, "tuned": tuned}
        return [tmm.profiling.plan(M, product.N, product.K, **arguments).chosen.name for M in range(1, 300)]

    def confirmed(chains):
        chosen = tmm.profiling.plan(
            next(rows), product.N, product.K, group_size=product.group_size, tuned=False
        ).chosen.name
        return {name: [1.0 if name == chosen else 2.0] * 9 for name in chains}

    before = choices(tuned=False)
    table = tuning.tune([product], timer=confirmed, compare=False, cold_bytes=1, progress=False)
    tuning.use(table)
    assert choices(tuned=True) == before
    assert [entry.first_rows for entry in table.ranges] == list(ROWS)


@uses_mps
@pytest.mark.parametrize("M", [1, 8, 100])
def test_candidates_cover_every_variant(M):
    product = dataclasses.replace(PRODUCT, N=4096, K=4096)
    names, chosen = candidates(product, M)
    plan = tmm.profiling.plan(M, 4096, 4096, group_size=32, tuned=False)
    exact = {candidate.variant for candidate in plan.candidates} - {"two_pass"}
    assert {name.split(":")[0] for name in names} - {"two_pass"} == exact
    assert names[0] == chosen == plan.chosen.name


@uses_mps
def test_two_passes_are_tried_only_for_many_rows():
    product = dataclasses.replace(PRODUCT, N=4096, K=4096)
    few, chosen = candidates(product, 4)
    many, _ = candidates(product, 512)
    assert few[0] == chosen
    assert "two_pass" not in few
    assert many[-1] == "two_pass"
    assert len(many) <= MOST_CANDIDATES + 1


@uses_mps
def test_rows_must_ascend():
    with pytest.raises(ValueError, match=r"tune: rows: expected ascending positive numbers, got \[4, 2\]"):
        tuning.tune([PRODUCT], rows=(4, 2), progress=False)


@uses_mps
def test_tables_are_kept_by_machine_and_product(tmp_path):
    path = tmp_path / "tuned.json"
    mine, other = Machine.current(), dataclasses.replace(Machine.current(), torch="1.0")
    tuning.save(table_of((1, 2, "gemv"), machine=other), path)
    tuning.save(table_of((1, 2, "single_stage")), path)
    assert [table.machine for table in tuning.load(path)] == [other, mine]
    tuning.save(table_of((1, 4, "double_buffered")), path)
    tables = tuning.load(path)
    assert [entry.variant for entry in tables[1].ranges] == ["double_buffered"]
    assert tables[0] == table_of((1, 2, "gemv"), machine=other)
    assert tuning.use_saved(path)
    assert (
        tmm.profiling.plan(4, PRODUCT.N, PRODUCT.K, group_size=PRODUCT.group_size).chosen.variant == "double_buffered"
    )
    tuning.use(None)
    path.write_text(json.dumps({"version": 1, "tables": [dataclasses.asdict(tables[0])]}))
    assert not tuning.use_saved(path)


MACHINE = Machine("Apple M1", 8, "2.13.0", "0")


def save_one(path: Path, N: int, ready: Any) -> None:
    entry = TunedRange(dataclasses.replace(PRODUCT, N=N), 1, 4, "gemv", 1e-6, "gemv", 1.5)
    ready.wait()
    tuning.save(tuning.TuningTable(MACHINE, (entry,)), path)


def test_processes_that_save_at_once_lose_no_choice(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(16)
    path = tmp_path / "new" / "tuned.json"
    savers = [context.Process(target=save_one, args=(path, 8 * (i + 1), ready)) for i in range(16)]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join()
    assert [saver.exitcode for saver in savers] == [0] * 16
    (table,) = tuning.load(path)
    assert sorted(entry.product.N for entry in table.ranges) == [8 * (i + 1) for i in range(16)]
    assert [file.name for file in path.parent.iterdir()] == ["tuned.json"]


@uses_mps
@pytest.mark.parametrize("text", ["{", '{"version": 2, "tables": []}', '{"version": 1, "tables": [{"machine": {}}]}'])
def test_a_damaged_table_is_named_and_left_alone(tmp_path, text):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.warns(UserWarning, match=r"tuned choices are not used: .*tuned\.json"):
        assert not tuning.use_saved(path)
    with pytest.raises(ValueError, match=r"tuned\.json"):
        tuning.save(table_of((1, 2, "gemv")), path)
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("first_rows", "1"),
        ("first_rows", -1),
        ("last_rows", 1.5),
        ("last_rows", None),
        ("first_rows", 2**32),
        ("K", "64"),
        ("N", 2**40),
        ("group_size", -1),
        ("variant", None),
        ("weight_format", 3),
    ],
    ids=str,
)
def test_a_table_of_wrong_values_is_named(tmp_path, field, value):
    path = tmp_path / "tuned.json"
    product = {"N": 64, "K": 64, "weight_format": "uint4b8", "group_size": 32, "dtype": "float16"}
    entry = {
        "first_rows": 1,
        "last_rows": 2,
        "variant": "fused",
        "seconds": 1.0,
        "model_variant": "gemv",
        "speedup": 2.0,
    }
    machine = {"gpu": "Apple M1", "cores": 8, "torch": "2", "package": "1"}

    def write(entry: dict, product: dict) -> None:
        table = {"machine": machine, "ranges": [{**entry, "product": product}]}
        path.write_text(json.dumps({"version": 1, "tables": [table]}))

    write(entry, product)
    assert len(tuning.load(path)) == 1
    write(*({**part, field: value} if field in part else part for part in (entry, product)))
    with pytest.raises(ValueError, match=r"tuned\.json: not a table of tuned products: TypeError"):
        tuning.load(path)


@pytest.mark.parametrize(
    "text", ["[]", "3", '{"version": 1, "tables": [3]}', "[" * 100_000], ids=["list", "number", "row", "deep"]
)
def test_a_table_that_is_something_else_is_named(tmp_path, text):
    (tmp_path / "tuned.json").write_text(text)
    with pytest.raises(ValueError, match=r"tuned\.json: not a table of tuned products"):
        tuning.load(tmp_path / "tuned.json")


@software
@uses_mps
def test_a_later_process_uses_the_saved_table(tmp_path):
    path = tuning.save(table_of((1, 2, "single_stage")), tmp_path / "tuned.json")
    script = f"import torch_marlin_metal as t; print(t.profiling.plan(1, {PRODUCT.N}, {PRODUCT.K}, group_size=32).chosen.variant)"
    done = run_python("-c", script, env={**os.environ, "TORCH_MARLIN_METAL_TUNED": str(path)}, mps=True)
    assert done.stdout.strip() == "single_stage", done.stderr


def test_products_of_a_checkpoint():
    path = Path(__file__).parents[1] / "data/layers/gptq/gptqmodel-sym-g32-actorder-v1"
    assert tuning.products_of(path) == [tuning.Product(64, 256, "uint4b8", 32, "float16")]


@uses_mps
@pytest.mark.large
def test_tune_command(tmp_path):
    path = tmp_path / "tuned.json"
    done = CliRunner().invoke(
        app,
        [
            "tune",
            "--shape",
            "64,128",
            "--group-size",
            "32",
            "--rows",
            "1",
            "--cold-mb",
            "1",
            "--output",
            str(path),
            "--json",
        ],
    )
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout)
    assert value["path"] == str(path)
    (entry,) = tuning.load(path)[0].ranges
    assert (entry.product, entry.first_rows, entry.last_rows) == (PRODUCT, 1, 1)
    assert value["ranges"][0]["variant"] == entry.variant
    assert CliRunner().invoke(app, ["tune"]).exit_code == 2
