"""Refuses versions of libraries that are too old for the integrations."""

import importlib


def require(integration: str, package: str, oldest: tuple[int, int], beside: str = "") -> None:
    """Checks that a library is installed and new enough for an integration.

    Args:
        integration: the integration's module, for the error message.
        package: the library.
        oldest: the oldest supported version, major and minor.
        beside: further packages that pip must install, for the error message.

    Raises:
        ImportError: the library is not installed or too old.
    """
    version = ".".join(map(str, oldest))
    needed = f"{integration} needs {package} >= {version} (pip install '{package}>={version}'{beside and ' ' + beside})"
    try:
        found: str = importlib.import_module(package).__version__
    except ImportError as error:
        raise ImportError(f"{needed}; it is not installed") from error
    if tuple(int(part) for part in found.split(".")[:2]) < oldest:
        raise ImportError(f"{needed}; found {found}")
