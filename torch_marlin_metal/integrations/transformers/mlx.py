"""Makes transformers undo mlx-lm's changes of names and values."""

from typing import Any

from torch import Tensor
from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter, WeightRenaming

from torch_marlin_metal.checkpoints.directory import DirectoryReader
from torch_marlin_metal.checkpoints.formats import mlx_names
from torch_marlin_metal.checkpoints.reader import CheckpointReader


class _Shift(ConversionOps):  # type: ignore[misc]
    def __init__(self, by: float) -> None:
        self._by = by

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Tensor]:
        named = {name: held[0] if isinstance(held, list) else held for name, held in input_dict.items()}
        return {name: value - self._by if value.dim() == 1 else value for name, value in named.items()}


def changes_back(reader: CheckpointReader) -> list[Any]:
    """Returns transformers' conversions for a directory that mlx-lm wrote, or [] for other checkpoints."""
    if not isinstance(reader, DirectoryReader) or reader.format.hf_name is not mlx_names.hf_name:
        return []
    names = [name for name in reader.tensor_files() if name.endswith(".weight")]
    changes: list[Any] = [WeightRenaming(pattern, new) for pattern, new in mlx_names.prefixes(reader.checkpoint)]
    for ending in mlx_names.CONVOLUTIONS:
        if any(name.endswith(ending) for name in names):
            changes.append(WeightConverter(ending, ending, [Transpose(1, 2, check_dims=True)]))
    for ending in mlx_names.SHIFTED:
        by = mlx_names.shift(reader.checkpoint, ending)
        if by and any(name.endswith(ending) for name in names):
            changes.append(WeightConverter(ending.lstrip("."), ending.lstrip("."), [_Shift(by)]))
    return changes
