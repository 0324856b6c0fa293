"""Builds torch_marlin_metal._C with the CPU backend and, on Macs, the MPS backend (on Linux only for tests)."""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT))  # PEP 517 front ends do not add the source tree to the path

from build_support import cpp_library, progress  # noqa: E402
from build_support.backend import DEFAULT_TORCH, torch_requirement, version_label  # noqa: E402
from build_support.embed_formats import write_format_table  # noqa: E402
from build_support.embed_kernels import write_kernel_sources  # noqa: E402
from build_support.mac_environment import mac_environment  # noqa: E402

TORCH_MINIMUM = (2, 13)
GCC_MINIMUM = 11
CLANG_MINIMUM = 15

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths
except ImportError:
    torch = None
    BuildExtension = build_ext


def check_torch() -> None:
    if torch is None:
        sys.exit(
            "torch_marlin_metal: torch is not installed in this environment. "
            f"Run `pip install torch=={DEFAULT_TORCH}` first, then `pip install --no-build-isolation .`"
        )
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < TORCH_MINIMUM:
        wanted = ".".join(map(str, TORCH_MINIMUM))
        sys.exit(f"torch_marlin_metal: torch {torch.__version__} is too old: {wanted} or newer is needed.")


def check_compiler() -> None:
    compiler = os.environ.get("CXX", "c++")
    try:
        macros = subprocess.run(
            [*compiler.split(), "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        tools = "run `xcode-select --install`" if sys.platform == "darwin" else "install g++ or clang"
        sys.exit(f"torch_marlin_metal: the C++ compiler `{compiler}` does not run ({error}); {tools}.")
    defined = dict(line.split(" ", 2)[1:] for line in macros.splitlines() if line.count(" ") >= 2)
    name, minimum = ("clang", CLANG_MINIMUM) if "__clang__" in defined else ("GCC", GCC_MINIMUM)
    found = int(defined["__clang_major__" if name == "clang" else "__GNUC__"])
    if found < minimum:
        sys.exit(f"torch_marlin_metal: {name} {found} is too old for C++20: {name} {minimum} or newer is needed.")


def check_python() -> None:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit(
            "torch_marlin_metal: this is a free-threaded Python, with which the extension has not been tested. "
            f"Use the default build of Python {sys.version_info.major}.{sys.version_info.minor}."
        )


def relative(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def marlin_extension() -> Extension:
    if torch is None:  # without torch, only a source distribution can be made
        return Extension("torch_marlin_metal._C", sources=[])
    compile_flags = ["-std=c++20", "-O3", "-g0", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-fvisibility=hidden"]
    compile_flags += [f"-isystem{path}" for path in include_paths()]  # no warnings about PyTorch's headers
    if os.environ.get("SOURCE_DATE_EPOCH"):  # a reproducible build must not contain this folder's path
        compile_flags += [f"-ffile-prefix-map={ROOT}/="]
    return CppExtension(
        "torch_marlin_metal._C",
        relative("csrc/**/*.cpp"),
        include_dirs=[str(ROOT)],
        extra_compile_args={"cxx": compile_flags},
        define_macros=[("TORCH_MARLIN_METAL_TORCH_VERSION", f'"{torch.__version__.split("+")[0]}"')],
    )


class BuildMarlin(BuildExtension):
    """Adds the MPS backend and its kernel sources on Macs. If SOFTMETAL is set, builds a test library with them."""

    def run(self):
        check_python()
        check_torch()
        check_compiler()
        super().run()

    def build_extension(self, ext):
        write_format_table(ROOT)
        kernel_sources = Path(self.build_temp, "kernel_sources.cpp")
        write_kernel_sources(ROOT / "kernels", kernel_sources)
        mps_sources = [*relative("csrc/**/*.mm"), str(kernel_sources)]
        if sys.platform == "darwin":
            ext.sources += mps_sources
            ext.extra_link_args += ["-framework", "Metal", "-framework", "Foundation"]
        with progress.short_lines(str(ROOT)):
            super().build_extension(ext)
        self.link_cpp_library(ext)
        if os.environ.get("SOFTMETAL"):
            from softmetal.extension import link_with_mps_sources

            print(
                f"== the same with the MPS backend, on the software Metal device: {len(mps_sources)} files", flush=True
            )
            link_with_mps_sources(self, ext, mps_sources)

    def copy_extensions_to_source(self):  # setuptools calls this for a build in place
        super().copy_extensions_to_source()
        built = Path(self.build_lib, cpp_library.FOLDER)
        shutil.copytree(built, ROOT / cpp_library.FOLDER, dirs_exist_ok=True)

    def link_cpp_library(self, ext):
        root = Path(self.build_lib).resolve()
        sources = [source for source in ext.sources if not cpp_library.is_python_module(source)]
        objects = self.compiler.object_filenames(sources, output_dir=self.build_temp)
        torch_lib = Path(torch.__file__).parent / "lib"
        compiler = os.environ.get("CXX", "c++").split()
        cpp_library.link(sys.platform, compiler, objects, torch_lib, root, torch.__version__.split("+")[0])


os.environ.update(mac_environment(sys.platform, os.environ))
# Adds the virtual environment's scripts to the path, because make does not activate the environment. PyTorch looks for
# `ninja` on the path, and without it compiles one file at a time.
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])

# `make build` sets WITHOUT_EXTENSION to install only the Python files. It compiles the extension separately.
compiles = not os.environ.get("WITHOUT_EXTENSION")
# The version of the torch for which the extension is built, or None for a package without an extension, such as a
# source distribution. A cross-build passes this version in TORCH_MARLIN_METAL_BUILT_FOR.
built_for = torch.__version__ if compiles and torch is not None and "sdist" not in sys.argv else None
built_for = os.environ.get("TORCH_MARLIN_METAL_BUILT_FOR", built_for)
version = runpy.run_path(str(ROOT / "torch_marlin_metal" / "version.py"))["__version__"]
setup(
    version=version + version_label(built_for),
    ext_modules=[marlin_extension()] if compiles else [],
    cmdclass={"build_ext": BuildMarlin},
    install_requires=[
        torch_requirement(built_for),
        "numpy",
        "safetensors>=0.5",
        "tqdm",
        "rich",
        "typer>=0.19",
        "platformdirs>=4",
    ],
)
