"""The docs' snippets run, and their tables say what the code says."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import torch_marlin_metal as tmm
from torch_marlin_metal.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_snippets_run(page, tmp_path):
    """All snippets of a page in order, as one program."""
    text = "\n".join(blocks(page, "python"))
    if "import softmetal" in text and not has_softmetal():
        pytest.skip("the software Metal device's Debian packages are missing")
    run_program(text, tmp_path)


def run_program(text: str, folder: Path) -> None:
    program = folder / "snippets.py"
    program.write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, program], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["command-line.md", "gguf.md"])
def test_commands_run(page, tmp_path, monkeypatch):
    """After the page's first snippet, which makes what they work on, with the exit code that a line's comment states."""
    page = ROOT / "docs" / page
    run_program(blocks(page, "python")[0], tmp_path)
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    assert lines
    for line in lines:
        command, _, comment = line.partition("  # exit code ")
        program, *arguments = shlex.split(command)
        done = CliRunner().invoke(app, arguments)
        assert program == "torch-marlin-metal"
        assert done.exit_code == int(comment or 0), f"{line}: {done.output}"
        if "--json" in arguments:
            json.loads(done.stdout)


def has_softmetal() -> bool:
    done = subprocess.run(["sh", ROOT / "scripts/system_packages.sh", "has-softmetal"])
    return done.returncode == 0


def test_format_table_is_the_code_s():
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| (.+?) \| (.+?) \|(.*?)\| (.+?) \|$",
                      (ROOT / "docs/formats.md").read_text(), flags=re.MULTILINE)  # fmt: skip
    assert [row[0] for row in rows] == list(tmm.WEIGHT_FORMATS)
    scales = {"floating": "floating", "e4m3": "uint8 E4M3 codes", "e8m0": "uint8 E8M0 codes"}
    zeros = {"none": "none", "zero_point": "uint8 codes or floating zero points", "bias": "floating biases"}
    sizes = ", ".join(map(str, tmm.GROUP_SIZES)) + ", K"
    for name, formula, scale, zero, other, group_size in rows:
        known = tmm.WEIGHT_FORMATS[name]
        assert (formula, scale, zero) == (known.formula, scales[known.scale_coding], zeros[known.zeros_role])
        assert ("global_scale" in other, "`lut`" in other) == (known.has_global_scale, known.has_lut)
        assert group_size == (str(known.fixed_group_size) if known.fixed_group_size else sizes)


def test_schemas_are_the_code_s():
    (block,) = blocks(ROOT / "docs/operators.md", "text")
    documented = {line.split("(")[0]: line for line in block.strip().splitlines()}
    registered = {
        name.split("::")[1]: str(schema).split("::")[1]
        for schema in torch._C._jit_get_all_schemas()
        if (name := schema.name).startswith("torch_marlin_metal::") and "::_" not in name
    }
    assert documented == registered


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_point_to_files(page):
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
