"""A checkpoint directory: its configuration, its tensors by name, and a reader for single tensors."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.errors import CheckpointError, NotQuantized, UnsupportedFormat
from torch_marlin_metal.checkpoints.files.regular import regular_file
from torch_marlin_metal.checkpoints.files.safetensors import DTYPES, FLOAT8, Slice, TensorInfo, read_header, read_tensor
from torch_marlin_metal.checkpoints.options import typed
from torch_marlin_metal.checkpoints.settings import (
    COMFY_MARK,
    COMFY_METADATA,
    COMFY_METHOD,
    COMFY_TENSOR,
    CONFIG,
    CONFIG_FILES,
    CONFIG_KEYS,
    Settings,
    find_settings,
    names_no_layer,
    read_config,
)

MAX_NAME = 255  # longest file name, in characters, that an error message shows
SAFETENSORS_NAMES = ("model", "diffusion_pytorch_model", "adapter_model")
PLAIN_NAME = re.compile(r"[^/\\\x00-\x1f]+")
DTYPE_NAMES = {dtype: name for name, (_, dtype) in reversed(DTYPES.items())}


@dataclass
class Checkpoint:
    """An opened directory whose tensor data has not been read yet."""

    path: Path
    config: dict[str, Any]
    settings: Settings
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    loaded: dict[str, Tensor]
    ahead: dict[str, Tensor] = field(default_factory=dict)  # tensors already read for the layer under conversion

    def read(self, name: str, index: int | None = None, part: Slice | None = None) -> Tensor:
        """Reads a tensor, its entry `[index]` of the first dimension, or the slice `part` of the tensor or entry."""
        if name in self.loaded:
            tensor = self.loaded[name]
            if part is not None:
                whole = tensor if index is None else tensor[index]
                return whole.narrow(part.axis, part.start, part.stop - part.start).clone()
            # A complete tensor is not copied, because tensors of a pickle may share memory, and copies would not.
            return tensor.contiguous() if index is None else tensor[index].clone(memory_format=torch.contiguous_format)
        if index is None and part is None and name in self.ahead:
            return self.ahead.pop(name)
        return read_tensor(self.tensors[name], index, part)

    def in_order(self) -> list[TensorInfo]:
        """Returns the tensors in the order of the files."""
        return sorted(self.tensors.values(), key=lambda info: (info.file.name, info.offset))

    def error(self, name: str, message: str) -> CheckpointError:
        """Makes an error whose message names the tensor and its file."""
        return CheckpointError(f"{self.tensors[name].file}: tensor {name!r}: {message}")


def open_checkpoint(path: Path, allow_pickle: bool = False, quantized: bool = True) -> Checkpoint:
    """Opens a checkpoint directory: reads its configuration and the headers of its tensor files.

    Args:
        path: a directory with config.json and safetensors files (or, if allowed, PyTorch pickles), or a single
            safetensors file whose tensors or metadata show the quantization settings.
        allow_pickle: also read `*.bin` and `*.pt` files, with `torch.load(weights_only=True)`.
        quantized: True to require quantization settings in the configuration, False to refuse them.

    Raises:
        CheckpointError: a file is missing, is damaged or points outside the directory.
    """
    config_file = path / CONFIG
    config = read_config(config_file) if config_file.exists() else {}
    settings = find_settings(path, config)
    if quantized and settings is None:
        settings = _settings_of_file(path)
    if quantized and settings is None:
        raise NotQuantized(
            f"{path}: no quantization settings: neither config.json with {' or '.join(CONFIG_KEYS)} nor one of "
            f"{', '.join(CONFIG_FILES)}"
        )
    # An older version of this package wrote quantization settings even if no layer was packed. Such a checkpoint counts
    # as one of floats.
    no_layers = settings is not None and names_no_layer(settings)
    if not quantized and settings is not None and not no_layers:
        raise CheckpointError(f"{settings.file}: expected a checkpoint of floats, got one with quantization settings")
    checkpoint = Checkpoint(path, config, settings or Settings(config_file, {}), {}, {}, {})
    files, mapping = _tensor_files(path, allow_pickle)
    for file in files:
        if file.suffix == ".safetensors":
            tensors, metadata = read_header(file)
        else:
            tensors, metadata = _load_pickle(file, checkpoint.loaded), {}
        for name, info in tensors.items():
            if name in checkpoint.tensors:
                raise CheckpointError(f"{file}: tensor {name!r} is also in {checkpoint.tensors[name].file}")
            checkpoint.tensors[name] = info
        checkpoint.metadata |= metadata
    for name, file in mapping.items():
        if name not in checkpoint.tensors or checkpoint.tensors[name].file != file:
            raise CheckpointError(f"{file}: tensor {name!r} is missing, though the index places it in this file")
    if quantized and no_layers and not any(name.endswith(".b_packed") for name in checkpoint.tensors):
        raise NotQuantized(f"{path}: its quantization settings name no layer, and its tensors are floats")
    return checkpoint


def _settings_of_file(path: Path) -> Settings | None:
    found = [path] if path.is_file() else list(path.glob("*.safetensors"))
    if len(found) != 1:
        return None
    tensors, metadata = read_header(regular_file(found[0]))
    marks = (COMFY_MARK, COMFY_TENSOR)
    if COMFY_METADATA in metadata or any(name.rpartition(".")[2] in marks for name in tensors):
        return Settings(found[0], {"quant_method": COMFY_METHOD})
    if not path.is_file():  # the settings file is missing, and the tensors may not show all settings
        return None
    if any(name.endswith(".weight_scale_2") for name in tensors):
        return Settings(path, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    matrices = (info.dtype for name, info in tensors.items() if name.endswith(".weight") and len(info.shape) == 2)
    return Settings(path, {"quant_method": COMFY_METHOD}) if not FLOAT8.keys().isdisjoint(matrices) else None


def _tensor_files(path: Path, allow_pickle: bool) -> tuple[list[Path], dict[str, Path]]:
    """Returns the tensor files and, if there is an index file, a map from tensor name to file."""
    if path.is_file():
        return [regular_file(path)], {}
    for base in SAFETENSORS_NAMES:
        if (path / f"{base}.safetensors").exists():
            return [regular_file(path / f"{base}.safetensors")], {}
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if not indexes and allow_pickle:
        indexes = sorted(path.glob("*.bin.index.json"))
    if len(indexes) > 1:
        raise CheckpointError(f"{path}: expected one index, found {', '.join(index.name for index in indexes)}")
    if indexes:
        mapping = _read_index(path, indexes[0], allow_pickle)
        return sorted(set(mapping.values())), mapping
    found = sorted(path.glob("*.safetensors"))
    if not found and allow_pickle:
        found = sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
    if len(found) == 1:
        return [regular_file(found[0])], {}
    if found:
        raise CheckpointError(f"{path}: an index file is needed to choose among {', '.join(f.name for f in found)}")
    if any(next(path.glob(pattern), None) for pattern in ("*.bin", "*.pt", "*.pth")):
        way = typed("allow_pickle", True)
        raise UnsupportedFormat(f"{path}: its tensors are pickles (.bin, .pt, .pth), read only with {way}")
    if next(path.glob("*.gguf"), None):
        raise CheckpointError(f"{path}: expected safetensors files; for GGUF give the path of the .gguf file itself")
    raise CheckpointError(f"{path}: no safetensors file")


def _read_index(path: Path, index: Path, allow_pickle: bool) -> dict[str, Path]:
    weight_map = read_config(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map: expected an object that maps tensors to files")
    suffixes = (".safetensors", ".bin") if allow_pickle else (".safetensors",)
    files: dict[str, Path] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not PLAIN_NAME.fullmatch(shard) or not shard.endswith(suffixes):
            raise CheckpointError(
                f"{index}: tensor {name!r}: expected the plain name of a {' or '.join(suffixes)} file beside the "
                f"index, got {shard!r}"
            )
        if shard not in files:
            if not os.path.exists(path / shard):  # False also for a name that the file system does not allow
                raise CheckpointError(f"{index}: tensor {name!r}: its shard {shard[:MAX_NAME]} is missing")
            files[shard] = regular_file(path / shard)
    return {name: files[shard] for name, shard in weight_map.items()}


def _load_pickle(file: Path, loaded: dict[str, Tensor]) -> dict[str, TensorInfo]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load can raise any exception if the bytes are damaged
        raise CheckpointError(f"{file}: not a PyTorch file of plain tensors ({type(error).__name__})") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise CheckpointError(f"{file}: expected a dictionary of named tensors")
    infos = {}
    for name, tensor in state.items():
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.dtype not in DTYPE_NAMES or tensor.device.type != "cpu":
            kind = f"{type(tensor).__name__} of {getattr(tensor, 'layout', '')} on {getattr(tensor, 'device', '')}"
            raise CheckpointError(f"{file}: {name!r}: expected a plain tensor, got {kind}")
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes > tensor.untyped_storage().nbytes():
            raise CheckpointError(
                f"{file}: {name!r}: expected {nbytes} bytes for {list(tensor.shape)}, the file holds "
                f"{tensor.untyped_storage().nbytes()}"
            )
        loaded[name] = tensor.detach()
        infos[name] = TensorInfo(name, file, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), 0, nbytes)
    return infos
