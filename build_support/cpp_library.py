"""Links the library for C++ programs, torch_marlin_metal/cpp/lib, from all objects except the Python module's."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

#: The folder of the package for C++ programs, from the root of the sources or of an installation.
FOLDER = Path("torch_marlin_metal", "cpp")
#: The path from the library's folder to PyTorch's libraries in an installation.
TORCH_FROM_HERE = "../../../torch/lib"


def library_name(platform: str) -> str:
    """Returns the library's file name on a platform, which is a value of `sys.platform`."""
    return "libtorch_marlin_metal.dylib" if platform == "darwin" else "libtorch_marlin_metal.so"


def is_python_module(source: str) -> bool:
    """Returns true if a source is part of the Python module."""
    return Path(source).parts[:2] == ("csrc", "python")


def link_command(platform: str, compiler: list[str], objects: Iterable[str], torch_lib: Path, out: Path) -> list[str]:
    """Returns the command that links the library.

    Args:
        platform: `sys.platform`.
        compiler: the command of a C++ compiler, with its arguments.
        objects: all objects except those of the Python module.
        torch_lib: the folder of PyTorch's libraries.
        out: the path of the library to write.
    """
    command = [*compiler, *objects, f"-L{torch_lib}", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(out)]
    if platform == "darwin":
        return [
            *(*command, "-dynamiclib", "-arch", "arm64", "-framework", "Metal", "-framework", "Foundation"),
            *("-install_name", f"@rpath/{out.name}", f"-Wl,-rpath,@loader_path/{TORCH_FROM_HERE}"),
        ]
    # An undefined symbol, for example one of Python's, must fail here and not when a user links a program.
    return [*command, "-shared", "-Wl,-z,defs", "-Wl,--as-needed", f"-Wl,-rpath,$ORIGIN/{TORCH_FROM_HERE}"]


def write_built_for(folder: Path, torch_version: str) -> None:
    """Writes the file from which torch_marlin_metalConfig.cmake reads the torch version that the library needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "built_for.cmake").write_text(f'set(TORCH_MARLIN_METAL_BUILT_FOR "{torch_version}")\n')


def link(platform: str, compiler: list[str], objects: list[str], torch_lib: Path, root: Path, version: str) -> None:
    """Links the library below `root` if an object is newer, and writes the torch version that the library needs.

    Raises:
        RuntimeError: the linker fails. The error contains the linker's messages.
    """
    out = root / FOLDER / "lib" / library_name(platform)
    write_built_for(root / FOLDER, version)
    if out.exists() and out.stat().st_mtime > max(Path(path).stat().st_mtime for path in objects):
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(link_command(platform, compiler, objects, torch_lib, out), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"torch_marlin_metal: the library for C++ programs does not link:\n{done.stderr}")
