"""Imports between the folders of the Python package run one way, as the table below allows."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "torch_marlin_metal"
# For each folder, the folders that it may import; "base" stands for the modules outside of folders.
ALLOWED = {
    "base": set(),
    "quantize": {"base"},
    "layers": {"base", "quantize"},
    "fuse": {"base", "layers"},
    "checkpoints": {"base", "quantize", "layers"},
    "replace": {"base", "layers", "checkpoints"},
    "models": {"base", "quantize", "layers", "checkpoints", "replace"},
    "load": {"base", "layers", "checkpoints", "models"},
    "gpu": {"base", "quantize", "checkpoints"},
    "xlstm": {"base"},
    "parallel": {"base", "layers", "checkpoints", "models"},
    "integrations": {"base", "quantize", "layers", "fuse", "checkpoints", "replace", "models", "load", "parallel"},
    "cli": {"base", "public", "checkpoints", "models", "load", "gpu", "xlstm"},
    "run": {"integrations"},
    "public": {"base", "quantize", "fuse", "layers", "checkpoints", "models", "load", "gpu", "xlstm"},
}
# Modules that only re-export names for users. Inside the package only the command line imports them.
PUBLIC = {"__init__", "convert", "profiling", "tuning"}


def room_of(module: str) -> str:
    first = module.split(".")[1] if "." in module else "__init__"
    if first in PUBLIC:
        return "public"
    if (PACKAGE / first).is_dir() or first == "run":  # run is a program of its own, which nothing imports
        return first
    return "cli" if first == "__main__" else "base"


def imports(path: Path, root: str = "torch_marlin_metal") -> set[str]:
    """Returns the modules below a root package that a file imports, including imports inside functions."""
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
