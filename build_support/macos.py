"""Cross-builds the macOS wheel on Linux, with clang from the `ziglang` wheel, lld, and the real PyTorch dylibs.

    python -m build_support.macos                   # builds build/macos/torch_marlin_metal-*-macosx_14_0_arm64.whl
    python -m build_support.macos --torch 2.15.0    # the wheel for another torch
    python -m build_support.macos --torch all       # one wheel for each supported torch

The linker must resolve all symbols except Python's own. So the link fails if the dylibs do not export a torch symbol,
or if `macos_symbols.py` does not allow a system symbol.
"""

import argparse
import concurrent.futures
import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

from build_support import cpp_library
from build_support.backend import torch_requirement, version_label
from build_support.embed_kernels import write_kernel_sources
from build_support.mac_environment import MINIMUM_MACOS
from build_support.macos_symbols import SYSTEM_LIBRARIES, selector_problems, system_symbols
from softmetal.apple import api_check, pytorch_calls, wheels
from softmetal.apple.pytorch_calls import PINNED

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "macos"
FRAMEWORK_LINKS = OUT / "frameworks"
FRAMEWORKS = ("Foundation", "Metal", "MetalPerformanceShaders", "MetalPerformanceShadersGraph", "os")
EARLIEST_ZIP_DATE = "315532800"  # 1 January 1980, in seconds since 1970
TAG = "cp311-cp311-macosx_14_0_arm64"
MODULE = "_C.cpython-311-darwin.so"
CPP_LIBRARY = cpp_library.FOLDER / "lib" / cpp_library.library_name("darwin")
TORCH_DYLIBS = ("libtorch.dylib", "libtorch_cpu.dylib", "libtorch_python.dylib", "libc10.dylib")


class MacBuildError(RuntimeError):
    """The macOS build failed. The message contains the output of the tool that failed."""


def run(command: list[str], **options: str) -> str:
    """Runs a tool and returns its output. Raises MacBuildError with its error output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **options})
    if done.returncode != 0:
        raise MacBuildError(f"{Path(command[0]).name} failed:\n{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def torch_folder(torch: str) -> Path:
    """Returns the folder of a supported torch for macOS, which contains its headers and libraries."""
    return wheels.unpack(pytorch_calls.WHEEL_OF[torch]) / "torch"


def sources() -> list[Path]:
    """Returns every C++ and Objective-C++ source of the extension on a Mac."""
    kernel_sources = OUT / "kernel_sources.cpp"
    write_kernel_sources(ROOT / "kernels", kernel_sources)
    return sorted([kernel_sources, *ROOT.glob("csrc/**/*.cpp"), *ROOT.glob("csrc/**/*.mm")])


def compiler() -> list[str]:
    """Returns the command of clang for arm64 macOS with Apple's open-source headers."""
    zig = wheels.unpack("ziglang") / "ziglang" / "zig"
    zig.chmod(0o755)
    return [str(zig), "c++", "-target", f"aarch64-macos.{MINIMUM_MACOS}", "-mcpu=apple_m1"]


def python_headers() -> Path:
    """Returns a folder with Python's headers and with a pyconfig.h that accepts any 64-bit target.

    Debian's pyconfig.h accepts only Linux targets and includes a file for each of them. In the returned folder,
    pyconfig.h is a copy of the included file for 64-bit Linux.
    """
    headers = Path(sysconfig.get_path("include"))
    own = headers.parent / str(sysconfig.get_config_var("MULTIARCH")) / headers.name / "pyconfig.h"
    if not own.exists():
        return headers
    copy = OUT / headers.name
    shutil.copytree(headers, copy, dirs_exist_ok=True)
    shutil.copyfile(own, copy / "pyconfig.h")
    return copy


def compile_flags(
    torch: str = PINNED, root: Path = ROOT, stand_ins: Path = api_check.INCLUDE, frameworks: Path = FRAMEWORK_LINKS
) -> list[str]:
    """Returns the compiler flags, with the headers of the macOS torch wheel and our stand-ins for Apple's frameworks.

    Args:
        torch: the version of torch to compile for.
        root: the folder to which our own includes are relative.
        stand_ins: the folder that contains one folder of stand-in headers for each framework.
        frameworks: a folder in which to create links to the stand-ins that the sources need on a Mac.
    """
    headers = torch_folder(torch) / "include"
    frameworks.mkdir(parents=True, exist_ok=True)
    for name in FRAMEWORKS:
        link = frameworks / name
        if not link.is_symlink():
            link.symlink_to(stand_ins / name)
    flags = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-fno-sanitize=undefined", "-Wall", "-Wextra"]
    flags += ["-Werror=unguarded-availability-new"]
    # Without availability annotations, the headers of libc++ use functions that libc++ of macOS 14 does not export.
    flags += ["-U_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS", "-D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1"]
    flags += [f"-ffile-prefix-map={ROOT}/=", "-fblocks", "-fobjc-exceptions", "-Wno-unknown-pragmas"]
    flags += ["-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    flags += [f'-DTORCH_MARLIN_METAL_TORCH_VERSION="{torch}"', f"-I{frameworks}", f"-I{root}"]
    includes = [headers, headers / "torch" / "csrc" / "api" / "include", python_headers()]
    return flags + [f"-isystem{path}" for path in includes]


def stale(product: Path, dependencies: Path) -> bool:
    """Returns true if an output is missing, or older than a file in its make-style dependency file."""
    if not product.exists() or not dependencies.exists():
        return True
    read = re.sub(r"\\\n", " ", dependencies.read_text()).split(":", 1)[1].split()
    return any(not Path(name).exists() or Path(name).stat().st_mtime > product.stat().st_mtime for name in read)


def compile_object(command: list[str], source: Path, product: Path) -> None:
    """Compiles one source to `product`, and writes a make-style dependency file next to it."""
    dependencies = product.with_suffix(".d")
    run(
        [*command, "-MD", "-MF", str(dependencies), "-c", str(source), "-o", str(product)],
        ZIG_GLOBAL_CACHE_DIR=str(wheels.CACHE.parent / "zig"),
        ZIG_LOCAL_CACHE_DIR=str(wheels.CACHE.parent / "zig"),
    )


def objects_folder(torch: str) -> Path:
    return OUT / "objects" / torch


def serves_any_torch(product: Path) -> bool:
    """Returns true if an object is up to date and was compiled without any header of PyTorch."""
    dependencies = product.with_suffix(".d")
    return not stale(product, dependencies) and f"{os.sep}torch{os.sep}include{os.sep}" not in dependencies.read_text()


def compile_objects(torch: str = PINNED) -> list[Path]:
    """Compiles the changed sources on all cores, and returns all objects.

    A source that includes no header of PyTorch is compiled only once for all versions of torch.
    """
    folder = objects_folder(torch)
    folder.mkdir(parents=True, exist_ok=True)
    command = [*compiler(), *compile_flags(torch)]
    products = {}
    for path in sources():
        name = str(path.relative_to(ROOT)).replace("/", "_") + ".o"
        common = objects_folder(PINNED) / name
        products[common if serves_any_torch(common) else folder / name] = path
    changed = {product: path for product, path in products.items() if stale(product, product.with_suffix(".d"))}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(functools.partial(compile_object, command), changed.values(), changed)
        for path, _ in zip(changed.values(), compiled, strict=True):
            print(f"  compiled {path.relative_to(ROOT)}", flush=True)
    return list(products)


def text_stubs(dylibs: list[Path]) -> list[Path]:
    """Writes a text stub for each system library. A stub lists only the symbols that are known to exist."""
    folder = OUT / "stubs"
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for library, symbols in system_symbols(dylibs).items():
        names = ", ".join(f"'{name}'" for name in sorted(symbols))
        path = folder / f"{library}.tbd"
        path.write_text(
            "--- !tapi-tbd\ntbd-version: 4\ntargets: [ arm64-macos ]\n"
            f"install-name: '{SYSTEM_LIBRARIES[library]}'\n"
            f"exports:\n  - targets: [ arm64-macos ]\n    symbols: [ {names} ]\n...\n"
        )
        paths.append(path)
    return paths


def python_symbols(objects: list[Path]) -> list[str]:
    """Returns the CPython symbols that the objects use. The running interpreter defines them."""
    names = run(["llvm-nm-19", "--undefined-only", "--format=just-symbols", *map(str, objects)]).split()
    return sorted({name for name in names if re.match(r"__?Py", name)})


def torch_dylibs(torch: str) -> list[Path]:
    """Returns PyTorch's real libraries for the Mac."""
    return [torch_folder(torch) / "lib" / name for name in TORCH_DYLIBS]


def link(objects: list[Path], product: Path, torch: str = PINNED) -> Path:
    """Links the extension with the real torch dylibs. Raises MacBuildError if a symbol is undefined."""
    return _link(objects, product, torch_dylibs(torch), "@loader_path/../torch/lib", python_symbols(objects))


def link_cpp_library(objects: list[Path], product: Path, torch: str) -> Path:
    """Links the library for C++ programs with the real torch dylibs. A symbol of Python is an error."""
    own = [path for path in objects if not path.name.startswith("csrc_python_")]
    dylibs = [path for path in torch_dylibs(torch) if path.name != "libtorch_python.dylib"]
    return _link(own, product, dylibs, f"@loader_path/{cpp_library.TORCH_FROM_HERE}", [])


def _link(objects: list[Path], product: Path, dylibs: list[Path], rpath: str, undefined: list[str]) -> Path:
    command = ["ld64.lld-19", "-dylib", "-arch", "arm64", "-platform_version", "macos", MINIMUM_MACOS, MINIMUM_MACOS]
    command += ["-rpath", rpath, "-install_name", f"@rpath/{product.name}", "-dead_strip"]
    command += ["-ignore_auto_link", "--error-limit=0"]
    for name in undefined:
        command += ["-U", name]
    command += ["-o", str(product), *map(str, objects)]
    command += [str(path) for path in [*dylibs, *text_stubs(dylibs)]]
    run(command)
    return product


def check_api(objects: list[Path], torch: str = PINNED, root: Path = ROOT, stand_ins: Path = api_check.INCLUDE) -> str:
    """Compares the stand-in headers and the selectors of the MPS objects with Apple's metadata. Returns a summary.

    Raises:
        MacBuildError: a selector, encoding, class or enum value differs from Apple's metadata, or needs a newer macOS.
    """
    host = [path for path in objects if path.name.endswith(".mm.o")]
    summary = run(
        [sys.executable, "-m", "softmetal.apple.api_check", "--include", str(stand_ins), *map(str, host)]
    ).strip()
    if problems := selector_problems(host, sorted(root.glob("csrc/**/*.mm")), torch_dylibs(torch)):
        raise MacBuildError("\n".join(problems))
    return f"{summary}; none newer than macOS {MINIMUM_MACOS} without a guard"


def pack(module: Path, library: Path, torch: str) -> Path:
    """Packs the Python files, the metadata, the module and the package for C++ programs into a wheel."""
    tree = module.parent / "wheel"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    dist_info = [sys.executable, str(ROOT / "setup.py"), "--quiet", "dist_info", "--output-dir", str(tree)]
    run(dist_info, TORCH_MARLIN_METAL_BUILT_FOR=torch)
    (info,) = tree.glob("*.dist-info")
    (info / "WHEEL").write_text(
        f"Wheel-Version: 1.0\nGenerator: build_support.macos\nRoot-Is-Purelib: false\nTag: {TAG}\n"
    )
    package = ROOT / "torch_marlin_metal"
    cpp = [*(package / "cpp").glob("*Config.cmake"), *(package / "cpp").rglob("*.h")]
    for path in sorted([*package.rglob("*.py"), package / "py.typed", *cpp]):
        target = tree / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    shutil.copy(module, tree / "torch_marlin_metal" / MODULE)
    cpp_library.write_built_for(tree / cpp_library.FOLDER, torch)
    (tree / CPP_LIBRARY).parent.mkdir()
    shutil.copy(library, tree / CPP_LIBRARY)
    # One date for all files, so that two builds of the same sources give the same bytes.
    epoch = os.environ.get("SOURCE_DATE_EPOCH", EARLIEST_ZIP_DATE)
    printed = run([sys.executable, "-m", "wheel", "pack", "--dest-dir", str(OUT), str(tree)], SOURCE_DATE_EPOCH=epoch)
    return OUT / re.findall(r"(torch_marlin_metal-\S+\.whl)", printed)[0]


def check_wheel(wheel: Path, module: Path, library: Path, torch: str) -> list[str]:
    """Checks the contents of the wheel and returns a list of its files.

    Raises:
        MacBuildError: a file is missing or unexpected, or contains a path of the building machine.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
        texts = {name: archive.read(name) for name in names}
    modules = [name for name in names if name.endswith((".so", ".dylib"))]
    if sorted(modules) != sorted([f"torch_marlin_metal/{MODULE}", CPP_LIBRARY.as_posix()]):
        raise MacBuildError(f"{wheel.name}: expected the module and the library for C++, got {modules}")
    for name, data in texts.items():
        if str(ROOT).encode() in data:
            raise MacBuildError(f"{wheel.name}: {name} names a folder of the building machine")
    if others := [name for name in names if not name.startswith(("torch_marlin_metal/", "torch_marlin_metal-"))]:
        raise MacBuildError(f"{wheel.name}: expected only torch_marlin_metal/ and its metadata, got {others}")
    requirement = torch_requirement(torch)
    if "Name: torch_marlin_metal\n" not in metadata or f"Requires-Dist: {requirement}\n" not in metadata:
        raise MacBuildError(f"{wheel.name}: METADATA lacks the name or the requirement {requirement}")
    if version_label(torch) not in wheel.name:
        raise MacBuildError(f"{wheel.name}: the name does not say {version_label(torch)}")
    for binary in (module, library):
        headers = run(["llvm-objdump-19", "--macho", "--private-headers", str(binary)])
        if "/torch/lib (offset" not in headers or "ARM64" not in headers:
            raise MacBuildError(f"{binary.name}: not an arm64 library with an rpath to torch's libraries")
        if "LC_CODE_SIGNATURE" not in headers:
            raise MacBuildError(f"{binary.name}: the linker signed nothing, and Apple silicon runs only signed code")
    if torch.encode() not in texts[f"torch_marlin_metal/{MODULE}"]:
        raise MacBuildError(f"{module.name}: does not say that it was built for torch {torch}")
    for source in sorted(ROOT.glob("kernels/**/*.metal")):
        marker = source.relative_to(ROOT).as_posix().encode()
        if any(marker not in texts[name] for name in modules):
            raise MacBuildError(f"{wheel.name}: kernel source {source.name} is not embedded")
    return names


def build(torch: str) -> None:
    """Builds and checks the wheel for one torch."""
    print(f"== macOS arm64, torch {torch}: compiling", flush=True)
    objects = compile_objects(torch)
    print(f"== {check_api(objects, torch)}", flush=True)
    print(f"== linking {len(objects)} objects against the dylibs of torch {torch} for macOS", flush=True)
    folder = OUT / torch
    folder.mkdir(exist_ok=True)
    module = link(objects, folder / MODULE, torch)
    library = link_cpp_library(objects, folder / CPP_LIBRARY.name, torch)
    print(f"== {pytorch_calls.check(torch)}", flush=True)
    wheel = pack(module, library, torch)
    names = check_wheel(wheel, module, library, torch)
    print(f"== {wheel.relative_to(ROOT)}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB, checked")


def main() -> None:
    """Builds and checks the wheels for the torch versions on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    supported = list(pytorch_calls.WHEEL_OF)
    parser.add_argument("--torch", choices=[*supported, "all"], default=PINNED)
    wanted = parser.parse_args().torch
    for torch in supported if wanted == "all" else [wanted]:
        build(torch)


if __name__ == "__main__":
    main()
