"""Lets a Python process that was started in a source tree use the installed package.

Python searches the current folder first. After `pip install .`, it therefore finds the Python files of the source tree,
but the extension was compiled for the installed package. If the Python files of both are equal, the package imports all
its modules from the installed package. If they differ, the extension does not match the files and cannot be used.
"""

import importlib.util
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

HERE = Path(__file__).resolve().parent


def installed() -> Path | None:
    """Returns the first folder on `sys.path`, except HERE, that contains this package with a compiled extension."""
    for entry in sys.path:
        folder = Path(entry, HERE.name).resolve()
        if folder != HERE and any((folder / f"_C{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
            return folder
    return None


def first_difference(folder: Path) -> str | None:
    """Returns the first Python file that differs between HERE and another folder, or None."""

    def contents(package: Path, name: str) -> bytes | None:
        file = package / name
        return file.read_bytes() if file.is_file() else None

    names = {path.relative_to(package).as_posix() for package in (HERE, folder) for path in package.rglob("*.py")}
    return next((name for name in sorted(names) if contents(HERE, name) != contents(folder, name)), None)


def use_installed() -> None:
    """Redirects all further imports to the installed package, if only the installed package has an extension."""
    folder = installed() if importlib.util.find_spec(f"{HERE.name}._C") is None else None
    if folder is not None and first_difference(folder) is None:
        package = sys.modules[HERE.name]
        package.__path__[:] = [str(folder)]
        package.__file__ = str(folder / "__init__.py")


def why_not_the_installed() -> str | None:
    """Returns the reason why the installed package cannot be used and the remedy, or None if none is installed.

    This function is called only if HERE has no extension.
    """
    folder = installed()
    if folder is None:
        return None
    return (
        f"{HERE} has no compiled extension, and the package that is installed in {folder.parent} has another "
        f"{first_difference(folder)}. Install this one: `pip install {HERE.parent}`. To use the other one, start "
        "Python in another folder."
    )


use_installed()
