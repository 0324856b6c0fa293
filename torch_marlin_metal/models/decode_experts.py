"""Decodes the experts of a mixture into the stacked parameters of the model's own module."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.reader import DenseWeight
from torch_marlin_metal.layers.experts import StackError
from torch_marlin_metal.layers.float_experts import WEIGHTS, stores_transposed
from torch_marlin_metal.models.experts import ExpertLayers
from torch_marlin_metal.packed_weight import PackedWeight


def decode_experts(
    layers: ExpertLayers, read: Callable[[str], PackedWeight | DenseWeight], dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, values) for each parameter of the model's own experts module.

    Args:
        layers: describes the experts module.
        read: returns the weight of the layer with the given name.
        dtypes: name of a parameter -> its dtype.

    Raises:
        StackError: a weight does not have the size of the model's experts.
    """
    for number, (name, shape) in enumerate(zip(WEIGHTS, layers.shapes, strict=True)):
        transposed = stores_transposed(layers.gate_module)
        sizes = (shape.K, shape.N) if transposed else (shape.N, shape.K)
        stack = torch.empty(layers.count, *sizes, dtype=dtypes[name], device="cpu")
        values = stack.mT if transposed else stack
        biases = (
            None
            if shape.bias is None
            else torch.empty(layers.count, shape.N, dtype=dtypes[f"{name}_bias"], device="cpu")
        )
        for index in range(layers.count):
            parts = [read(part) for part in layers.names(index)[number]]
            rows = layers.join(number, [part.dequantize(dtypes[name]) for part in parts]).T
            given = [part.bias for part in parts if part.bias is not None]
            if rows.shape != values[index].shape or len(given) != (0 if biases is None else len(parts)):
                raise StackError(
                    f"expected a weight of [{shape.N}, {shape.K}] {'without' if biases is None else 'with'} a bias "
                    f"for {name} of expert {index}, got {list(rows.shape)} and {len(given)} biases"
                )
            values[index] = rows
            if biases is not None:
                biases[index] = layers.join(number, given)
        yield name, stack
        if biases is not None:
            yield f"{name}_bias", biases
