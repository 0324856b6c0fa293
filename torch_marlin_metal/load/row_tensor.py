"""Placeholders for a file's packed weights, for functions of other libraries that rename, split and join tensors.

A library converts the original files of a model with such functions. The functions may split and reorder rows, for
example if the file stores projections in one matrix and the library in three. The placeholders record row numbers of
the file, so the functions run unchanged and without weights in memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.files.safetensors import FLOAT8
from torch_marlin_metal.checkpoints.reader import CheckpointReader

_aten = torch.ops.aten
SAME = (_aten.detach.default, _aten.alias.default, _aten.clone.default)
ALONG_ROWS = (
    *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.slice.Tensor),
    *(_aten.index_select.default, _aten.cat.default),
)


class RowError(ValueError):
    """A function applied to a packed weight an operation that does more than select rows."""


@dataclass(frozen=True)
class RowTable:
    """The rows of all packed layers in a checkpoint, numbered consecutively.

    Attributes:
        reader: reads the layers to which the rows belong.
        starts: the number of the first row of each layer, followed by the total number of rows.
    """

    reader: CheckpointReader
    starts: Tensor

    def runs(self, rows: Tensor) -> Iterator[tuple[int, slice | Tensor]]:
        """Yields (index of a layer, row numbers in the layer) for each run of rows that come from the same layer."""
        layers = torch.bucketize(rows, self.starts, right=True) - 1
        indexes, counts = torch.unique_consecutive(layers, return_counts=True)
        for index, part in zip(indexes.tolist(), torch.split(rows, counts.tolist()), strict=True):
            own = part - self.starts[index]
            first = int(own[0])
            in_order = torch.equal(own, torch.arange(first, first + len(own), device=own.device))
            yield index, slice(first, first + len(own)) if in_order else own


class RowTensor(Tensor):
    """A matrix `[N, K]` without values. `rows` are the numbers of its rows in `table`."""

    rows: Tensor
    table: RowTable

    @classmethod
    def of(cls, rows: Tensor, K: int, table: RowTable) -> "RowTensor":
        """Makes the placeholder for some rows."""
        make: Any = Tensor._make_wrapper_subclass
        made: RowTensor = make(cls, (len(rows), K), dtype=torch.float32, device="cpu")
        made.rows, made.table = rows, table
        return made

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"RowTensor({list(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        given = next(iter(named.values()))
        parts = given if isinstance(given, list | tuple) else [given]
        first = parts[0]
        fits = all(isinstance(part, cls) and part.shape[1] == first.shape[1] for part in parts)
        if fits and func in SAME:
            return cls.of(first.rows, first.shape[1], first.table)
        if not fits or func not in ALONG_ROWS or named.get("dim", 0) not in (0, -2):
            raise RowError(
                f"{func} of packed weights {', '.join(str(list(part.shape)) for part in parts)}: expected a choice of "
                "rows, or an order of rows, since their columns share words and scales"
            )
        rows = [part.rows for part in parts] if isinstance(given, list | tuple) else first.rows
        made = func(rows, *args[1:], **{name: 0 if name == "dim" else value for name, value in (kwargs or {}).items()})
        if isinstance(made, Tensor):
            return cls.of(made, first.shape[1], first.table)
        return [cls.of(part, first.shape[1], first.table) for part in made]


def stand_ins(reader: CheckpointReader, inside: str = "") -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint by name, with placeholders for the weights of packed layers.

    All other tensors are read, and 8-bit floats are converted to bf16 without loss. Tensors whose
    names do not start with `inside` are omitted.
    """
    sizes = [reader.sizes(index) for index in range(len(reader))]
    starts = torch.tensor([0, *accumulate(N for N, _ in sizes)], device="cpu")
    table = RowTable(reader, starts)
    state: dict[str, Tensor] = {}
    for index, name in enumerate(reader.layer_names):
        if not name.startswith(inside):
            continue
        rows = torch.arange(int(starts[index]), int(starts[index + 1]), device="cpu")
        state[reader.weight_name(index)] = RowTensor.of(rows, sizes[index][1], table)
        if (bias := reader.bias(index)) is not None:
            state[f"{name}.bias"] = bias
    for name, read, dtype in reader.others():
        if not name.startswith(inside):
            continue
        state[name] = read().view(FLOAT8[dtype]).bfloat16() if dtype in FLOAT8 else read()
    return state


def has_stand_ins(state: Mapping[str, Tensor]) -> bool:
    return any(isinstance(tensor, RowTensor) for tensor in state.values())
