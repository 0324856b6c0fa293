"""The environment variables that a build on a Mac needs, whichever Python runs it."""

from collections.abc import Mapping

MINIMUM_MACOS = "14.0"


def mac_environment(platform: str, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a build on macOS must add to its environment, except those that are already set.

    setuptools compiles extensions with the interpreter's own flags, and python.org's Python is a universal2 build for
    macOS 10.9 and 10.13. Its flags also ask for x86-64, for which PyTorch has no libraries. Without ninja, the compiler
    also gets that Python's deployment target, and for macOS 10.9 it refuses aligned `new`.

    Args:
        platform: `sys.platform`.
        given: the environment.
    """
    if platform != "darwin":
        return {}
    wanted = {
        # setuptools uses these instead of the interpreter's own -arch flags.
        "ARCHFLAGS": "-arch arm64",
        "MACOSX_DEPLOYMENT_TARGET": MINIMUM_MACOS,
        # The wheel's tag. Without it, a universal2 interpreter would name the wheel universal2.
        "_PYTHON_HOST_PLATFORM": f"macosx-{MINIMUM_MACOS}-arm64",
    }
    return {name: value for name, value in wanted.items() if name not in given}
