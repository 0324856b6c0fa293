"""Builds PyTorch extensions with an MPS backend for the software Metal device, and lets Python find these builds."""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from .build import COMPILER, OUTPUT, compile_flags, link_flags, locked, require_tools, run_tool, side_by_side

FOLDER = OUTPUT / "extensions"
_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def extension_path(name: str) -> Path:
    """Returns the path of an extension's build for the software device. `name` is the extension's full module name."""
    return FOLDER / f"{name}{_SUFFIX}"


def build_extension(
    name: str,
    sources: Sequence[str | Path],
    *,
    include_dirs: Sequence[str | Path] = (),
    defines: Mapping[str, str] | None = None,
) -> Path:
    """Compiles and links an extension whose sources use PyTorch's MPS stream and Metal.

    `import` then finds this build instead of any other extension with that name. If an extension only registers
    operators, load it with `torch.ops.load_library(path)`.

    Args:
        name: the full module name, for example "package._C".
        sources: `.mm`, `.cpp` and `.c++` files.
        include_dirs: folders of the package's own headers.
        defines: macros and their values.

    Returns:
        The path of the shared library. It is built again only if a source, a header or a flag changed.

    Raises:
        Unavailable: a tool or package is missing.
        RuntimeError: a source does not compile, or calls a Metal method that does not exist. The compiler's messages
            follow.
    """
    require_tools()
    flags = [f"-I{path}" for path in include_dirs]
    flags += [f"-D{macro}={value}" for macro, value in (defines or {}).items()]
    flags += ["-isystem", sysconfig.get_path("include"), f"-DTORCH_EXTENSION_NAME={name.rpartition('.')[2]}"]
    flags += ["-fvisibility=hidden", "-Werror=objc-method-access"]  # by default only a warning
    with locked():
        objects = compile_host_sources(name, [Path(source) for source in sources], flags)
        library, stamp = extension_path(name), FOLDER / f"{name}.link"
        command = [COMPILER, *map(str, objects), *link_flags(), "-ltorch", "-ltorch_python"]
        newest = max(path.stat().st_mtime for path in objects)
        is_current = library.exists() and stamp.exists() and stamp.read_text() == repr(command)
        if not is_current or library.stat().st_mtime < newest:
            FOLDER.mkdir(parents=True, exist_ok=True)
            partial = library.with_suffix(".partial")
            run_tool([*command, "-o", str(partial)])
            partial.rename(library)
            stamp.write_text(repr(command))
    return library


def link_with_mps_sources(command: Any, extension: Any, sources: Sequence[str]) -> None:
    """Adds MPS sources to an extension that setuptools has just built, and links it for the software device.

    The ordinary library is not changed. Processes that do not import softmetal use it.

    Args:
        command: the running build_ext.
        extension: the extension that `command` has built.
        sources: the sources that the ordinary Linux build leaves out, `.mm` or `.cpp`.
    """
    require_tools()
    flags = [f"-I{path}" for path in extension.include_dirs]
    flags += [f"-D{name}" if value is None else f"-D{name}={value}" for name, value in extension.define_macros]
    objects = compile_host_sources(extension.name, map(Path, sources), [*flags, "-fvisibility=hidden", "-Werror"])
    ordinary = command.compiler.object_filenames(extension.sources, output_dir=command.build_temp)
    newest = max(Path(path).stat().st_mtime for path in [*objects, *ordinary])
    library = extension_path(extension.name)
    if not library.exists() or library.stat().st_mtime < newest:
        FOLDER.mkdir(parents=True, exist_ok=True)
        command.compiler.link_shared_object(
            [*ordinary, *map(str, objects)],
            str(library),
            libraries=command.get_libraries(extension),
            library_dirs=extension.library_dirs,
            extra_postargs=extension.extra_link_args,
            target_lang="c++",
        )


def compile_host_sources(name: str, sources: Iterable[Path], flags: Sequence[str]) -> list[Path]:
    """Compiles an extension's changed sources, and those whose headers have changed. Returns all objects."""

    def compiled(source: Path) -> Path:
        digest = hashlib.sha256(str(source).encode()).hexdigest()[:8]  # two folders may hold files with the same name
        target = OUTPUT / "host" / name / f"{source.stem}-{digest}.o"
        _compile_unless_current(source, target, [COMPILER, *compile_flags(), *flags])
        return target

    return side_by_side(compiled, [source.resolve() for source in sources])


def _compile_unless_current(source: Path, target: Path, command: Sequence[str]) -> None:
    dependencies, stamp = target.with_suffix(".d"), target.with_suffix(".command")
    line = [*command, "-c", str(source), "-o", str(target)]
    if target.exists() and dependencies.exists() and stamp.exists() and stamp.read_text() == repr(line):
        read = [Path(p) for p in dependencies.read_text().split(":", 1)[1].replace("\\\n", " ").split()]
        if all(path.exists() and path.stat().st_mtime < target.stat().st_mtime for path in read):
            return
    target.parent.mkdir(parents=True, exist_ok=True)
    run_tool([*line, "-MMD", "-MF", str(dependencies)])
    stamp.write_text(repr(line))


class ExtensionFinder(importlib.abc.MetaPathFinder):
    """Makes `import` find an extension's build for the software device, if there is one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        library = extension_path(fullname)
        return importlib.util.spec_from_file_location(fullname, library) if library.exists() else None


def find_extensions() -> None:
    """Makes `import` prefer extensions that were built for the software device.

    Raises:
        ImportError: an extension with such a build is already loaded, without its MPS backend.
    """
    for library in FOLDER.glob(f"*{_SUFFIX}"):
        if (name := library.name.removesuffix(_SUFFIX)) in sys.modules:
            raise ImportError(f"softmetal: call softmetal.install() before the import of {name.partition('.')[0]}")
    sys.meta_path.insert(0, ExtensionFinder())
