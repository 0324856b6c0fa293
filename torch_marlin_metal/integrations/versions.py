"""Refuses libraries that are older than the integrations need."""

import importlib


def require(integration: str, package: str, oldest: tuple[int, int], beside: str = "") -> None:
    """Checks that a library is installed, in a version that an integration knows.

    Args:
        integration: the integration's module, for the error.
        package: the library.
        oldest: its oldest version, major and minor.
        beside: packages that pip must install beside it, for the error.

    Raises:
        ImportError: it is not installed, or older.
    """
    version = ".".join(map(str, oldest))
    needed = f"{integration} needs {package} >= {version} (pip install '{package}>={version}'{beside and ' ' + beside})"
    try:
        found: str = importlib.import_module(package).__version__
    except ImportError as error:
        raise ImportError(f"{needed}; it is not installed") from error
    if tuple(int(part) for part in found.split(".")[:2]) < oldest:
        raise ImportError(f"{needed}; found {found}")
