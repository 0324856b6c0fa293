"""Makes diffusers' `from_single_file` keep the weights of GGUF files and of 8-bit float files packed.

diffusers reads a file, converts the names and loads the tensors. This module passes placeholders for the packed weights
to diffusers, so that diffusers' code converts their names. `MarlinDiffusersQuantizer` then reads the weights. A
pipeline's `from_single_file` passes the tensors of its file to each model. For the transformer, this module reads the
file again to keep its weights packed.
"""

import functools
import os
from contextvars import ContextVar
from typing import Any

import diffusers.loaders.single_file_utils as files
from diffusers import BFLQuantizationConfig, GGUFQuantizationConfig
from diffusers.loaders.single_file import FromSingleFileMixin
from diffusers.loaders.single_file_model import FromOriginalModelMixin
from diffusers.utils import logging

from torch_marlin_metal.checkpoints.directory import open_reader
from torch_marlin_metal.checkpoints.errors import CheckpointError, NotQuantized, UnsupportedFormat
from torch_marlin_metal.checkpoints.options import spelled
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.integrations.transformers.config import MarlinConfig, as_config, loading_defaults
from torch_marlin_metal.load.converted import COMFY_PREFIX
from torch_marlin_metal.load.row_tensor import RowError, stand_ins

OP = "from_single_file"
DOWNLOAD = ("force_download", "cache_dir", "proxies", "local_files_only", "token", "revision")
THEIRS = (GGUFQuantizationConfig, BFLQuantizationConfig)
READ = (".gguf", ".safetensors")
DENOISERS = ("transformer", "transformer_2", "unet")  # the pipeline components that stay packed
TEXT_ENCODERS = ("text_encoders.", "cond_stage_model.", "conditioner.")  # name prefixes in a pipeline's file
PIPELINE_FILE: ContextVar[str | None] = ContextVar("PIPELINE_FILE", default=None)  # the packed file of a pipeline
logger = logging.get_logger(__name__)


def take_files() -> None:
    original: Any = FromOriginalModelMixin.from_single_file.__func__

    @functools.wraps(original)
    def from_single_file(cls: Any, pretrained_model_link_or_path_or_dict: Any = None, **kwargs: Any) -> Any:
        source, given = pretrained_model_link_or_path_or_dict, kwargs.get("quantization_config")
        reader = None
        if isinstance(source, dict) and kwargs.get("subfolder") in DENOISERS:
            source = PIPELINE_FILE.get() or source
        if isinstance(source, str | os.PathLike) and (given is None or isinstance(given, (*THEIRS, MarlinConfig))):
            reader = _open(os.fspath(source), given, kwargs)
        if reader is None:
            return original(cls, source, **kwargs)
        config = given if isinstance(given, MarlinConfig) else MarlinConfig(**loading_defaults())
        own: dict[str, Any] = {"quantization_config": config}
        if isinstance(given, THEIRS):
            config.modules_to_not_convert = getattr(given, "modules_to_not_convert", None)
            if all(kwargs.get(name) is None for name in ("dtype", "torch_dtype")):
                own["torch_dtype"] = given.compute_dtype
        try:
            with spelled(as_config):
                inside = COMFY_PREFIX if any(name.startswith(COMFY_PREFIX) for name in reader.layer_names) else ""
                return original(cls, stand_ins(reader, inside), **kwargs | own)
        except (UnsupportedFormat, RowError) as error:
            if not isinstance(given, THEIRS):
                raise
            refusal = error.with_traceback(None)  # the traceback would keep the first attempt's model in memory
        logger.warning(f"{OP}: diffusers loads {source} without torch_marlin_metal, because: {refusal}")
        return original(cls, source, **kwargs)

    wrapped: Any = from_single_file
    FromOriginalModelMixin.from_single_file = classmethod(wrapped)
    _take_pipelines()


def _take_pipelines() -> None:
    original: Any = FromSingleFileMixin.from_single_file.__func__

    @functools.wraps(original)
    def from_single_file(cls: Any, pretrained_model_link_or_path: Any, **kwargs: Any) -> Any:
        path = os.fspath(pretrained_model_link_or_path)
        reader = _open(path, None, kwargs)
        if reader is not None and not any(name.startswith("text_encoder") for name in kwargs):
            _check_text_encoders(path, reader)
        before = PIPELINE_FILE.set(path if reader is not None else None)
        try:
            return original(cls, pretrained_model_link_or_path, **kwargs)
        finally:
            PIPELINE_FILE.reset(before)

    wrapped: Any = from_single_file
    FromSingleFileMixin.from_single_file = classmethod(wrapped)


def _check_text_encoders(path: str, reader: CheckpointReader) -> None:
    """Raises an error for text encoders with scales, because diffusers would load their codes without the scales."""
    scales = (name for name in reader.tensor_files() if "weight" in name.rpartition(".")[2] and "scale" in name)
    if lost := next((name for name in scales if name.startswith(TEXT_ENCODERS)), None):
        raise CheckpointError(
            f"{OP}: {path}: expected text encoders without scales, got {lost!r}, which diffusers would ignore: pass "
            f"the text encoders, {OP}(..., text_encoder=..., text_encoder_2=T5EncoderModel.from_pretrained(...))"
        )


def _open(source: str, given: Any, kwargs: dict[str, Any]) -> CheckpointReader | None:
    """Opens a local file or the downloaded copy of a file on the Hub. Returns None for files without packed weights."""
    if not source.endswith(READ):
        return None
    path = source
    if not os.path.isfile(source):
        repository, name = files._extract_repo_id_and_weights_name(source)
        chosen = {key: kwargs.get(key) for key in DOWNLOAD}
        path = files._get_model_file(repository, weights_name=name, **chosen)
    options = (given if isinstance(given, MarlinConfig) else MarlinConfig(**loading_defaults())).read_options()
    try:
        return open_reader(path, options, gguf_names="gguf")
    except NotQuantized:
        return None
    except CheckpointError as error:
        if isinstance(given, MarlinConfig):
            raise
        logger.warning(f"{OP}: diffusers loads {source} without torch_marlin_metal, because: {error}")
        return None
