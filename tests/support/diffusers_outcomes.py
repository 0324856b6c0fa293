"""Prints what loading and saving directories of diffusers gives, with or without this package imported.

python -m tests.support.diffusers_outcomes FOLDER TARGET
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel


def digest(model: torch.nn.Module) -> str:
    parts = sorted((name, str(t.dtype), t.contiguous().numpy().tobytes()) for name, t in model.state_dict().items())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def outcomes(folder: Path, target: Path) -> dict[str, list[str]]:
    """Loads each directory, saves it to `target` and loads the saved directory.

    Returns, by the directory's name, the class of the model and digests of both loads, or the error.
    """
    found = {}
    for path in sorted(folder.iterdir()):
        try:
            model = FluxTransformer2DModel.from_pretrained(path)
            model.save_pretrained(target / path.name)
            again = FluxTransformer2DModel.from_pretrained(target / path.name)
            found[path.name] = [type(model).__name__, digest(model), digest(again)]
        except Exception as error:
            found[path.name] = [type(error).__name__, str(error).partition(" - supported types")[0]]
    return found


if __name__ == "__main__":
    print(json.dumps(outcomes(Path(sys.argv[1]), Path(sys.argv[2]))))
