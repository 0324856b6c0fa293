"""The Linux test build of the extension: the objects of the ordinary build, and csrc/mps compiled by clang, linked into
a second library that `import softmetal` puts in the place of `torch_marlin_metal._C`.

It needs the device library loaded first (it names Objective-C classes), so it is never installed.
"""

import importlib.abc
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLANG = "clang++-19"
MODULE = "torch_marlin_metal._C"
LIBRARY = ROOT / "build" / "softmetal" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"


def objective_cxx_flags() -> list[str]:
    """Flags for Apple's Objective-C++ on GNU libobjc, with the stand-in frameworks."""
    gcc_include = subprocess.run(["g++", "-print-file-name=include"], capture_output=True, text=True, check=True)
    return [
        *("-x", "objective-c++", "-fobjc-runtime=gcc", "-fblocks", "-fexceptions"),
        *("-fconstant-string-class=NSConstantString", f"-isystem{gcc_include.stdout.strip()}"),
        f"-isystem{ROOT / 'tests/softmetal/runtime/include'}",
    ]


def is_stale(target: Path, depfile: Path) -> bool:
    if not target.exists() or not depfile.exists():
        return True
    inputs = depfile.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    built = target.stat().st_mtime
    return any(not Path(path).exists() or Path(path).stat().st_mtime > built for path in inputs)


def compile_object(source: str, flags: list[str]) -> str:
    target = LIBRARY.parent / (source.replace(os.sep, ".") + ".o")
    depfile = target.with_suffix(".d")
    if is_stale(target, depfile):
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [CLANG, "-std=c++20", "-fPIC", "-MMD", "-MF", str(depfile), *flags, "-c", source, "-o", str(target)]
        print(" ".join(command))
        subprocess.run(command, check=True)
    return str(target)


def build(command, extension, sources: list[str]) -> None:
    """Links the test library of an extension that `command` (a build_ext) has just built.

    Args:
        command: the running build_ext.
        extension: the extension; its objects are used as they are.
        sources: the files that the ordinary Linux build leaves out: `.mm` and generated `.cpp`.
    """
    flags = [flag for flag in extension.extra_compile_args["cxx"] if not flag.startswith("-std")]
    flags += [f"-D{name}={value}" for name, value in extension.define_macros]
    flags += [f"-I{path}" for path in extension.include_dirs]
    objective_cxx = objective_cxx_flags()
    objects = [
        compile_object(source, flags + (objective_cxx if source.endswith(".mm") else [])) for source in sources
    ]
    ordinary = command.compiler.object_filenames(extension.sources, output_dir=command.build_temp)
    newest = max(Path(path).stat().st_mtime for path in [*objects, *ordinary])
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < newest:
        command.compiler.link_shared_object(
            [*ordinary, *objects],
            str(LIBRARY),
            libraries=command.get_libraries(extension),
            library_dirs=extension.library_dirs,
            extra_postargs=extension.extra_link_args,
            target_lang="c++",
        )


class TestLibraryFinder(importlib.abc.MetaPathFinder):
    """Finds the test library under the extension's name."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != MODULE:
            return None
        return importlib.util.spec_from_file_location(MODULE, LIBRARY)


def use_test_library() -> None:
    """Makes `import torch_marlin_metal` load the test library. Call it after the device library is loaded."""
    if not LIBRARY.exists():
        raise ImportError(
            f"softmetal: {LIBRARY} is not built; run `make build`, or `SOFTMETAL=1 python setup.py build_ext --inplace`"
        )
    if MODULE in sys.modules:
        raise ImportError("softmetal: import softmetal before torch_marlin_metal")
    sys.meta_path.insert(0, TestLibraryFinder())
