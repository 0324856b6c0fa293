"""setuptools' build backend, extended so that an isolated build compiles against the right PyTorch.

pip builds in an isolated environment. If the build required `torch>=2.13`, pip would install the newest torch there.
On Linux this would download gigabytes of CUDA libraries, and the extension would not load with the user's torch. So
the build uses the torch that is installed for the interpreter. If no torch is installed, it requires DEFAULT_TORCH.

Other front ends (`build`, uv) create a virtual environment for the build, which hides the user's torch. They build the
wheel for DEFAULT_TORCH, and the wheel's metadata requires that torch. `--no-build-isolation` builds for the installed
torch.
"""

import sys
import sysconfig
from collections.abc import Mapping
from importlib.metadata import distributions
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import build_sdist

__all__ = ["build_sdist"]  # the hook that setuptools provides unchanged

TORCH_ON_LINUX = "2.13.0"  # the release with which the tests run
# 2.13 can abort in F.linear on macOS 27 (pytorch#197796); 2.14 does not. 2.15 needs macOS 15; 2.13 and 2.14 run on
# macOS 14.
TORCH_ON_MACS = "2.14.1"
DEFAULT_TORCH = TORCH_ON_MACS if sys.platform == "darwin" else TORCH_ON_LINUX

Settings = Mapping[str, Any] | None


def site_packages_with_torch() -> list[str]:
    """Returns the interpreter's package folders that contain torch, even if an isolated build hides them."""
    folders = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    return [folder for folder in folders if any(distributions(name="torch", path=[folder]))]


def torch_requirement(torch_version: str | None) -> str:
    """Returns the torch requirement for the metadata, for example `torch==2.13.*` for torch 2.13.0.

    Args:
        torch_version: for example "2.13.0+cpu". None for a package without the extension, which runs with every
            supported torch.
    """
    if torch_version is None:
        return "torch>=2.13"
    major, minor = torch_version.split(".")[:2]
    return f"torch=={major}.{minor}.*"


def version_label(torch_version: str | None) -> str:
    """Returns the local part of the version, for example "+torch2.13", which distinguishes the wheels of each torch.

    pip installs the highest version whose requirements are satisfied. So `pip install "torch==2.13.*"
    torch_marlin_metal` selects the wheel for 2.13 among the wheels for 2.13 to 2.15.

    Args:
        torch_version: for example "2.13.0+cpu". None for a package without the extension, which has no local part.
    """
    return "" if torch_version is None else "+torch" + ".".join(torch_version.split(".")[:2])


def _needs() -> list[str]:
    return [] if site_packages_with_torch() else [f"torch=={DEFAULT_TORCH}"]


def _show_torch() -> None:
    sys.path.extend(folder for folder in site_packages_with_torch() if folder not in sys.path)


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """Returns an empty list, because a source distribution needs no torch. Hook of PEP 517."""
    return []


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Returns the build requirements besides setuptools: torch, unless it is installed. Hook of PEP 517."""
    return _needs()


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Returns the build requirements besides setuptools: torch, unless it is installed. Hook of PEP 660."""
    return _needs()


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    """Writes the wheel's metadata, which pins the torch that is installed, and returns its folder. Hook of PEP 517."""
    _show_torch()
    return build_meta.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    """Writes the metadata of an editable install and returns its folder. Hook of PEP 660."""
    _show_torch()
    return build_meta.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Builds the wheel against the torch that is installed, and returns its name. Hook of PEP 517."""
    _show_torch()
    return build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Builds an editable install against the torch that is installed, and returns its name. Hook of PEP 660."""
    _show_torch()
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
