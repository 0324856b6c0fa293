"""Tests that the snippets in the docs run and that the tables in the docs agree with the code."""

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import torch_marlin_metal as tmm
from tests.dependencies.test_cpp_dependencies import ALLOWED as CPP_ARROWS
from tests.dependencies.test_python_dependencies import ALLOWED as PYTHON_ARROWS
from tests.support.pages import blocks, readme_program
from tests.support.programs import run_python
from torch_marlin_metal.cli.app import app

ROOT = Path(__file__).parents[2]
NOTES = [*sorted((ROOT / "lab/notes").glob("*.md")), *sorted((ROOT / "softmetal/docs").glob("*.md"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *NOTES]

OTHERS = ("CHANGELOG.md", "lab/README.md", "lab/cpu/cpu_peers.md", "lab/cpu/cpu_wide.md", "lab/cpu/cpu_int8.md")
RECORDS = [*PAGES, *(ROOT / name for name in (*OTHERS, "tests/features.md"))]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_snippets_run(page, tmp_path):
    """Runs all snippets of a page in order, as one program."""
    text = "\n".join(blocks(page, "python"))
    if page.name == "README.md":
        text = "import softmetal\nsoftmetal.install()\n" + readme_program(tmp_path / "model")
    if "import softmetal" in text and not (has_softmetal() and torch.backends.mps.is_available()):
        pytest.skip(
            "the software Metal device's Debian packages are missing, or the device does not support this torch"
        )
    run_program(text, tmp_path)


def run_program(text: str, folder: Path) -> None:
    program = folder / "snippets.py"
    program.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python(program, cwd=folder, env=environment, mps="import softmetal" in text)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["use/command-line.md", "formats/checkpoints.md"])
def test_commands_run(page, tmp_path, monkeypatch):
    """Runs the page's commands and the snippets before them, and checks each exit code that a comment states."""
    found = re.findall(r"^```(python|sh)\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    last = max(i for i, (language, _) in enumerate(found) if language == "sh")
    monkeypatch.chdir(tmp_path)
    for language, text in found[: last + 1]:
        if language == "python":
            run_program(text, tmp_path)
            continue
        for line in text.splitlines():
            command, _, comment = line.partition("  # exit code ")
            program, *arguments = shlex.split(command)
            done = CliRunner().invoke(app, arguments)
            assert program == "torch-marlin-metal"
            assert done.exit_code == int(comment or 0), f"{line}: {done.output}"
            if "--json" in arguments:
                json.loads(done.stdout)


def test_the_commands_of_the_readme_exist():
    """Parses this package's commands without running them.

    `make` must have the targets, and pyproject.toml the extra.
    """
    text = (ROOT / "README.md").read_text()
    shell = "\n".join(blocks(ROOT / "README.md", "sh"))
    inline = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [*shell.splitlines(), *(" ".join(span.split()) for span in re.findall(r"`([^`]+)`", inline))]
    typed = [shlex.split(line, comments=True) for line in lines if line.startswith(("torch-marlin-metal ", "make "))]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    group = typer.main.get_command(app)
    for program, name, *arguments in typed:
        if program == "make":
            assert name in targets, name
        else:
            context = group.make_context(program, [name, *arguments])
            _, command, rest = group.resolve_command(context, [name, *arguments])
            command.make_context(name, rest, parent=context)
    assert {"generate", "fit", "doctor", "demo", "test", "macos"} <= {name for _, name, *_ in typed}
    extras = importlib.metadata.metadata("torch_marlin_metal").get_all("Provides-Extra")
    assert set(re.findall(r'pip install "\.\[(\w+)\]"', shell)) and set(re.findall(r"\.\[(\w+)\]", shell)) <= set(
        extras
    )


def test_pages_install_the_package_from_a_checkout():
    """The package is in no index, so a command that asks an index for it would fail."""
    lines = [line for page in PAGES for line in re.findall(r"pip install .*", page.read_text())]
    assert lines and not [
        line for line in lines if re.search(r'install ["\']?torch[_-]marlin[_-]metal(?![\w*-])', line)
    ]


def has_softmetal() -> bool:
    done = subprocess.run(["sh", ROOT / "scripts/system_packages.sh", "has-softmetal"])
    return done.returncode == 0


def test_format_table_agrees_with_the_code():
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| (.+?) \| (.+?) \|(.*?)\| (.+?) \|$",
                      (ROOT / "docs/formats/formats.md").read_text(), flags=re.MULTILINE)  # fmt: skip
    assert [row[0] for row in rows] == list(tmm.WEIGHT_FORMATS)
    scales = {"floating": "floating", "e4m3": "uint8 E4M3 codes", "e8m0": "uint8 E8M0 codes"}
    zeros = {"none": "none", "zero_point": "uint8 codes or floating zero points", "bias": "floating biases"}
    sizes = ", ".join(map(str, tmm.formats.GROUP_SIZES)) + ", K"
    for name, formula, scale, zero, other, group_size in rows:
        known = tmm.WEIGHT_FORMATS[name]
        assert (formula, scale, zero) == (known.formula, scales[known.scale_coding], zeros[known.zeros_role])
        assert ("global_scale" in other, "`lut`" in other) == (known.has_global_scale, known.has_lut)
        assert group_size == (str(known.fixed_group_size) if known.fixed_group_size else sizes)


def test_schemas_agree_with_the_code():
    block, *_ = blocks(ROOT / "docs/use/operators.md", "text")
    documented = {line.split("(")[0]: line for line in block.strip().splitlines()}
    registered = {
        name.split("::")[1]: str(schema).split("::")[1]
        for schema in torch._C._jit_get_all_schemas()
        if (name := schema.name).startswith("torch_marlin_metal::") and "::_" not in name
    }
    if not torch.backends.mps.is_available():  # a build without the mps backend
        del documented["compile_gemm"]
    assert documented == registered


def test_which_format_quotes_the_measurements():
    measured = (ROOT / "docs/use/which-format.md").read_text()
    found = r"^\| [^|]+ \| `(\w+)`, (\d+), (\w+) \| ([\d.]+) \| ([\d.]+) \|$"
    rows = re.findall(found, measured, flags=re.MULTILINE)
    assert rows
    weight = torch.randn(128, 1024)
    for name, group_size, method, bits, distance in rows:
        assert f"| {name} | {group_size} | {method} | {distance} |" in measured
        packed = tmm.quantize_weight(weight, name, int(group_size))
        constant = {"lut", "global_scale"}  # a few bytes, independent of the size of the weight
        size = sum(tensor.nbytes for key, tensor in packed.tensors().items() if key not in constant)
        assert 8 * size / weight.numel() == float(bits)


@pytest.mark.parametrize("page", RECORDS, ids=lambda p: p.name)
def test_links_point_to_files(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_api_reference_names_every_public_name():
    page = (ROOT / "docs/api.md").read_text()
    named = set(re.findall(r"^::: torch_marlin_metal\.([\w.]+)$", page, flags=re.MULTILINE))
    modules = [tmm.convert, tmm.ops, tmm.profiling, tmm.tuning, tmm.xlstm]
    below = {f"{module.__name__.split('.')[1]}.{name}" for module in modules for name in module.__all__}
    assert below <= named
    top = set(tmm.__all__) - {name.split(".")[0] for name in below} - {"__version__"}
    assert len(top) < 20 and top <= named
    for name in named:
        module, _, attribute = f"torch_marlin_metal.{name}".rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_table_of_tiles_agrees_with_the_planner():
    page = (ROOT / "lab/notes/tile-sizing.md").read_text()
    known = {(row.variant, "x".join(map(str, row.tile))): row for row in tmm.profiling.tile_table("M1").rows}
    rows = re.findall(r"^\| `(\w+)` \| (\d+x\d+x\d+) \| (.+) \|$", page, flags=re.MULTILINE)
    assert rows
    for variant, tile, cells in rows:
        row = known[variant, tile]
        M, N, K = row.tile
        stages = {"double_buffered": 2, "single_stage": 1}[variant]
        memory = (stages * M * K * 2, stages * K * N * 2, row.threadgroup_bytes)
        found = [*map(str, memory), str(row.occupancy.threadgroups), f"{row.flop_per_byte:.1f}"]
        assert cells.split(" | ") == found, (variant, tile)


TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
FOLDERS = {f"{folder}/" for path in TRACKED for folder in map(str, Path(path).parents)}
SOURCE = r"[\w.*/-]+\.(?:py|cpp|h|mm|metal|sh|yml|toml)"


def named_paths(page: Path) -> list[str]:
    """Returns the paths of source files and folders that a page names in backticks. A folder ends with a slash."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`]+)`", prose)
    files = [path for span in spans for path in re.findall(rf"(?<![\w/.<>*-]){SOURCE}(?![\w(])", span)]
    return files + [span for span in spans if re.fullmatch(r"[\w./-]+/", span)]


@pytest.mark.parametrize("page", RECORDS, ids=lambda p: p.name)
def test_named_paths_exist(page):
    """A name must be the end of a tracked path. A pattern such as `csrc/mps/*.mm` must match at least one file."""
    for name in named_paths(page):
        if name.endswith("/"):
            assert any(folder == name or folder.endswith(f"/{name}") for folder in FOLDERS), name
        else:
            assert any(fnmatch(path, name) or fnmatch(path, f"*/{name}") for path in TRACKED), name


def picture_places() -> dict[str, tuple[int, float]]:
    """Returns the place (y, x) of each folder of the code in the picture of folders.

    Each folder of C++ and Metal has its own box. All folders of Python are in one box, before the colons.
    """
    text = (ROOT / "docs/images/folders.svg").read_text()
    places, top = {}, ""
    for x, y, line in re.findall(r'<text x="([\d.]+)" y="(\d+)"[^>]*>(.*?)</text>', text):
        for i, name in enumerate(line.split() if line.endswith("/") else []):
            head, _, last = name.rstrip("/").rpartition("/")
            top = head or top
            places[f"{top}/{last}"] = int(y), float(x) + i
        if "csrc/python" not in places:
            names = ", ".join(re.findall(r"((?:[a-z]+, )*[a-z]+):", line)).split(", ")
            places |= {f"torch_marlin_metal/{name}": (int(y), float(i)) for i, name in enumerate(names) if name}
    return places


def test_the_picture_shows_each_folder_of_the_code():
    folders = {"/".join(Path(path).parts[:2]) for path in TRACKED if path.count("/") > 1} - {"torch_marlin_metal/cpp"}
    code = ("csrc/", "kernels/", "torch_marlin_metal/")
    assert set(picture_places()) - {"/torch_marlin_metal", "kernels/softmetal"} == {
        folder for folder in folders if folder.startswith(code)
    }


def test_no_dependency_runs_back_in_the_picture():
    """In the picture, each folder is above the folders that it uses, or to their left in the same row."""
    python = {
        f"torch_marlin_metal/{room}": [f"torch_marlin_metal/{other}" for other in others]
        for room, others in PYTHON_ARROWS.items()
    }
    places = picture_places()
    arrows = {
        (room, "/".join(other.split("/")[:2])) for room, others in {**python, **CPP_ARROWS}.items() for other in others
    }
    drawn = [(room, other) for room, other in arrows if room != other and {room, other} <= set(places)]
    assert len(drawn) > 80
    assert [arrow for arrow in drawn if places[arrow[0]] >= places[arrow[1]]] == []


@pytest.mark.parametrize("page", RECORDS, ids=lambda p: p.name)
def test_named_tests_exist(page):
    """Checks names of the form `folder/file.py::test`."""
    for file, test in re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text()):
        paths = [path for path in TRACKED if path == file or path.endswith(f"/{file}")]
        assert any(f"def {test}(" in (ROOT / path).read_text() for path in paths), f"{file}::{test}"


def test_each_promise_names_a_test_that_exists():
    """Each row names a file below tests/ or a part of the campaign, or says "the same" as in the row above."""
    promises = (ROOT / "docs" / "use" / "reliability.md").read_text().split("## Promises\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \|.*\|(.*)\|$", promises, flags=re.MULTILINE)[1:]
    assert len(rows) > 20
    for promise, cell in rows:
        assert re.search(r"`[\w/]+\.(py|cpp)`|`tests/\w+`|the same|campaign `\w+`", cell), promise


@pytest.mark.parametrize("page", RECORDS, ids=lambda p: p.name)
def test_lines_are_short(page):
    """Lines have at most 120 characters, except rows of tables and lines of code, which Markdown cannot wrap."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith(("|", "  |"))] == []
