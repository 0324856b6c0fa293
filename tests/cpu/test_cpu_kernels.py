"""Compiles the C++ test programs in tests/cpu with the CPU kernels, without torch, and runs them."""

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import cxx

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (
    "cpu_kernels_test",
    "cpu_weights_test",
    "cpu_plan_test",
    "cpu_mlstm_test",
    "cpu_memory_test",
    "cpu_decoder_test",
)
PLAIN = ("-O2",)
SANITIZERS = ("-Og", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
THREADS = ("-O1", "-fsanitize=thread")
# Unrolled vector code takes minutes to compile with sanitizers, so it is compiled without them. The portable family
# uses the same templates, so sanitizers still check these. The test data ends at unreadable pages, so a vector load
# beyond the end crashes in any build.
VECTOR_STEMS = ("kernels_avx2", "kernels_avx512", "bf16_dot_avx512", "byte_split_avx512", "byte_split_avx2")
SOURCES = [
    path
    for folder in (ROOT / "csrc/cpu", *sorted((ROOT / "csrc").glob("*/cpu")))
    for path in sorted(folder.rglob("*.cpp"))
    if path.stem != "ops_cpu"
]
TILES = ROOT / "csrc/cpu/x86/amx.cpp"
PRODUCTS = ROOT / "csrc/cpu/portable/kernels_portable.cpp"
VECTORS = (TILES, *(path for path in SOURCES if path.stem in VECTOR_STEMS))


def command(*flags: str, compiler: str | None = None) -> list[str]:
    return [compiler or cxx.compiler(), "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}", *flags]


def kernel_objects(
    folder: Path, sources: list[Path], flags: tuple[str, ...], compiler: str | None = None
) -> dict[Path, Path]:
    """Returns the object file of each source. For the flags `PLAIN`, the built extension has them if it is current."""
    if flags == PLAIN and compiler is None and (own := cxx.of_extension(sources)):
        return own
    return cxx.objects(folder, sources, command(*flags, compiler=compiler))


def build(
    folder: Path,
    *flags: str,
    compiler: str | None = None,
    plain: tuple[Path, ...] = (),
    plain_flags: tuple[str, ...] = PLAIN,
    tile_flags: tuple[str, ...] = (),
    programs: tuple[str, ...] = PROGRAMS,
    sources: Sequence[Path] = SOURCES,
) -> dict[str, Path]:
    """Compiles the kernels and the test programs, and returns the programs by name.

    The sources in `plain` are compiled with `plain_flags` instead of `flags`. The AMX kernels also get `tile_flags`.
    """
    tiles = [path for path in sources if path == TILES]
    others = [path for path in sources if path != TILES and path not in plain]
    tests = {test: ROOT / f"tests/cpu/{test}.cpp" for test in programs}
    whole = command(*flags, compiler=compiler)
    mains = cxx.objects(folder, tests.values(), whole)
    parts = [
        *kernel_objects(folder, [path for path in plain if path != TILES], plain_flags, compiler).values(),
        *kernel_objects(folder, tiles, (*(plain_flags if TILES in plain else flags), *tile_flags), compiler).values(),
        *kernel_objects(folder, others, flags, compiler).values(),
    ]
    return {test: cxx.link(folder, [mains[source], *parts], whole) for test, source in tests.items()}


@pytest.fixture(scope="module")
def programs(run_folder: Path) -> dict[str, Path]:
    return build(run_folder, *PLAIN)


@pytest.fixture(scope="module")
def program(programs: dict[str, Path]) -> Path:
    return programs["cpu_kernels_test"]


def run(program: Path, *arguments: str, isa: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_MARLIN_METAL_CPU_ISA"}
    if isa is not None:
        environment["TORCH_MARLIN_METAL_CPU_ISA"] = isa
    return subprocess.run([str(program), *arguments], check=False, capture_output=True, text=True, env=environment)


def families(program: Path) -> list[str]:
    return run(program, "capability").stdout.split("available:")[1].split()


def passes(done: subprocess.CompletedProcess[str]) -> None:
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(" 0 failed\n")


def test_every_family_agrees_with_fp64(program: Path) -> None:
    done = run(program, "10")
    passes(done)
    for isa in families(program):
        assert f"{isa} threads=2: gemm, " in done.stdout


@pytest.mark.parametrize("test", PROGRAMS[1:])
def test_each_program_passes(programs: dict[str, Path], test: str) -> None:
    passes(run(programs[test]))


@pytest.mark.parametrize(
    "tests",
    [
        {"cpu_weights_test": ["3"], "cpu_mlstm_test": ["3"], "cpu_decoder_test": []},
        # the portable products take half a minute to compile with sanitizers
        pytest.param({"cpu_kernels_test": ["3"]}, marks=pytest.mark.whole),
    ],
    ids=lambda tests: "products" if "cpu_kernels_test" in tests else "others",
)
def test_kernels_pass_under_sanitizers(run_folder: Path, tests: dict[str, list[str]]) -> None:
    plain = VECTORS if "cpu_kernels_test" in tests else (*VECTORS, PRODUCTS)
    programs = build(run_folder, *SANITIZERS, plain=plain, programs=tuple(tests))
    for test, arguments in tests.items():
        passes(run(programs[test], *arguments))


def test_threads_do_not_race(run_folder: Path, everything: bool) -> None:
    if not everything:
        pytest.skip("takes minutes; make races runs it")
    tests = {"cpu_kernels_test": ["1"], "cpu_weights_test": ["1"], "cpu_mlstm_test": ["1"]}
    programs = build(run_folder, *THREADS, plain=VECTORS, programs=tuple(tests))
    for test, arguments in tests.items():
        passes(run(programs[test], *arguments))


def test_family_is_forced_by_the_environment(program: Path) -> None:
    for isa in families(program):
        assert run(program, "capability", isa=isa).stdout.startswith(f"{isa}: forced by TORCH_MARLIN_METAL_CPU_ISA;")


@pytest.mark.parametrize("isa", ["avx1024", "AVX2"])
def test_unknown_family_is_an_error(program: Path, isa: str) -> None:
    done = run(program, "capability", isa=isa)
    assert done.returncode == 1
    assert "TORCH_MARLIN_METAL_CPU_ISA: expected one of portable" in done.stdout
    assert f"got '{isa}', which is not a known family" in done.stdout


def test_absent_family_is_an_error(program: Path) -> None:
    for isa in {"avx2", "avx512", "amx", "neon"} - set(families(program)):
        done = run(program, "capability", isa=isa)
        assert done.returncode == 1
        assert f"got '{isa}', which this machine does not have" in done.stdout


def test_amx_kernels_pass_with_emulated_tiles(program: Path, run_folder: Path) -> None:
    """Emulates tiles in plain C++, so that machines without AMX also test the AMX kernels."""
    if "avx512" not in families(program):
        pytest.skip("needs AVX-512: tiles are emulated, the code around them is not")
    programs = build(run_folder, *PLAIN, tile_flags=("-include", str(ROOT / "tests/cpu/amx_emulated.h")))
    passes(run(programs["cpu_kernels_test"], "3", "tiles"))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads the targets of the x86 sources")
def test_no_symbol_is_shared_between_instruction_sets(run_folder: Path) -> None:
    """If two instruction sets shared a symbol, the linker could choose the copy that the CPU cannot execute."""
    targets: dict[str, set[str]] = {}
    for source, compiled in kernel_objects(run_folder, SOURCES, PLAIN).items():
        found = re.search(r"^MARLIN_TARGET\((.*)\)$", source.read_text(), re.MULTILINE)
        target = found[1] if found else "baseline"
        listing = subprocess.run(["nm", "--defined-only", str(compiled)], check=True, capture_output=True, text=True)
        for symbol in re.findall(r" [uVvWw] (\S+)$", listing.stdout, re.MULTILINE):
            targets.setdefault(symbol, set()).add(target)
    assert {"baseline", "MARLIN_AVX2", "MARLIN_AVX512"} <= set().union(*targets.values())
    assert {symbol: sets for symbol, sets in targets.items() if len(sets) > 1} == {}
