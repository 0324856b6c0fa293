"""Workflows follow GitHub's schema and pin other people's code: actions by commit, packages by hash."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
import yaml

from tests.support import jobs
from tests.support.pages import blocks
from torch_marlin_metal.cli.app import app

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"


def test_actions_are_pinned_by_commit():
    uses = [line for file in WORKFLOWS.glob("*.yml") for line in file.read_text().splitlines() if "uses:" in line]
    assert len(uses) > 5
    wrong = [
        line for line in uses if not re.fullmatch(r"\s*(- )?uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)
    ]
    assert not wrong


def schema_errors(*workflows: Path) -> str:
    """Returns the errors that GitHub's schema finds in workflow files, or an empty string, without network access."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout if done.returncode else ""


def test_workflows_fit_the_schema() -> None:
    workflows = sorted(WORKFLOWS.glob("*.yml"))
    assert len(workflows) >= 2
    assert schema_errors(*workflows) == ""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("runs-on: ", "run-on: "),
        ("permissions:", "permission:"),
        ("contents: read", "contents: reads"),
        ("steps:", "step:"),
    ],
)
def test_a_mistake_in_a_workflow_is_reported(tmp_path: Path, right: str, wrong: str) -> None:
    text = (WORKFLOWS / "ci.yml").read_text()
    assert right in text
    (tmp_path / "ci.yml").write_text(text.replace(right, wrong, 1))
    assert "ci.yml" in schema_errors(tmp_path / "ci.yml")


def test_each_job_installs_what_its_tests_import() -> None:
    found = [job for file in sorted(WORKFLOWS.glob("*.yml")) for job in jobs.jobs(file)]
    with_tests = {job.name for job in found if any(path.startswith("tests") for path in job.runs)}
    macos = {f"ci.yml macos {install}" for install in ("source 2.14.1", "wheel 2.13.0", "wheel 2.14.1", "wheel 2.15.0")}
    assert with_tests == {"ci.yml linux", "nightly.yml everything", *macos}
    assert sum(job.runs == ["build_support/check_installed.py"] for job in found) > 20
    assert {job.name: job.missing() for job in found if job.missing()} == {}


def test_a_package_that_a_job_does_not_install_is_named() -> None:
    install = "python -m venv .venv\ntorch=2.13.0\n.venv/bin/pip install torch==$torch wheel/*.whl pytest"
    job = jobs.read_commands(
        "a job", f"{install}\nOMP_WAIT_POLICY=passive .venv/bin/python -m pytest -n 4 tests/models"
    )
    assert (job.installs, job.runs) == (["torch", "torch_marlin_metal", "pytest"], ["tests/models"])
    assert set(job.missing()) == {"gguf", "transformers"}


def test_the_first_run_on_a_mac_installs_what_it_runs() -> None:
    first, *_ = blocks(ROOT / "docs/use/mac.md", "sh")
    assert len(first.splitlines()) == 11
    job = jobs.read_commands("the page", first)
    assert "torch_marlin_metal[transformers]" in job.installs and "tests/ops/test_mps.py" in job.runs
    assert job.missing() == {}
    # conftest.py skips these tests on Macs.
    assert not {"softmetal", "kernels"} & {part for path in job.runs for part in Path(path).parts}
    program = typer.main.get_command(app)
    commands = [
        shlex.split(line.split(" > ")[0]) for line in first.splitlines() if line.startswith("torch-marlin-metal")
    ]
    assert len(commands) == 5
    for _, name, *arguments in commands:  # an unknown option raises an exception
        program.commands[name].make_context(name, arguments)
    programs = re.findall(r"^python -m (lab\.\S+)", first, re.MULTILINE)
    assert len(programs) == 2
    assert all((ROOT / name.replace(".", "/")).with_suffix(".py").is_file() for name in programs)


# Options that only GNU's programs support, not those of macOS.
GNU_ONLY = r"--wildcards|\bsed\b[^|]*\\t|\bsed -i(?! '')|\bgrep -\w*P|\bcp --|\bdate -d|\bstat -c|\bbase64 -w|\btac\b|\bapt-get\b"


def test_steps_on_macs_use_what_macos_has() -> None:
    scripts = {"Makefile help": (ROOT / "Makefile").read_text().split("\nhelp:")[1].split("\n\n")[0]}
    for file in WORKFLOWS.glob("*.yml"):
        for name, job in yaml.safe_load(file.read_text())["jobs"].items():
            if "mac" in job["runs-on"] or "macos" in str(job.get("strategy")):
                scripts[name] = "\n".join(step.get("run", "") for step in job["steps"])
    assert set(scripts) == {"Makefile help", "macos", "macos-measurements", "wheels"}
    assert {name: re.findall(GNU_ONLY, script) for name, script in scripts.items() if re.search(GNU_ONLY, script)} == {}


def test_make_help_lists_each_target_in_columns() -> None:
    text = (ROOT / "Makefile").read_text()
    # "make test" runs this test, and a nested make would print directories
    command = ["make", "--no-print-directory", "help"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    targets = re.findall(r"^([a-z-]+):.*## (.*)$", text, re.MULTILINE)
    assert len(targets) > 15
    assert printed == [f"{name:15}{what}" for name, what in targets]


def test_ci_installs_packages_by_hash():
    """Each line must have a hash. Each package that pyproject.toml requires must be listed, in an allowed version."""
    head, *lines = (ROOT / ".ci" / "requirements.txt").read_text().splitlines()
    assert "scripts/hash_requirements.py" in head
    found = [re.fullmatch(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(found)
    versions = {match[1]: match[2] for match in found if match}
    assert "--require-hashes" in (ROOT / ".ci" / "run").read_text()
    extras = re.search(
        r"\[project.optional-dependencies\]\n(.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    asked = re.findall(r'"([\w-]+)(?:\[\w+\])?(==[\w.]+|>=[\w.]+)?"', extras[1])
    assert len(asked) > 20
    for name, version in asked:
        name = re.sub(r"[-_.]+", "-", name).lower()
        # hqq has no wheel, and building it needs other packages. auto-round installs many packages; without it, its
        # test is skipped.
        if name in ("torch-marlin-metal", "hqq", "auto-round"):
            continue
        assert name in versions, f"{name}: run scripts/hash_requirements.py"
        if version.startswith("=="):
            assert versions[name] == version[2:], name
