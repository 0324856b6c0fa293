"""Reads shell commands of workflows and pages: what they install, the tests that they run, and the tests' imports."""

import ast
import functools
import itertools
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGE = "torch_marlin_metal"
# Imports of these two are not checked: pip installs the package's requirements, and only Linux imports softmetal.
NOT_FOLLOWED = (PACKAGE, "softmetal")
OPTIONS_WITH_VALUES = ("-n", "--dist", "--index-url", "--wheel-dir", "--find-links", "-m", "-k")


@dataclass
class Job:
    """The requirements that a job installs, and the Python files and test folders that it runs."""

    name: str
    installs: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)

    def missing(self) -> dict[str, str]:
        """Returns each module that the job imports but does not install, with the importing file."""
        found = imports(self.runs)
        there = modules_of(self.installs)
        return {name: str(file.relative_to(ROOT)) for name, file in sorted(found.items()) if name not in there}


def read_commands(name: str, script: str) -> Job:
    """Returns the packages that a shell script installs, and what it runs."""
    job = Job(name)
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for ends, group in itertools.groupby(lexer, lambda word: set(word) <= set("();&|")):
            words = list(itertools.takewhile(lambda word: not set(word) <= set("<>&"), group))
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            if words and not ends:
                _read_command(job, words)
    return job


def _read_command(job: Job, words: list[str]) -> None:
    program = Path(words[0]).name
    if program.startswith("python") and words[1:3] in (["-m", "pytest"], ["-m", "pip"]):
        program, words = words[2], words[2:]
    if program == "pip" and words[1:2] == ["install"]:
        job.installs += [_requirement(word) for word in _operands(words[2:])]
    elif program == "make" or words == ["bash", ".ci/run"]:
        job.installs.append(f"{PACKAGE}[dev]")
        tests = program == "bash" or {"test", "test-all"} & set(words)
        job.runs += ["tests", "softmetal/tests"] if tests else []
    elif program == "pytest":
        job.runs += _operands(words[1:]) or ["tests", "softmetal/tests"]
    elif program.startswith("python"):
        files = [word for word in words[1:2] if word.endswith(".py")]
        job.runs += [word if "/" in word else f"build_support/{word}" for word in files]


def _operands(words: list[str]) -> list[str]:
    pairs = zip(["", *words], words, strict=False)
    return [word for before, word in pairs if not word.startswith("-") and before not in OPTIONS_WITH_VALUES]


def _requirement(word: str) -> str:
    """Returns the requirement that an argument of pip names. Files and folders mean this package."""
    if word.startswith("$"):  # a variable with options
        return "pip"
    word = re.sub(r"==\$.*", "", word)  # a version in a variable
    path, bracket, extras = word.partition("[")
    if path == "." or path.endswith((".whl", ".tar.gz")):
        return f"{PACKAGE}{bracket}{extras}"
    return word


def jobs(workflow: Path) -> Iterator[Job]:
    """Yields each job of a workflow, once for each combination of its matrix."""
    for name, job in yaml.safe_load(workflow.read_text())["jobs"].items():
        for combination in _combinations(job.get("strategy", {}).get("matrix", {})):
            steps = [step for step in job["steps"] if "run" in step and _applies(step.get("if", ""), combination)]
            script = "\n".join(step["run"] for step in steps)
            for key, value in combination.items():
                script = script.replace(f"${{{{ matrix.{key} }}}}", str(value))
            script = re.sub(r"\$\{\{.*?\}\}", "", script)
            yield read_commands(f"{workflow.name} {name} {' '.join(map(str, combination.values()))}".strip(), script)


def _combinations(matrix: dict) -> list[dict]:
    lists = {key: values for key, values in matrix.items() if key not in ("include", "exclude")}
    if not lists:
        return matrix.get("include", [{}])
    product = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    return [one for one in product if not any(rule.items() <= one.items() for rule in matrix.get("exclude", []))]


def _applies(condition: str, combination: dict) -> bool:
    match = re.fullmatch(r"matrix\.(\w+) == '([^']*)'", condition)
    return combination[match[1]] == match[2] if match else True


def modules_of(requirements: Iterable[str]) -> set[str]:
    """Returns the modules that the requirements install. Only packages that are installed here are looked up."""
    distributions: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        for extra in ("", *requirement.extras):
            if (key := (canonicalize_name(requirement.name), extra)) not in distributions:
                distributions.add(key)
                needs = map(Requirement, _requires(requirement.name))
                waiting += [one for one in needs if one.marker is None or one.marker.evaluate({"extra": extra})]
    names = {name for name, _ in distributions}
    own = {PACKAGE} if canonicalize_name(PACKAGE) in names else set()
    return own | {module for module, who in _owners().items() if names & set(map(canonicalize_name, who))}


@functools.cache
def _owners() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


@functools.cache
def _requires(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def imports(paths: Iterable[str]) -> dict[str, Path]:
    """Returns the imported modules that are not from the repository or Python itself, each with an importing file.

    Args:
        paths: Python files and folders of tests, relative to the root. Imports of the repository's own modules are
            followed.
    """
    waiting: list[Path] = []
    for path in paths:
        target = ROOT / path
        assert target.exists(), path
        waiting += sorted(target.rglob("test_*.py")) if target.is_dir() else [target]
        if path.startswith("tests"):
            waiting.append(ROOT / "conftest.py")
    found: dict[str, Path] = {}
    read = set()
    while waiting:
        file = waiting.pop()
        if file not in read:
            read.add(file)
            for name in _imported(file):
                top = name.partition(".")[0]
                if (ROOT / top).is_dir() and top not in NOT_FOLLOWED:
                    path = ROOT / name.replace(".", "/")
                    waiting += [one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()]
                elif beside := _file_beside(top):
                    waiting.append(beside)
                elif top not in sys.stdlib_module_names and top not in NOT_FOLLOWED:
                    found.setdefault(top, file)
    return found


@functools.cache
def _file_beside(name: str) -> Path | None:
    """Returns the repository's file that a test imports by its bare name after it has changed `sys.path`, or None."""
    folders = ("tests", "softmetal/tests", "lab")
    return next((file for folder in folders for file in (ROOT / folder).rglob(f"{name}.py")), None)


@functools.cache
def _imported(file: Path) -> set[str]:
    """Returns the full names that a file imports. Imports whose failure the file handles are left out."""
    tree = ast.parse(file.read_text())
    handled = {id(node) for one in ast.walk(tree) if isinstance(one, ast.Try) for node in ast.walk(one)}
    names: set[str] = set()
    optional: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "importorskip":
            optional |= {one.value.partition(".")[0] for one in node.args[:1] if isinstance(one, ast.Constant)}
        elif id(node) in handled:
            continue
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in names if name.partition(".")[0] not in optional}
