"""The environment variables that a build on a Mac needs, for every distribution of Python."""

from collections.abc import Mapping

MINIMUM_MACOS = "14.0"


def mac_environment(platform: str, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a build on macOS must add to its environment, except those that are already set.

    setuptools compiles extensions with the interpreter's own flags. python.org's Python is a universal2 build for macOS
    10.9 or 10.13 and newer. Its flags include x86-64, for which PyTorch has no libraries. Without ninja, setuptools
    also tells the compiler to build for that old macOS, and for 10.9 the compiler rejects aligned `new`.

    Args:
        platform: a value of `sys.platform`.
        given: the current environment.
    """
    if platform != "darwin":
        return {}
    wanted = {
        # setuptools uses these instead of the interpreter's own -arch flags.
        "ARCHFLAGS": "-arch arm64",
        "MACOSX_DEPLOYMENT_TARGET": MINIMUM_MACOS,
        # The platform tag of the wheel. Without it, a universal2 interpreter would tag the wheel as universal2.
        "_PYTHON_HOST_PLATFORM": f"macosx-{MINIMUM_MACOS}-arm64",
    }
    return {name: value for name, value in wanted.items() if name not in given}
