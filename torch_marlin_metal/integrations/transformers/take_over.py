"""Which entries of transformers' tables this package replaces, and how they come back.

`AutoQuantizationConfig.from_dict` makes a config from the settings in a checkpoint's config.json, and the config's
`quant_method` chooses the quantizer. So one table is enough: entries for methods that `known_formats.py` lists give
`MarlinConfig`, whose method is this package's own. Models that are quantized on the fly by a config of transformers
(`BitsAndBytesConfig(load_in_4bit=True)` for a directory of floats) still get transformers' quantizer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers.quantizers.auto as tables
from transformers.quantizers import register_quantization_config, register_quantizer

from torch_marlin_metal.checkpoints.formats.native import METHOD
from torch_marlin_metal.checkpoints.known_formats import DIRECTORY_FORMATS
from torch_marlin_metal.integrations.transformers.config import MarlinConfig, loading_defaults, set_loading_defaults
from torch_marlin_metal.integrations.transformers.gguf import MarlinGgufQuantizer
from torch_marlin_metal.integrations.transformers.quantizer import MarlinQuantizer

_Table = dict[str, Any]
# The former entries of the tables, None for those that were absent; and the former table of loading attributes.
_replaced: list[tuple[_Table, str, Any]] = []
_loading_types: list[tuple[type, ...]] = []


def taken_over() -> list[str]:
    """Returns the methods of checkpoints that this package loads now, as config.json names them, and "gguf"."""
    return sorted(name for table, name, _ in _replaced if table is tables.AUTO_QUANTIZATION_CONFIG_MAPPING) + [
        name for table, name, _ in _replaced if table is tables.AUTO_QUANTIZER_MAPPING
    ]


def take_over(**defaults: Any) -> None:
    """Lets this package load the checkpoints of every method in `known_formats.py`. Importing the package does this.

    Calling it again only changes the defaults.

    Args:
        **defaults: `on_unsupported`, `fuse` and `modules_to_not_convert` of `MarlinConfig` for checkpoints that are
            loaded without a config.
    """
    set_loading_defaults(defaults)
    if METHOD not in tables.AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(MarlinQuantizer)
        register_quantization_config(METHOD)(MarlinConfig)
    if _replaced:
        return
    methods = {method for fmt in DIRECTORY_FORMATS for method in fmt.methods} - {METHOD}
    # A config says "bitsandbytes" for 4 and 8 bit; transformers looks the two up under names of its own.
    for method in sorted(methods - {"bitsandbytes"}):
        _replace(tables.AUTO_QUANTIZATION_CONFIG_MAPPING, method, MarlinConfig)
    _replace(tables.AUTO_QUANTIZER_MAPPING, "gguf", MarlinGgufQuantizer)
    _loading_types.append(tables.LOADING_ATTRIBUTES_CONFIG_TYPES)
    tables.LOADING_ATTRIBUTES_CONFIG_TYPES = (*tables.LOADING_ATTRIBUTES_CONFIG_TYPES, MarlinConfig)


def restore() -> None:
    """Gives transformers its entries back; `MarlinConfig` and directories in this package's format still work."""
    while _replaced:
        table, name, old = _replaced.pop()
        if old is None:
            del table[name]
        else:
            table[name] = old
    if _loading_types:
        tables.LOADING_ATTRIBUTES_CONFIG_TYPES = _loading_types.pop()


@contextmanager
def restored() -> Iterator[None]:
    """Lets transformers load every checkpoint itself within the block."""
    defaults, active = loading_defaults(), bool(_replaced)
    restore()
    try:
        yield
    finally:
        if active:
            take_over(**defaults)


def _replace(table: _Table, name: str, new: Any) -> None:
    _replaced.append((table, name, table.get(name)))
    table[name] = new
