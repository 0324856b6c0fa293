"""The distinct products of a model, for which the tuner measures kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from torch_marlin_metal.checkpoints.directory import open_reader
from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.formats import NF4_VALUES, WEIGHT_FORMATS
from torch_marlin_metal.gpu.planning import GemmPlan, plan
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.quantize.weight import quantize_weight


@dataclass(frozen=True, order=True)
class Product:
    """A product of activations and a weight, for any number of activation rows.

    Attributes:
        N: columns of the weight.
        K: rows of the weight.
        weight_format: format of the weight.
        group_size: group size of the weight, as in the operators' arguments.
        dtype: dtype of the activations and of floating scales: "float16", "bfloat16" or "float32".

    Examples:
        >>> tmm.tuning.Product(N=4096, K=4096, weight_format="nvfp4", group_size=16).make_weight("cpu").N
        4096
    """

    N: int
    K: int
    weight_format: str = "uint4b8"
    group_size: int = 128
    dtype: str = "float16"

    def __str__(self) -> str:
        return f"{self.dtype} x {self.weight_format} g{self.group_size} [{self.K}, {self.N}]"

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def plan(self, M: int) -> GemmPlan:
        """Returns the plan for M rows, without choices from a tuning table."""
        return plan(
            M,
            self.N,
            self.K,
            weight_format=self.weight_format,
            group_size=self.group_size,
            dtype=self.torch_dtype,
            tuned=False,
        )

    def make_weight(self, device: str) -> PackedWeight:
        """Makes a weight with random codes on a device."""
        generator = torch.Generator().manual_seed(0)
        dense = torch.randn(self.N, self.K, generator=generator, device="cpu").to(self.torch_dtype) / self.K**0.5
        row = WEIGHT_FORMATS[self.weight_format]
        lut = torch.tensor(NF4_VALUES, device="cpu") if row.has_lut else None
        weight = quantize_weight(dense, self.weight_format, self.group_size, scale_dtype=self.torch_dtype, lut=lut)
        return weight.to(device)


def products_of(path: Path, dtype: str = "float16") -> list[Product]:
    """Returns the distinct products of a checkpoint, with the largest weight first.

    Args:
        path: a checkpoint directory or a .gguf file, like the argument of `convert.read_layers`.
        dtype: dtype of the activations when the model runs.

    Raises:
        CheckpointError: the checkpoint is damaged. Layers that cannot be read are omitted.

    Examples:
        >>> weight = tmm.quantize_weight(torch.randn(24, 64), "uint4", group_size=32, name="up")
        >>> _ = tmm.convert.export_checkpoint([weight], "products", "gptq")
        >>> import pathlib
        >>> [(product.N, product.K) for product in tmm.tuning.products_of(pathlib.Path("products"))]
        [(24, 64)]
    """
    reader = open_reader(path)
    found = set()
    for index in range(len(reader)):
        try:
            weight = reader.read(index)
        except UnsupportedFormat:
            continue
        assert isinstance(weight, PackedWeight)
        found.add(Product(weight.N, weight.K, weight.weight_format, weight.group_size, dtype))
    return sorted(found, key=lambda product: (-product.N * product.K, product))
