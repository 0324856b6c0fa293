"""Imports between the folders of the Python package point in one direction, as the table below allows."""

import ast
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "torch_marlin_metal"
# For each folder, the folders that it may import; "base" means the modules outside of folders.
ALLOWED = {
    "base": set(),
    "ops": {"base"},
    "quantize": {"base"},
    "layers": {"base", "ops", "quantize"},
    "fuse": {"base", "ops", "layers"},
    "checkpoints": {"base", "quantize", "layers"},
    "replace": {"base", "layers", "checkpoints"},
    "models": {"base", "quantize", "layers", "checkpoints", "replace"},
    "load": {"base", "layers", "checkpoints", "models"},
    "gpu": {"base", "ops", "quantize", "checkpoints"},
    "xlstm": {"ops"},
    "parallel": {"base", "layers", "checkpoints", "models"},
    "integrations": {
        "base",
        "ops",
        "quantize",
        "layers",
        "fuse",
        "checkpoints",
        "replace",
        "models",
        "load",
        "parallel",
    },
    "cli": {"base", "public", "ops", "fuse", "layers", "checkpoints", "models", "load", "gpu", "integrations"},
    "run": {"integrations"},
    "public": {"base", "ops", "quantize", "fuse", "layers", "checkpoints", "models", "load", "gpu", "xlstm"},
}
# Modules that only re-export names for users. Inside the package, only the command line imports them.
PUBLIC = {"__init__", "convert", "profiling", "tuning"}


def room_of(module: str) -> str:
    first = module.split(".")[1] if "." in module else "__init__"
    if first in PUBLIC:
        return "public"
    if (PACKAGE / first).is_dir() or first == "run":  # run is a program that no module imports
        return first
    return "cli" if first == "__main__" else "base"


def imports(path: Path, root: str = "torch_marlin_metal") -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == root:
            found |= {f"{root}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.split(".")[0] == root}


def test_the_package_never_imports_the_laboratory() -> None:
    laboratory = PACKAGE.parent / "lab"
    users = [path for path in PACKAGE.rglob("*.py") if imports(path, "lab")]
    assert not users, users
    assert any(imports(path) for path in laboratory.rglob("*.py")), "the laboratory uses the package"


def test_imports_follow_the_table() -> None:
    arrows: dict[str, set[str]] = {}
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(("torch_marlin_metal", *path.relative_to(PACKAGE).with_suffix("").parts))
        room = room_of(module)
        for other in imports(path):
            target = room_of(other)
            if target == room:
                continue
            arrows.setdefault(room, set()).add(target)
            if target not in ALLOWED[room]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {other}")
    assert not wrong, wrong
    unused = {(room, other) for room, others in ALLOWED.items() for other in others - arrows.get(room, set())}
    assert not unused, f"arrows that nothing needs: {unused}"


def test_the_software_device_imports_nothing_of_this_repository() -> None:
    """The folder `softmetal/` is a project of its own: it and its tests may import nothing else of the repository."""
    project = PACKAGE.parent / "softmetal"
    files = [path for part in ("src", "tests", "examples") for path in (project / part).rglob("*.py")]
    others = {path.name for path in PACKAGE.parent.iterdir() if (path / "__init__.py").exists()} | {
        "examples",
        "scripts",
    }
    assert {"torch_marlin_metal", "build_support", "lab", "tests"} <= others and len(files) > 100
    wrong = [(path.relative_to(project), name) for path in files for other in others for name in imports(path, other)]
    assert wrong == []


def modules(root: Path) -> dict[str, Path]:
    """Returns the files of a package by module name. `__init__.py` gets its folder's name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_files(path: Path, known: Iterable[str]) -> set[str]:
    """Returns the modules among `known` that a file imports. `from folder import module` also imports the folder.

    The package itself is excluded: its `__init__.py` imports the public names for users, and every import of a module
    loads it.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name in known and "." in name}


def circles(root: Path) -> list[list[str]]:
    """Returns the groups of files with circular imports."""
    files = modules(root)
    graph = {name: imported_files(path, files) - {name} for name, path in files.items()}

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for other in graph[waiting.pop()] - seen:
                seen.add(other)
                waiting.append(other)
        return seen

    after = {name: reached(name) for name in graph}
    groups = {tuple(sorted(other for other in after[name] if name in after[other])) for name in graph}
    return sorted(list(group) for group in groups if group)


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(PACKAGE) == []


def test_a_planted_circle_is_found(tmp_path: Path) -> None:
    planted = {
        "package/__init__.py": "from package.a import x",
        "package/a.py": "from package.folder import b",
        "package/folder/__init__.py": "def f():\n    from package.c import y",
        "package/folder/b.py": "",
        "package/c.py": "import package.a",
        "package/d.py": "from package import a",
    }
    for name, text in planted.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert circles(tmp_path / "package") == [["package.a", "package.c", "package.folder"]]
