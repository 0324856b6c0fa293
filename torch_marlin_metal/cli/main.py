"""The entry point of `torch-marlin-metal`."""

import sys

from torch_marlin_metal import interrupt


def main() -> None:
    """Runs the command line."""
    try:
        from torch_marlin_metal.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "click", "rich", "shellingham"):
            raise
        sys.exit(f"torch-marlin-metal: the command line needs the package {error.name}: pip install typer")
    interrupt.raise_again()
    app()
