"""Reads packed checkpoints of all formats as `PackedWeight`, and refuses layers that would lose information.

    for weight in convert.read_layers("path/to/model"):
        ...

In `checkpoints/`, `directory.py` opens a checkpoint, `known_formats.py` selects the format, and the format's file in
`formats/` converts the layers.
"""

from torch_marlin_metal.checkpoints.directory import open_reader, read_layers
from torch_marlin_metal.checkpoints.errors import CheckpointError, NotQuantized, UnsupportedFormat
from torch_marlin_metal.checkpoints.floats import FloatReader
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.reader import CheckpointReader, DenseWeight
from torch_marlin_metal.checkpoints.writer import export_checkpoint, write_checkpoint
from torch_marlin_metal.models.quantize import replace_linear_layers

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "DenseWeight",
    "FloatReader",
    "NotQuantized",
    "ReadOptions",
    "UnsupportedFormat",
    "export_checkpoint",
    "open_reader",
    "read_layers",
    "replace_linear_layers",
    "write_checkpoint",
]
