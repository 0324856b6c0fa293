"""The quantization settings of a checkpoint. `find_settings` searches all places where producers store them."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch_marlin_metal.checkpoints.errors import CheckpointError, UnsupportedFormat
from torch_marlin_metal.checkpoints.files.regular import regular_file
from torch_marlin_metal.checkpoints.files.safetensors import parse_json

MAX_CONFIG = 64 << 20
CONFIG = "config.json"
OWN_METHOD = "torch_marlin_metal"
# Keys of config.json under which producers store the quantization settings, in the order of the search.
CONFIG_KEYS = ("quantization_config", "compression_config", "quantization")
QUANTO_MAP = "quanto_qmap.json"
CONFIG_FILES = (
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    "hf_quant_config.json",
    QUANTO_MAP,
)
# Marks of a ComfyUI file, which has no settings: a key of the metadata, and endings of tensor names.
COMFY_METHOD, COMFY_METADATA = "comfyui", "_quantization_metadata"
COMFY_TENSOR, COMFY_MARK = "comfy_quant", "scaled_fp8"


class Settings(Mapping[str, Any]):
    """The quantization settings of a checkpoint, with look-up by type. `file` is the file that stores them."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file = file
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def integer(self, *keys: str, default: int | None = None) -> int | None:
        """Returns the first integer among `keys`, or the default if none of the keys is set."""
        value = self._first(keys, int, "an integer")
        return default if value is None else int(value)

    def text(self, *keys: str, default: str = "") -> str:
        """Returns the first string among `keys`, or the default if none of the keys is set."""
        value = self._first(keys, str, "a string")
        return default if value is None else str(value)

    def flag(self, *keys: str) -> bool | None:
        """Returns the first boolean among `keys`, or None if none of the keys is set."""
        value = self._first(keys, bool, "true or false")
        return None if value is None else bool(value)

    def section(self, *keys: str) -> "Settings":
        """Returns the first object among `keys`, or empty settings if none of the keys is set."""
        value = self._first(keys, dict, "an object")
        return Settings(self.file, value or {})

    def _first(self, keys: Iterable[str], kind: type, expected: str) -> Any:
        for key in keys:
            value = self._values.get(key)
            if value is None:
                continue
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise CheckpointError(f"{self.file}: quantization settings: {key}: expected {expected}, got {value!r}")
            return value
        return None


def find_settings(path: Path, config: Mapping[str, Any] | None = None) -> Settings | None:
    """Finds the quantization settings of a checkpoint directory.

    Producers store the settings in config.json, in the section of a sub-model in config.json (for example
    `text_config`), or in a separate file in the directory.

    Args:
        path: the directory.
        config: the contents of config.json. None means that the function reads the file.

    Returns:
        The settings, or None if the directory has none.

    Raises:
        CheckpointError: a file is damaged.
        UnsupportedFormat: the sub-models have different settings.
    """
    file = path / CONFIG
    if config is None:
        config = read_config(file) if file.exists() else {}
    found = [Settings(file, values) for values in _in_config(file, config)]
    if found:
        if any(dict(other) != dict(found[0]) for other in found):
            raise UnsupportedFormat(f"{file}: its sub-models have different quantization settings, which is not read")
        return found[0]
    for name in CONFIG_FILES:
        if (path / name).exists():
            return Settings(path / name, read_config(path / name))
    return None


def _in_config(file: Path, config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields a configuration's own settings or, if there are none, the settings of its sub-models."""
    for key in CONFIG_KEYS:
        if config.get(key) is not None:
            if not isinstance(config[key], dict):
                raise CheckpointError(f"{file}: {key}: expected an object, got {config[key]!r}")
            yield config[key]
            return
    for key, section in config.items():
        if key.endswith("_config") and isinstance(section, dict):
            yield from _in_config(file, section)


def without_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a configuration without the quantization settings that `find_settings` finds."""
    return {
        key: without_settings(value) if key.endswith("_config") and isinstance(value, dict) else value
        for key, value in config.items()
        if key not in CONFIG_KEYS
    }


def names_no_layer(values: Mapping[str, Any]) -> bool:
    """Returns True if settings of this package's format list no packed layer, so all weights are floats."""
    return values.get("quant_method") == OWN_METHOD and values.get("layers") == {}


def read_config(file: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        CheckpointError: the file cannot be read, is too large, or does not contain a JSON object.
    """
    regular_file(file)
    try:
        if file.stat().st_size > MAX_CONFIG:
            raise CheckpointError(f"{file}: {file.stat().st_size} bytes are too many for a JSON configuration")
        value = parse_json(file, file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value
