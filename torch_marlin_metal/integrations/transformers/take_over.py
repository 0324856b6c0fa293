"""Replaces entries of transformers' tables so that this package loads 4-bit checkpoints, and restores them.

`AutoQuantizationConfig.from_dict` makes a config from the settings in a checkpoint's config.json, and the config's
`quant_method` chooses the quantizer. It is therefore enough to replace entries of one table, from methods to configs:
the entries for the methods in `known_formats.py` become `MarlinConfig`, whose `quant_method` is this package's own. A
model that transformers itself quantizes while loading (`BitsAndBytesConfig(load_in_4bit=True)` for a float checkpoint)
still uses transformers' quantizer.

Directories of mlx-lm name no method, and old ones have their settings under another key. The function that looks for
the settings is therefore wrapped.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers.modeling_gguf_pytorch_utils
import transformers.modeling_utils
import transformers.quantizers.auto as tables
from transformers.quantizers import register_quantization_config, register_quantizer

from torch_marlin_metal.checkpoints.formats import mlx
from torch_marlin_metal.checkpoints.formats.native import METHOD
from torch_marlin_metal.checkpoints.known_formats import DIRECTORY_FORMATS
from torch_marlin_metal.integrations.transformers.config import MarlinConfig, loading_defaults, set_loading_defaults
from torch_marlin_metal.integrations.transformers.gguf import MarlinGgufQuantizer, reads_all_settings
from torch_marlin_metal.integrations.transformers.quantizer import MarlinQuantizer

# The table entry that transformers looks up for directories in this package's format; see `NativeExporter.settings`.
STOPS = "bitsandbytes_4bit"
_Table = dict[str, Any]
# Replaced entries as (table, key, former value); None if the key was absent.
_replaced: list[tuple[_Table, str, Any]] = []
_loading_types: list[tuple[type, ...]] = []


def takes_own(theirs: Any) -> Any:
    """Returns a subclass of a library's config class for bitsandbytes that also accepts this package's directories."""

    class Own(theirs):  # type: ignore[misc]
        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            """Makes the config of a directory."""
            owner = MarlinConfig if config_dict.get("quant_method") == METHOD else theirs
            return owner.from_dict(config_dict, *args, **kwargs)

    Own.__name__ = Own.__qualname__ = theirs.__name__
    return Own


def taken_over() -> list[str]:
    """Returns the `quant_method` values (and "gguf") of the checkpoints that this package loads at present."""
    return sorted(name for table, name, _ in _replaced if table is tables.AUTO_QUANTIZATION_CONFIG_MAPPING) + [
        name for table, name, _ in _replaced if table is tables.AUTO_QUANTIZER_MAPPING
    ]


def take_over(**defaults: Any) -> None:
    """Makes this package load the checkpoints of every method in `known_formats.py`.

    Importing the package calls this function. Calling it again only changes the defaults.

    Args:
        **defaults: `on_unsupported`, `fuse` and `modules_to_not_convert` of `MarlinConfig` for checkpoints that are
            loaded without a config.
    """
    set_loading_defaults(defaults)
    if METHOD not in tables.AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(MarlinQuantizer)
        register_quantization_config(METHOD)(MarlinConfig)
        tables.AUTO_QUANTIZATION_CONFIG_MAPPING[STOPS] = takes_own(tables.AUTO_QUANTIZATION_CONFIG_MAPPING[STOPS])
    if _replaced:
        return
    methods = {method for fmt in DIRECTORY_FORMATS for method in fmt.methods} - {METHOD}
    # config.json says "bitsandbytes" for both 4 and 8 bit; transformers has a separate entry for each.
    for method in sorted(methods - {"bitsandbytes"}):
        _replace(tables.AUTO_QUANTIZATION_CONFIG_MAPPING, method, MarlinConfig)
    _replace(tables.AUTO_QUANTIZER_MAPPING, "gguf", MarlinGgufQuantizer)
    functions = vars(transformers.modeling_utils)
    _replace(functions, "get_hf_quantizer", _finds_mlx(functions["get_hf_quantizer"]))
    functions = vars(transformers.modeling_gguf_pytorch_utils)
    _replace(functions, "load_gguf_checkpoint", reads_all_settings(functions["load_gguf_checkpoint"]))
    _loading_types.append(tables.LOADING_ATTRIBUTES_CONFIG_TYPES)
    tables.LOADING_ATTRIBUTES_CONFIG_TYPES = (*tables.LOADING_ATTRIBUTES_CONFIG_TYPES, MarlinConfig)


def restore() -> None:
    """Restores transformers' entries. `MarlinConfig` and directories in this package's format still work."""
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
    """Restores transformers' entries within the `with` block."""
    defaults, active = loading_defaults(), bool(_replaced)
    restore()
    try:
        yield
    finally:
        if active:
            take_over(**defaults)


def _finds_mlx(original: Any) -> Any:
    """Wraps transformers' `get_hf_quantizer` so that it knows the settings that mlx-lm writes."""

    @functools.wraps(original)
    def get_hf_quantizer(config: Any, *args: Any, **kwargs: Any) -> Any:
        settings = mlx.unnamed(vars(config))
        if settings is not None:
            config.quantization_config = {**settings, "quant_method": mlx.FORMAT.methods[-1]}
        return original(config, *args, **kwargs)

    return get_hf_quantizer


def _replace(table: _Table, name: str, new: Any) -> None:
    _replaced.append((table, name, table.get(name)))
    table[name] = new
