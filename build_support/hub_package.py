"""Derives a package for Hugging Face's kernel hub from the sources: `python -m build_support.hub_package FOLDER`.

The folder has the layout of a kernel-builder project: `build.toml`, `torch-ext`, the C++ sources and the Metal kernels
as text. The derived package is not stored in this repository. The hub requires that a process can load several builds
of a kernel, so each build needs its own namespace for its operators. kernel-builder defines this namespace as the macro
TORCH_EXTENSION_NAME, and the derived sources use the macro in place of the name `torch_marlin_metal`.

`--cpu` also compiles the CPU operators for this machine's Linux and torch, below FOLDER/build, where
`kernels.get_local_kernel` finds them. This takes minutes. kernel-builder itself needs a Mac with Xcode, or Nix.
"""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from build_support.embed_kernels import write_kernel_sources

ROOT = Path(__file__).resolve().parents[1]
HUB_NAME = "torch-marlin-metal"
PACKAGE = "torch_marlin_metal"
FLAGS = ("-std=c++20", "-O3", "-fvisibility=hidden", "-Wno-unknown-pragmas")

# These macros expand TORCH_EXTENSION_NAME before TORCH_LIBRARY or a string uses it. Otherwise TORCH_LIBRARY would use
# the name of the macro itself as the namespace.
NAMESPACE_HEADER = """// The namespace of this build's operators, which the builder names.
#pragma once

#include <torch/library.h>

#define MARLIN_TEXT_OF(name) #name
#define MARLIN_EXPANDED_TEXT(name) MARLIN_TEXT_OF(name)
#define MARLIN_OPERATORS MARLIN_EXPANDED_TEXT(TORCH_EXTENSION_NAME)
#define MARLIN_LIBRARY(name, m) TORCH_LIBRARY(name, m)
#define MARLIN_LIBRARY_FRAGMENT(name, m) TORCH_LIBRARY_FRAGMENT(name, m)
#define MARLIN_LIBRARY_IMPL(name, key, m) TORCH_LIBRARY_IMPL(name, key, m)
"""
BINDING = """// The operators register themselves in csrc. This file only makes the library a Python module.
#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
"""


def with_own_namespace(source: str) -> str:
    """Returns a source of csrc whose operators are in the namespace TORCH_EXTENSION_NAME."""
    renamed = re.sub(r"\bTORCH_(LIBRARY\w*)\(torch_marlin_metal,", r"MARLIN_\1(TORCH_EXTENSION_NAME,", source)
    renamed = renamed.replace('"torch_marlin_metal::', 'MARLIN_OPERATORS "::')
    return renamed if renamed == source else f'#include "csrc/hub_namespace.h"\n{renamed}'


def cpp_sources(folder: Path) -> list[str]:
    """Returns the C++ sources of a derived package. The CPU and Metal backends both compile them."""
    return sorted(str(path.relative_to(folder)) for path in folder.glob("csrc/**/*.cpp"))


def build_toml(folder: Path) -> str:
    common = [*cpp_sources(folder), *sorted(str(path.relative_to(folder)) for path in folder.glob("**/*.h"))]
    metal = [*common, *sorted(str(path.relative_to(folder)) for path in folder.glob("csrc/**/*.mm")), "kernels.cpp"]
    general = {"name": HUB_NAME, "version": 1, "edition": 5, "license": "Apache-2.0", "backends": ["cpu", "metal"]}
    lines = ["[general]", *(f"{key} = {json.dumps(value)}" for key, value in general.items()), "", "[torch]"]
    lines += ['src = ["torch-ext/torch_binding.cpp"]', ""]
    for backend, sources in (("cpu", common), ("metal", metal)):
        lines += [f"[kernel.marlin_{backend}]", f'backend = "{backend}"', 'depends = ["torch"]']
        lines += ['include = ["."]', f"cxx-flags = {json.dumps(FLAGS)}"]
        lines += ["src = [", *(f"    {json.dumps(source)}," for source in sources), "]", ""]
    return "\n".join(lines)


def python_module(operators: list[str]) -> str:
    """Returns the text of the package's `__init__.py`: one name for each operator."""
    lines = ['"""4-bit weights multiplied with floating-point activations: torch_marlin_metal\'s operators."""', ""]
    lines += ["from ._ops import ops", "", *(f"{name} = ops.{name}" for name in operators), ""]
    return "\n".join([*lines, f"__all__ = {json.dumps(operators)}", ""])


def derive(folder: Path) -> None:
    """Writes the project into a folder that does not exist yet.

    Raises:
        FileExistsError: the folder exists.
    """
    from torch_marlin_metal.interface import OPERATORS

    folder.mkdir(parents=True)
    for path in sorted(ROOT.glob("csrc/**/*")):
        relative = path.relative_to(ROOT)
        if path.suffix in (".cpp", ".h", ".mm") and relative.parts[:2] != ("csrc", "python"):
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            (folder / relative).write_text(with_own_namespace(path.read_text()))
    for path in ROOT.glob("kernels/**/*.h"):  # the host shares types and parameters with the kernels
        (folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / path.relative_to(ROOT))
    (folder / "csrc/hub_namespace.h").write_text(NAMESPACE_HEADER)
    write_kernel_sources(ROOT / "kernels", folder / "kernels.cpp")
    module = folder / "torch-ext" / PACKAGE
    module.mkdir(parents=True)
    (module / "__init__.py").write_text(python_module(sorted(OPERATORS)))
    (folder / "torch-ext/torch_binding.cpp").write_text(BINDING)
    (folder / "build.toml").write_text(build_toml(folder))
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")


def build_cpu(folder: Path, namespace: str, jobs: int = 2) -> Path:
    """Compiles the CPU's operators of a derived package and returns the folder of the build.

    Args:
        folder: a folder that `derive` has written.
        namespace: the operators' namespace. Two builds in one process need different namespaces.
        jobs: the number of compilers that run at a time.

    Raises:
        subprocess.CalledProcessError: the compiler fails. It prints its own messages.
    """
    import torch
    from torch.utils.cpp_extension import include_paths

    version = "".join(torch.__version__.split(".")[:2])
    variant = folder / "build" / f"torch{version}-cxx11-cpu-{platform.machine()}-linux"
    variant.mkdir(parents=True)
    objects = folder / "objects"
    objects.mkdir(exist_ok=True)
    flags = [*FLAGS, "-fPIC", "-w", f"-DTORCH_EXTENSION_NAME={namespace}", f"-I{folder}"]
    flags += [f"-isystem{path}" for path in include_paths()]

    def compile_one(source: str) -> str:
        out = objects / (source.replace("/", "_") + ".o")
        subprocess.run(["c++", *flags, "-c", str(folder / source), "-o", str(out)], check=True)
        return str(out)

    with ThreadPoolExecutor(jobs) as pool:
        compiled = list(pool.map(compile_one, cpp_sources(folder)))
    library = variant / f"{namespace}.so"
    torch_libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(["c++", "-shared", *compiled, *torch_libraries, "-Wl,-z,defs", "-o", str(library)], check=True)
    shutil.copyfile(folder / "torch-ext" / PACKAGE / "__init__.py", variant / "__init__.py")
    (variant / "_ops.py").write_text(
        f"from pathlib import Path\n\nimport torch\n\n"
        f'torch.ops.load_library(Path(__file__).with_name("{library.name}"))\nops = torch.ops.{namespace}\n'
    )
    metadata = {"id": namespace, "name": HUB_NAME, "version": 1, "license": "Apache-2.0", "python-depends": []}
    (variant / "metadata.json").write_text(json.dumps({**metadata, "backend": {"type": "cpu"}}))
    return variant


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cpu", action="store_true", help="also compile the CPU's operators for this machine")
    arguments = parser.parse_args()
    if arguments.cpu and sys.platform != "linux":
        parser.error("--cpu: expected Linux; on a Mac, kernel-builder builds both backends")
    derive(arguments.folder)
    if arguments.cpu:
        print(build_cpu(arguments.folder, "_torch_marlin_metal_local"))


if __name__ == "__main__":
    main()
