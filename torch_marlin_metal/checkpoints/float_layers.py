"""Finds the layers of an unquantized checkpoint that can be quantized: matrices and the experts of mixtures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint
from torch_marlin_metal.checkpoints.errors import CheckpointError
from torch_marlin_metal.checkpoints.layer_tensors import FLOATS
from torch_marlin_metal.checkpoints.model_names import ModelNames
from torch_marlin_metal.checkpoints.options import typed
from torch_marlin_metal.layers.embedding import why_not_embedding
from torch_marlin_metal.layers.experts_equivalence import why_unknown
from torch_marlin_metal.layers.float_experts import PARTS, SPLIT, WEIGHTS, find_module, is_experts, stores_transposed
from torch_marlin_metal.layers.stays import staying_layers
from torch_marlin_metal.layers.vocabulary import vocabulary_of
from torch_marlin_metal.patterns import NameFilter, check_patterns, selects
from torch_marlin_metal.quantize.recipe import IN_FLOATS

SMALLEST = 8  # minimum rows and columns of a matrix; smaller tensors are tables or vectors


@dataclass(frozen=True)
class FloatLayer:
    """A matrix in a checkpoint of floats that could be quantized.

    Attributes:
        name: the layer's name in the checkpoint.
        weight: the name of the tensor that holds the matrix.
        K: the number of columns of the matrix `[N, K]`.
        nbytes: the bytes of the matrix.
        bias: the name of the tensor with the layer's bias, or "".
        index: the position of the matrix if the tensor is a stack of matrices, else None.
        transposed: True if the tensor stores the matrix as `[K, N]`.
        experts: if an experts module owns the matrix, the module's name in the model, else "".
        group: if an experts module owns the matrix, the module's name in the checkpoint, else "".
        is_vocabulary: True if the matrix is an embedding of the vocabulary or an output layer.
        is_output: True if the matrix is an output layer, or an embedding that the model ties to its output layer.
    """

    name: str
    weight: str
    K: int
    nbytes: int
    bias: str
    index: int | None = None
    transposed: bool = False
    experts: str = ""
    group: str = ""
    is_vocabulary: bool = False
    is_output: bool = False

    @property
    def partner(self) -> str:
        """Returns the name of an expert's up layer for its gate layer and vice versa, and "" for other layers."""
        owner, _, part = self.name.rpartition(".")
        for gate, up, _ in PARTS if self.experts and self.index is None else ():
            if part in (gate, up):
                return f"{owner}.{up if part == gate else gate}"
        return ""

    def selected(self, choice: NameFilter | None) -> bool:
        """Returns True if a filter selects the layer or its experts module."""
        return selects(choice, self.name) or (bool(self.group) and selects(choice, self.group))


class FloatModel:
    """A transformers model on the meta device, which maps layer names of a checkpoint to names of the model.

    Args:
        model: a transformers model on the meta device.
        vocabulary_format: see `FloatReader`.

    Attributes:
        words: the model's names of embeddings and output layers that are packed as parts of the vocabulary.
        heads: the model's names of output layers.
        default: the model's names of the layers that are quantized if no filter is given.
        lookups: the model's names of embeddings and convolutions.
    """

    def __init__(self, model: Any, vocabulary_format: str | None) -> None:
        self.model, self._names = model, ModelNames(model)
        modules, staying = dict(model.named_modules()), staying_layers(model)
        by_id = {id(module): module for module in modules.values()}
        tables, heads = vocabulary_of(model, vocabulary_format)
        tables = {table for table in tables if not why_not_embedding(by_id[table])}
        words = tables if vocabulary_format == IN_FLOATS else tables | heads
        self.words = {name for name, module in modules.items() if id(module) in words}
        self.heads = {name for name, module in modules.items() if id(module) in heads}
        self.default = self.words | {
            name
            for name, module in modules.items()
            if type(module) is nn.Linear
            and id(module) not in staying
            and (id(module) in words or id(module) not in heads)
        }
        self.lookups = {
            name for name, module in modules.items() if isinstance(module, (nn.Embedding, nn.modules.conv._ConvNd))
        }

    def name_of(self, name: str) -> str:
        """Returns the model's name for a layer of the checkpoint."""
        return self._names.layer(name)

    def with_experts(self, checkpoint: Checkpoint, layers: list[FloatLayer]) -> list[FloatLayer]:
        """Adds the matrices of stacked experts, and sets the name of the experts module in each layer of an expert.

        Experts are quantized only if the checkpoint has all layers of their module, because the model can pack a module
        only as a unit.
        """
        found = []
        for layer in layers:
            named = self._names.experts.find(self._names.layer(layer.name)) if SPLIT.fullmatch(layer.name) else None
            if named is not None:
                layer = replace(layer, experts=named[0], group=layer.name.rsplit(".", 2)[0])
            found.append(layer)
        for info in checkpoint.in_order():
            if len(info.shape) == 3 and info.dtype in FLOATS:
                found += self._stack(checkpoint, info)
        counts = Counter(layer.experts for layer in found if layer.experts)
        parts = {layer.experts: 3 if layer.index is None else 2 for layer in found}
        modules = {name: self.model.get_submodule(name) for name in counts}
        stay = {
            name
            for name, module in modules.items()
            if counts[name] != parts[name] * len(module.down_proj) or why_unknown(module)
        }
        return [layer for layer in found if layer.experts not in stay]

    def _stack(self, checkpoint: Checkpoint, info: Any) -> list[FloatLayer]:
        """Returns the layers of a tensor of stacked experts, or an empty list for any other tensor."""
        owner, _, kind = self._names.tensor(info.name).rpartition(".")
        module: Any = find_module(self.model, owner)
        if kind not in WEIGHTS or not is_experts(module) or self._names.is_converted(info.name):
            return []
        if info.shape != tuple(module._parameters[kind].shape):
            return []
        transposed = stores_transposed(module)
        E, K = info.shape[0], info.shape[1 if transposed else 2]
        if K % 8 or not info.nbytes:
            return []
        bias = f"{info.name}_bias" if f"{info.name}_bias" in checkpoint.tensors else ""
        group = info.name.rpartition(".")[0]
        return [
            FloatLayer(f"{info.name}.{index}", info.name, K, info.nbytes // E, bias, index, transposed, owner, group)
            for index in range(E)
        ]


def choose_layers(
    checkpoint: Checkpoint, include: NameFilter | None, exclude: NameFilter, vocabulary_format: str | None
) -> tuple[list[FloatLayer], dict[str, int]]:
    """Returns the layers to quantize, and the bytes of each selected matrix that stays in floats, by name.

    Args:
        checkpoint: a checkpoint of floats.
        include: see `FloatReader`.
        exclude: see `FloatReader`.
        vocabulary_format: see `FloatReader`.

    Raises:
        ValueError: a pattern matches nothing, no layer is left, or only some experts of a mixture are selected.
        CheckpointError: the checkpoint has no layer to quantize, or its model is unknown to transformers.
    """
    wanted, model = [_matrix(checkpoint, name) for name in matrices(checkpoint)], None
    advice = f"name the layers to quantize ({typed('include')})"
    try:
        empty = empty_model(checkpoint.path, checkpoint.config.get("architectures"), advice)
        model = FloatModel(empty, vocabulary_format)
    except CheckpointError:
        if include is None:
            raise
    if model is not None:
        wanted = model.with_experts(checkpoint, wanted)
        heads = {layer.name for layer in wanted if model.name_of(layer.name) in model.heads}
        words = {layer.name for layer in wanted if model.name_of(layer.name) in model.words}
        outputs = heads or words
        wanted = [
            replace(layer, is_vocabulary=layer.name in words, is_output=layer.name in outputs) for layer in wanted
        ]
    names = [*(layer.name for layer in wanted), *{layer.group for layer in wanted if layer.group}]
    check_patterns(str(checkpoint.path), names, include=include, exclude=exclude)
    if include is None:
        assert model is not None
        chosen = [layer for layer in wanted if layer.experts or model.name_of(layer.name) in model.default]
        if not chosen:
            raise CheckpointError(f"{checkpoint.path}: none of its {len(wanted)} matrices is to be quantized")
    else:
        chosen = [layer for layer in wanted if layer.selected(include)]
    chosen = [layer for layer in chosen if not layer.selected(exclude)]
    if not chosen:
        raise ValueError(
            f"{checkpoint.path}: {typed('include')}, {typed('exclude')}: they leave none of its {len(wanted)} matrices"
        )
    _check_whole(checkpoint, wanted, chosen)
    left = _matrix_bytes(checkpoint)
    settled = {*(layer.weight for layer in chosen), *(layer.weight for layer in wanted if layer.selected(exclude))}
    for name in list(left):
        lookup = include is None and model is not None and model.name_of(name) in model.lookups
        unasked = selects(exclude, name) or not (include is None or selects(include, name))
        if lookup or unasked or not settled.isdisjoint((name, f"{name}.weight")):
            del left[name]
    return chosen, left


def layers_by_module(model: Any, checkpoint: Checkpoint) -> dict[str, list[FloatLayer]]:
    """Groups a checkpoint's matrices by the layer or experts module that owns them in the model."""
    known = FloatModel(model, None)
    found: dict[str, list[FloatLayer]] = {}
    for layer in known.with_experts(checkpoint, [_matrix(checkpoint, name) for name in matrices(checkpoint)]):
        found.setdefault(layer.experts or known.name_of(layer.name), []).append(layer)
    return found


def read_matrix(checkpoint: Checkpoint, layer: FloatLayer) -> Tensor:
    """Reads the weight `[N, K]` of a layer."""
    matrix = checkpoint.read(layer.weight, layer.index)
    return matrix.T.contiguous() if layer.transposed else matrix


def _matrix(checkpoint: Checkpoint, name: str) -> FloatLayer:
    info, bias = checkpoint.tensors[f"{name}.weight"], f"{name}.bias"
    return FloatLayer(name, info.name, info.shape[1], info.nbytes, bias if bias in checkpoint.tensors else "")


def _check_whole(checkpoint: Checkpoint, wanted: list[FloatLayer], chosen: list[FloatLayer]) -> None:
    every, taken = (Counter(layer.group for layer in layers if layer.group) for layers in (wanted, chosen))
    for group, count in taken.items():
        if count != every[group]:
            choice = f"{typed('include')}, {typed('exclude')}"
            raise ValueError(
                f"{checkpoint.path}: {choice}: expected all layers of the experts {group!r} or none, they leave "
                f"{count} of {every[group]}"
            )


def matrices(checkpoint: Checkpoint) -> list[str]:
    """Returns the names of layers whose float `weight` can be packed, in the order of the files."""
    return [
        info.name.removesuffix(".weight")
        for info in checkpoint.in_order()
        if info.name.endswith(".weight") and len(info.shape) == 2 and info.dtype in FLOATS
        if info.shape[0] and info.shape[1] and info.shape[1] % 8 == 0
    ]


def is_matrix(shape: Sequence[int]) -> bool:
    """Returns True for the shape of a matrix or of a stack of several matrices."""
    stacked = len(shape) == 3 and shape[0] > 1
    return (len(shape) == 2 or stacked) and min(shape[-2:]) >= SMALLEST


def _matrix_bytes(checkpoint: Checkpoint) -> dict[str, int]:
    """Returns the bytes of each float matrix or stack of matrices, keyed by the tensor's name without ".weight"."""
    return {
        name.removesuffix(".weight"): info.nbytes
        for name, info in checkpoint.tensors.items()
        if info.dtype in FLOATS and is_matrix(info.shape)
    }


def empty_model(path: Path, stated: Any, advice: str) -> Any:
    """Makes the transformers model that a config.json names, on the meta device. Runs no code from the checkpoint.

    Args:
        path: a directory with config.json, or the file config.json.
        stated: the names under "architectures" in config.json.
        advice: what to do instead, for the error message.

    Raises:
        CheckpointError: transformers is not installed, does not know the model, or fails to make the model.
    """
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(f"{path}: without transformers its layers are not known: {advice}") from error
    architecture = stated[0] if isinstance(stated, list) and stated else ""
    model_class = getattr(transformers, str(architecture), None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise CheckpointError(f"{path}: transformers knows no model {stated!r}: {advice}")
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            return model_class(config)
    except Exception as error:  # wrong settings can raise any exception in the model's own code
        raise CheckpointError(f"{path}: {architecture} cannot be made of it ({error}): {advice}") from error
