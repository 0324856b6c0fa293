"""Writes the README.md of a directory in the package's own format. The README says how to load the directory."""

from pathlib import Path

from torch_marlin_metal.checkpoints.errors import CheckpointError

README = "README.md"
CARD = """\
## Loading

The weights of this model are packed, in the format of `torch_marlin_metal`. Without that package the model cannot be
loaded. Install it as its README says, then:

```python
import torch_marlin_metal.integrations.transformers  # or .diffusers, .sentence_transformers

model = AutoModel.from_pretrained("this directory")  # or the class that the model has
```

For other programs, `torch-marlin-metal convert --format gptq` (or awq, compressed-tensors) writes the same weights in
their format where that format can hold them.
"""


def write_card(directory: Path) -> None:
    """Writes the README.md, or adds a section to an existing one.

    Raises:
        CheckpointError: the file cannot be written.
    """
    file = directory / README
    try:
        old = file.read_text(encoding="utf-8") if file.exists() else ""
        if CARD not in old:
            file.write_text(f"{old.rstrip()}\n\n{CARD}" if old else CARD, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be written ({error})") from error
