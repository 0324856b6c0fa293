"""Writes a checkpoint with a progress bar, for several commands."""

from pathlib import Path
from typing import Any

from torch_marlin_metal.cli.output import printable, progress_bar
from torch_marlin_metal.convert import CheckpointReader, write_checkpoint


def write(reader: CheckpointReader, destination: Path, as_json: bool, **options: Any) -> None:
    """Calls `write_checkpoint` with a progress bar."""
    with progress_bar(0, "tensor", as_json) as bar:

        def advance(name: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_postfix_str(printable(name), refresh=False)
            bar.update(done - bar.n)

        write_checkpoint(reader, destination, progress=advance, **options)


def directory_bytes(path: Path) -> int:
    """Returns the size of a directory's files."""
    return sum(file.stat().st_size for file in path.iterdir())
