"""Makes transformers' `from_pretrained` load packed checkpoints with this package, and others as before.

`from_pretrained` calls the function `get_hf_quantizer` to select the loader of a quantized checkpoint. The import wraps
this function. For the methods in `known_formats.py` and for GGUF files, the wrapper returns this package's quantizer.
transformers' tables of methods do not change, except for one entry for this package's own directories.

`from_pretrained` is wrapped too. If this package refuses a checkpoint, the wrapper lets transformers load it in a
second attempt, as without the import. There is no second attempt if the script passed a `MarlinConfig`. There is none
for GGUF files either, because this package refuses them for settings that transformers would ignore.

transformers searches the settings of a checkpoint only in the configuration of the model class. The wrapper also calls
`find_settings`, because the class may use the configuration of a sub-model, and old GPTQ and AWQ directories have the
settings in a separate file next to config.json.
"""

import functools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# `as` also imports a submodule that is not yet an attribute of its package.
import transformers.modeling_gguf_pytorch_utils as gguf
import transformers.modeling_utils as models
import transformers.quantizers.auto as tables
from transformers import AutoRoundConfig, GgufConfig, PreTrainedModel
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.utils import cached_file, logging

from torch_marlin_metal.checkpoints.errors import (
    CheckpointError,
    NothingPacked,
    NotQuantized,
    UnknownArchitecture,
    UnsupportedFormat,
)
from torch_marlin_metal.checkpoints.formats.native import METHOD
from torch_marlin_metal.checkpoints.known_formats import DIRECTORY_FORMATS
from torch_marlin_metal.checkpoints.options import spelled
from torch_marlin_metal.checkpoints.settings import CONFIG, CONFIG_FILES, CONFIG_KEYS, find_settings
from torch_marlin_metal.integrations.transformers.config import (
    MarlinConfig,
    as_config,
    loading_defaults,
    set_loading_defaults,
)
from torch_marlin_metal.integrations.transformers.gguf import MarlinGgufQuantizer, reads_all_settings
from torch_marlin_metal.integrations.transformers.packed_checkpoint import OP
from torch_marlin_metal.integrations.transformers.quantizer import MarlinQuantizer

logger = logging.get_logger(__name__)
# transformers looks up this table entry for directories in this package's format; see `NativeExporter.settings`.
STOPS = "bitsandbytes_4bit"
GGUF = "gguf"
METHODS = {method for fmt in DIRECTORY_FORMATS for method in fmt.methods}
ONLY_WIDE = ("fp8", "bitsandbytes_8bit")  # methods that have no 4-bit layers
# Config classes that a script may pass -> the methods that transformers also reads with this class.
READ_BY: Mapping[type, tuple[str, ...]] = {AutoRoundConfig: ("gptq", "awq")}


@dataclass
class _Load:
    """The state of one call of `from_pretrained`.

    Attributes:
        path: the directory of the model's files, or the model's name on the Hub.
        download: arguments for downloading files.
        by_transformers: True in the second attempt, which does not use this package.
        config: the config of this package's quantizer, or None if this package does not load the checkpoint.
        insists: True if this package must load the checkpoint or raise its error, without a second attempt.
        settings: the checkpoint's settings, if the model class's configuration lacks them.
        floats: True if all weights of the checkpoint are floats, so that its settings are ignored.
        reinitializes: True if the caller passes `ignore_mismatched_sizes=True`.
    """

    path: Any = None
    download: dict[str, Any] = field(default_factory=dict)
    by_transformers: bool = False
    config: MarlinConfig | None = None
    insists: bool = False
    settings: dict[str, Any] | None = None
    floats: bool = False
    reinitializes: bool = False


_active = False
_load: ContextVar[_Load | None] = ContextVar("load", default=None)


def takes_own(theirs: Any) -> Any:
    """Returns a subclass of a bitsandbytes config class that also accepts this package's directories."""

    class Own(theirs):  # type: ignore[misc]
        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            owner = MarlinConfig if config_dict.get("quant_method") == METHOD else theirs
            return owner.from_dict(config_dict, *args, **kwargs)

    Own.__name__ = Own.__qualname__ = theirs.__name__
    return Own


def taken_over() -> list[str]:
    """Returns the `quant_method` values (and "gguf") of the checkpoints that this package currently loads."""
    return [*sorted(METHODS - {METHOD}), GGUF] if _active else []


def take_over(**defaults: Any) -> None:
    """Makes this package load the checkpoints of every method in `known_formats.py`.

    Importing the package calls this function. Calling it again only changes the defaults.

    Args:
        **defaults: arguments of `MarlinConfig` for checkpoints that are loaded without a config. Only arguments for
            quantized checkpoints have an effect.
    """
    global _active
    set_loading_defaults(defaults)
    if METHOD not in tables.AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(MarlinQuantizer)
        register_quantization_config(METHOD)(MarlinConfig)
        tables.AUTO_QUANTIZATION_CONFIG_MAPPING[STOPS] = takes_own(tables.AUTO_QUANTIZATION_CONFIG_MAPPING[STOPS])
        _wrap()
    _active = True


def restore() -> None:
    """Lets transformers load all checkpoints. `MarlinConfig` and directories in this package's format still work."""
    global _active
    _active = False


@contextmanager
def restored() -> Iterator[None]:
    """Lets transformers load all checkpoints inside the `with` block."""
    defaults, active = loading_defaults(), _active
    restore()
    try:
        yield
    finally:
        if active:
            take_over(**defaults)


def _wrap() -> None:
    PreTrainedModel.from_pretrained = classmethod(_tries_twice(PreTrainedModel.from_pretrained.__func__))
    models.maybe_load_adapters = _notes_path(models.maybe_load_adapters)
    models.get_hf_quantizer = _chooses(models.get_hf_quantizer)
    models.get_state_dict_dtype = _of_weights(models.get_state_dict_dtype)
    gguf.load_gguf_checkpoint = reads_all_settings(gguf.load_gguf_checkpoint, lambda: _active)


def _tries_twice(original: Any) -> Any:
    """Wraps `from_pretrained`: if this package refuses a checkpoint, transformers loads it without this package."""

    @functools.wraps(original)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        load = _Load(by_transformers=not _active, reinitializes=bool(kwargs.get("ignore_mismatched_sizes")))
        token = _load.set(load)
        try:
            try:
                with spelled(as_config):
                    return original(cls, *args, **kwargs)
            except (UnsupportedFormat, NothingPacked, NotQuantized) as error:
                load.floats = isinstance(error, NothingPacked)
                insists = load.config is None or (load.insists and not load.floats)
                if insists and not _is_theirs(error, kwargs):
                    raise
                if isinstance(error, UnsupportedFormat) and load.config is not None and _is_ignored(load.config.source):
                    raise  # transformers would use 8-bit codes as weights
                refusal = error.with_traceback(None)  # the traceback would keep the first attempt's model in memory
            load.config, load.by_transformers = None, True
            logger.warning(f"{OP}: transformers loads {load.path} without torch_marlin_metal, because: {refusal}")
            if load.floats:
                return original(cls, *args, **kwargs)
            try:
                return original(cls, *args, **kwargs)
            except Exception as error:
                theirs = f"{type(error).__name__}: {error}"
                raise UnsupportedFormat(f"{refusal}\ntransformers itself does not load it either: {theirs}") from error
        finally:
            _load.reset(token)

    return from_pretrained


def _is_theirs(error: Exception, kwargs: Mapping[str, Any]) -> bool:
    """Returns True if only transformers supports a GGUF file's architecture and the script passed no `MarlinConfig`."""
    return isinstance(error, UnknownArchitecture) and not isinstance(kwargs.get("quantization_config"), MarlinConfig)


def _notes_path(original: Any) -> Any:
    """Wraps `maybe_load_adapters` to record the model's path and download arguments, also for an adapter."""

    @functools.wraps(original)
    def maybe_load_adapters(path: Any, download_kwargs: Any, **kwargs: Any) -> Any:
        result = original(path, download_kwargs, **kwargs)
        if (load := _load.get()) is not None:
            load.path, load.download = result[1], download_kwargs
        return result

    return maybe_load_adapters


def _chooses(original: Any) -> Any:
    """Wraps `get_hf_quantizer` to return this package's quantizer for checkpoints in this package's formats."""

    @functools.wraps(original)
    def get_hf_quantizer(
        config: Any,
        quantization_config: Any,
        device_map: Any,
        weights_only: Any,
        user_agent: Any,
        gguf_file: Any = None,
    ) -> Any:
        load, quantizer = _load.get(), None
        if load is not None and load.floats:
            for owner in (config, config.get_text_config(decoder=True)):
                vars(owner).pop("quantization_config", None)
        elif load is not None and load.by_transformers and load.settings is not None:
            config.quantization_config = load.settings
        if load is not None and not load.by_transformers:
            if gguf_file is None:
                quantizer = _for_directory(load, config, quantization_config)
            elif _settings_in(config) is None and isinstance(
                quantization_config, (GgufConfig, MarlinConfig, type(None))
            ):
                load.insists = True
                quantizer = MarlinGgufQuantizer(quantization_config or GgufConfig())
                config.quantization_config = GgufConfig(gguf_file=gguf_file)
        if quantizer is None:
            return original(config, quantization_config, device_map, weights_only, user_agent, gguf_file=gguf_file)
        quantizer.reinitializes = load is not None and load.reinitializes
        quantizer.validate_environment(device_map=device_map, weights_only=weights_only)
        user_agent["quant"] = METHOD
        return quantizer, quantizer.update_attn_implementation(config), quantizer.update_device_map(device_map)

    return get_hf_quantizer


def _of_weights(original: Any) -> Any:
    """Wraps `get_state_dict_dtype`, which would return the dtype of a layer's scales if they come first."""

    @functools.wraps(original)
    def get_state_dict_dtype(state_dict: Mapping[str, Any]) -> Any:
        if (load := _load.get()) is None or load.config is None:
            return original(state_dict)
        weights = {name: tensor for name, tensor in state_dict.items() if name.endswith(".weight")}
        return original({name: one for name, one in weights.items() if one.is_floating_point()} or state_dict)

    return get_state_dict_dtype


def _for_directory(load: _Load, config: Any, passed: Any) -> MarlinQuantizer | None:
    """Returns the quantizer for a directory that this package reads, or None."""
    settings = _settings_in(config)
    if settings is None and (beside := _settings_of(load)) is not None:
        settings = load.settings = beside
    if settings is None or _method(settings) not in METHODS | {""}:
        return None
    if passed is not None and not isinstance(passed, MarlinConfig):
        if _method(settings) in ONLY_WIDE:
            return None
        if getattr(passed, "dequantize", False):
            logger.warning(f"{OP}: transformers decodes {load.path} to floats: {type(passed).__name__}.dequantize")
            config.quantization_config = settings
            return None
        if not _same_method(passed, _method(settings)):
            return None  # transformers names both methods in its error
        warnings.warn(
            f"{OP}: {type(passed).__name__} has no effect: torch_marlin_metal reads the {_method(settings)} checkpoint "
            f"{load.path} with the settings that are stored in it. quantization_config=MarlinConfig(...) of "
            "torch_marlin_metal.integrations.transformers chooses how; within restored(), transformers reads it",
            stacklevel=5,
        )
    load.config = MarlinConfig.from_dict(settings)
    if isinstance(passed, MarlinConfig):
        load.insists = True
        for name, value in passed.get_loading_attributes().items():
            setattr(load.config, name, value)
    load.insists |= load.config.on_unsupported == "error" or _method(settings) == METHOD
    config.quantization_config = load.config
    return MarlinQuantizer(load.config, pre_quantized=True)


def _settings_in(config: Any) -> dict[str, Any] | None:
    """Returns the settings that transformers or mlx-lm stored in a transformers configuration, or None."""
    for owner in (config, config.get_text_config(decoder=True)):
        for key in CONFIG_KEYS:
            found = vars(owner).get(key)
            if hasattr(found, "to_dict"):  # a config object, as in a loaded model
                found = found.to_dict()
            if isinstance(found, dict) and (key != "quantization" or "bits" in found):
                return found
    return None


def _settings_of(load: _Load) -> dict[str, Any] | None:
    """Searches the settings of a checkpoint outside its class's configuration. Returns None if there are none."""
    if load.path is None:
        return None
    quiet = dict.fromkeys(("gated_repo", "missing_entries", "connection_errors"), False)
    arguments = load.download | {f"_raise_exceptions_for_{name}": value for name, value in quiet.items()}
    directory = None
    try:
        for name in (CONFIG, *CONFIG_FILES):
            if (file := cached_file(load.path, name, **arguments)) is not None:
                directory = Path(file).parent
                if found := find_settings(directory):
                    return {"quant_method": ""} | dict(found)
    except CheckpointError as error:
        logger.warning(f"{OP}: {load.path} is loaded without quantization settings: {error}")
    return None


def _is_ignored(settings: Mapping[str, Any] | None) -> bool:
    """Returns True if transformers has no quantizer for a checkpoint and would use its codes as values."""
    method = "" if settings is None else _method(settings)
    return method not in {*tables.AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes", ""}


def _method(settings: Mapping[str, Any]) -> str:
    if settings.get("load_in_8bit"):
        return "bitsandbytes_8bit"
    return str(settings.get("quant_method") or settings.get("method") or "").lower()


def _same_method(passed: Any, method: str) -> bool:
    """Returns True if transformers can read a checkpoint of the given method with the config `passed`."""
    names = {str(getattr(passed.quant_method, "value", passed.quant_method)), *READ_BY.get(type(passed), ())}
    return method.removesuffix("_4bit") in names
