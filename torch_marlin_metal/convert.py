"""Readers of 4-bit checkpoints: every format becomes `PackedWeight`, without loss or not at all.

    for weight in convert.read_layers("path/to/model"):
        ...

`read_layers` -> `reader.py` -> `catalogue.py` chooses the format -> one file a format converts one layer.
"""

from torch_marlin_metal.convert.catalogue import FORMATS
from torch_marlin_metal.convert.errors import CheckpointError, NotQuantized, UnsupportedFormat
from torch_marlin_metal.convert.export import EXPORTERS, export_checkpoint
from torch_marlin_metal.convert.floats import FloatReader
from torch_marlin_metal.convert.reader import CheckpointReader, DenseWeight, open_reader, read_layers
from torch_marlin_metal.convert.summary import formats_page
from torch_marlin_metal.convert.writer import write_checkpoint
from torch_marlin_metal.packed_weight import PackedWeight

__all__ = [
    "EXPORTERS",
    "FORMATS",
    "CheckpointError",
    "CheckpointReader",
    "DenseWeight",
    "FloatReader",
    "NotQuantized",
    "PackedWeight",
    "UnsupportedFormat",
    "export_checkpoint",
    "formats_page",
    "open_reader",
    "read_layers",
    "write_checkpoint",
]
