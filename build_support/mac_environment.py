"""The environment variables that a build on a Mac needs, whatever Python it runs under."""

from collections.abc import Mapping

from build_support.macos_symbols import MINIMUM_MACOS


def mac_environment(platform: str, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a build on macOS must add to its environment, except those that are already set.

    python.org's Python is a universal2 build for macOS 10.9 and 10.13, and setuptools compiles extensions as the
    interpreter was compiled. Its flags ask for x86-64 too, for which PyTorch has no libraries, and where ninja is
    missing its deployment target reaches the compiler, which then refuses aligned `new`.

    Args:
        platform: `sys.platform`.
        given: the environment.
    """
    if platform != "darwin":
        return {}
    wanted = {
        # setuptools puts these in place of the interpreter's own -arch flags.
        "ARCHFLAGS": "-arch arm64",
        "MACOSX_DEPLOYMENT_TARGET": MINIMUM_MACOS,
        # The wheel's tag: without it a universal2 interpreter names the wheel universal2.
        "_PYTHON_HOST_PLATFORM": f"macosx-{MINIMUM_MACOS}-arm64",
    }
    return {name: value for name, value in wanted.items() if name not in given}
