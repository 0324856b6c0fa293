"""Checks that a checkpoint's file is a regular file inside the checkpoint's directory."""

import stat
from pathlib import Path

from torch_marlin_metal.checkpoints.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs"


def regular_file(file: Path) -> Path:
    """Returns the path if it is a regular file inside its own directory.

    A symbolic link may point to a file in its own directory. It may also point from `snapshots/` to the sibling
    directory `blobs/`, because huggingface_hub stores downloads that way.

    Raises:
        CheckpointError: the path is not a regular file, or a link leads elsewhere.
    """
    try:
        target, home = file.resolve(strict=True), file.parent.resolve(strict=True)
        mode = target.stat().st_mode
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error
    allowed = [home, *(parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots")]
    if not any(target.is_relative_to(root) for root in allowed):
        raise CheckpointError(f"{file}: a symbolic link that leads out of the checkpoint, to {target}")
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{file}: expected a regular file")
    check_downloaded(file)
    return file


def check_downloaded(file: Path) -> None:
    """Raises a CheckpointError if the file is a Git LFS pointer whose content was not downloaded."""
    try:
        with file.open("rb") as stream:
            start = stream.read(len(LFS_POINTER))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    if start == LFS_POINTER:
        raise CheckpointError(
            f"{file}: a pointer of Git LFS, not the file itself: run `git lfs pull` in its repository, or download it "
            "with huggingface_hub"
        )
