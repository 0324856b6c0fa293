"""Compares lab/agx's instruction counts with a listing that was counted by hand, without a compiler."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lab" / "agx"))

import agxstat  # noqa: E402
import counts  # noqa: E402
from metal_to_opencl import rewrite  # noqa: E402
from metal_tokens import Err, flatten  # noqa: E402

from lab.counting import instructions, kernel_counts  # noqa: E402
from lab.model import counts as model_counts  # noqa: E402
from torch_marlin_metal.formats import WEIGHT_FORMATS  # noqa: E402

# Two loops: the inner loop is instructions 1 to 5, the outer loop 0 to 7. Columns: offset, bytes, name, format, number
# of elements, target of a jump, text. Format 2 has elements of 4 bytes.
LISTING = [
    ("0", "4", "mov_imm", "-1", "0", "-1"),
    ("4", "8", "device_load", "2", "4", "-1"),
    ("12", "2", "wait", "-1", "0", "-1"),
    ("14", "6", "ffma", "-1", "0", "-1"),
    ("20", "6", "bfi", "-1", "0", "-1"),
    ("26", "6", "jmp_exec_any", "-1", "0", "4"),
    ("32", "6", "simd_reduce.fadd", "-1", "0", "-1"),
    ("38", "6", "jmp_exec_any", "-1", "0", "0"),
    ("44", "2", "stop", "-1", "0", "-1"),
]
LOG = "agxlist\tmain\n" + "".join("\t".join((*row, row[2])) + "\n" for row in LISTING) + "agxlist\tend\n"


def test_a_listing_counted_by_hand() -> None:
    found = counts.report(
        {"regs": 93, "threads": 1024, "spills": 0, "fills": 0, "scratch": 0, "uniforms": 8},
        {"local": 0, "wg": (256, 1, 1), "msize": 62},
        counts.listing(LOG, "main"),
        [],
    )
    inner, outer = sorted(found["loops"], key=lambda loop: loop["instructions"])
    assert (inner["instructions"], outer["instructions"]) == (5, 8)
    assert inner["innermost"] and not outer["innermost"] and found["loops"][found["hot_loop"]] is inner
    # issue slots: one each for the load, the multiply-add and the bitfield operation, two for the jump, none for the
    # wait
    assert (inner["issue"], inner["waits"], inner["ic_cycles"], inner["device_load_bytes"]) == (5, 1, 4, 16)
    assert (outer["issue"], outer["simd_cycles"]) == (inner["issue"] + 1 + 2, 15)
    assert inner["est_cycles"] == 5 and outer["est_cycles"] == 8 + 15
    assert inner["code_bytes"] == 28


def test_a_listing_that_disagrees_with_the_statistics_is_refused() -> None:
    instructions = counts.listing(LOG, "main")
    with pytest.raises(counts.Fail, match="9 instructions listed, 10 in the statistics"):
        counts.checked(instructions, {"inst": 10}, {"msize": 62, "main": 0})


def test_a_header_included_in_a_dropped_branch_is_included_again_later(tmp_path: Path) -> None:
    (tmp_path / "shared.h").write_text("#pragma once\nstruct Shared { int x; };\n")
    kernel = tmp_path / "kernel.metal"
    kernel.write_text('#ifdef HOST\n#include "shared.h"\n#endif\n#include <metal_stdlib>\n#include "shared.h"\n')
    text = flatten(str(kernel), [])
    done = subprocess.run(["c++", "-E", "-P", "-x", "c++", "-"], input=text, capture_output=True, text=True, check=True)
    assert done.stdout.count("struct Shared") == 1
    with pytest.raises(Err, match=r"cannot read .*none\.metal"):
        flatten(str(tmp_path / "none.metal"), [])


def test_the_rewriter_keeps_only_the_functions_that_the_kernel_calls() -> None:
    source = (
        "inline float twice(float x) { return x + x; }\n"
        "inline float unused(float x) { return x; }\n"
        "kernel void scale(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) "
        "{ out[i] = twice(out[i]); }\n"
    )
    text, name = rewrite(source, "scale", (64, 1, 1))
    assert name == "scale" and "reqd_work_group_size(64,1,1)" in text
    assert "twice" in text and "unused" not in text and "[[" not in text
    with pytest.raises(Err, match="other"):
        rewrite(source, "other", (64, 1, 1))


def test_an_arrays_length_that_calls_a_function_makes_no_member_function() -> None:
    source = (
        "constexpr uint words() { return 2; }\n"
        "struct Block { uint word[words()]; };\n"
        "kernel void first(device uint* out [[buffer(0)]]) { Block b; b.word[1] = 3; out[0] = b.word[1]; }\n"
    )
    text, _ = rewrite(source, "first", (64, 1, 1))
    assert "uint word[words()];" in text


def test_a_count_is_stored_by_text_and_options_not_by_lines(tmp_path: Path) -> None:
    compiler = tmp_path / "usr/local/bin/asahi_clc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("")
    chain = SimpleNamespace(root=str(tmp_path))
    first = agxstat.stored(chain, '# 1 "a.metal"\nint x;', 1)
    assert agxstat.stored(chain, '# 7 "b.metal"\nint x;', 1) == first
    compiler_changed = [agxstat.stored(chain, "\nint y;", 1), agxstat.stored(chain, '# 1 "a.metal"\nint x;', 2)]
    compiler.write_text("another")
    assert len({first, *compiler_changed, agxstat.stored(chain, '# 1 "a.metal"\nint x;', 1)}) == 4


def test_the_check_finds_every_number_of_a_row_that_differs() -> None:
    stored = model_counts.rows()
    assert model_counts.differences(reversed(stored), stored) == []
    for changed in ({"issue": 119}, {"half_registers": 94}):
        counted, expected = model_counts.differences([replace(stored[0], **changed), *stored[1:]], stored)
        assert counted.startswith("counted float16,gemv,uint4b8,64,1,1,128,16,")
        assert expected == "stored float16,gemv,uint4b8,64,1,1,128,16,118,32,0,110,0,139,93,3"


def test_a_stored_table_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, text = model_counts.rows(), model_counts.TABLE.read_text()
    monkeypatch.setattr(model_counts, "TABLE", tmp_path / "counts.csv")
    model_counts.store(stored)
    assert (tmp_path / "counts.csv").read_text() == text


@pytest.mark.parametrize("program", [instructions, kernel_counts])
def test_a_missing_compiler_is_named(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AGX_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [program.__name__])
    assert program.main() == 2
    assert "the compiler is not here: run sh lab/agx/setup.sh" in capsys.readouterr().err


def test_every_format_without_a_table_has_a_kernel_for_tensor_units_in_the_whole_file_and_is_counted() -> None:
    """If kernel_list.h omitted a kind of codes, gemm/tensor.metal would contain an undefined macro."""
    header = (ROOT / "kernels/shared/kernel_list.h").read_text()
    formats = {name: row.code_kind for name, row in WEIGHT_FORMATS.items()}
    assert all(f"#define MARLIN_INSTANTIATE_TENSOR_{kind}(" in header for kind in formats.values())
    counted = {
        row.weight_format for row in model_counts.rows() if (row.activations, row.kernel) == ("float16", "gemm_tensor")
    }
    assert counted == {name for name, kind in formats.items() if kind != "table"}
