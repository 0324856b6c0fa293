"""The layers of tests/data/layers, which other programs wrote."""

from pathlib import Path

DATA = Path(__file__).parents[1] / "data/layers"
WRITTEN = sorted({path.parent for path in DATA.glob("*/*/model.*")})
# The folders that a checkpoint reader can load. Only these have a reference with the expected weights.
FOLDERS = [folder for folder in WRITTEN if (folder / "reference.safetensors").exists()]


def key(folder: Path) -> str:
    """Returns the name of a folder in tests and in tests/data/layers/README.md."""
    return folder.relative_to(DATA).as_posix()


def source_of(folder: Path) -> Path:
    """Returns what a reader opens: the folder, or the file if it is GGUF or has no settings beside it (ComfyUI)."""
    gguf, file = folder / "model.gguf", folder / "model.safetensors"
    return gguf if gguf.exists() else folder if (folder / "config.json").exists() else file
