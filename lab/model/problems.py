"""Describes the products that the model can predict, and the ways to compute them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.model import geometry
from lab.model.geometry import CODE_TYPES, ELEMENT_BYTES, SUPER_BLOCK, ceil_divide
from torch_marlin_metal.formats import WEIGHT_FORMATS, WeightFormat

Ints = int | NDArray[np.int64]
# The variants that "auto" can choose whatever the number of rows is. Two variants are missing: "two_pass" rounds the
# weights, and "tensor" computes 32 rows even if there are fewer.
AUTOMATIC = ("gemv", "fused", "double_buffered", "single_stage", "striped")


@dataclass(frozen=True)
class Problem:
    """A product of activations `[M, K]` with a weight of one of the product's formats.

    Attributes:
        M: rows of the activations.
        N: columns of the weight.
        K: rows of the weight, a multiple of 8.
        weight_format: name of the weight's format; its traits are those of `torch_marlin_metal.WEIGHT_FORMATS`.
        group_size: group size of the weight; a size larger than K means K.
        activations: "float16", "bfloat16" or "float32".
        scales: dtype of the scales. None means the dtype of the activations, or a byte if the format stores its scales
            as codes. For a format with floating scales, "uint8" and "int8" mean scales of two levels: codes that super
            scales multiply.
        zeros: dtype of zero points or biases, ignored if the format has neither. None means a byte for zero points, and
            the dtype of the scales for biases.
        super_scales: dtype of the super scales of scales of two levels.
        has_perm: whether the weight has an act-order permutation.
    """

    M: int
    N: int
    K: int
    weight_format: str = "uint4b8"
    group_size: int = 128
    activations: str = "float16"
    scales: str | None = None
    zeros: str | None = None
    super_scales: str = "float16"
    has_perm: bool = False

    @cached_property
    def traits(self) -> WeightFormat:
        return WEIGHT_FORMATS[self.weight_format]

    @property
    def group(self) -> int:
        """Returns the group size, at most K."""
        return min(self.group_size, self.K)

    @property
    def scales_type(self) -> str:
        return "uint8" if self.traits.has_coded_scales else self.scales or self.activations

    @property
    def zeros_type(self) -> str:
        """Returns the dtype of zero points or biases."""
        return self.zeros or ("uint8" if self.traits.zeros_role == "zero_point" else self.scales_type)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.activations]

    @cached_property
    def weight_bytes(self) -> float:
        """Returns the bytes of the weight with its scales, zero points and permutation."""
        per_group = ELEMENT_BYTES[self.scales_type]
        per_block = ELEMENT_BYTES[self.super_scales] if self.has_two_levels else 0
        if self.traits.zeros_role != "none":
            per_group += ELEMENT_BYTES[self.zeros_type]
        if self.traits.zeros_role == "bias" and self.zeros_type in CODE_TYPES:
            per_block += ELEMENT_BYTES[self.super_scales]
        codes = self.traits.code_bits / 8 * self.K * self.N
        of_scales = -(-self.K // self.group) * per_group + -(-self.K // SUPER_BLOCK) * per_block
        return codes + of_scales * self.N + (4 * self.K if self.has_perm else 0)

    @property
    def has_two_levels(self) -> bool:
        """Returns whether scales are codes that super_scales multiply."""
        return not self.traits.has_coded_scales and self.scales_type in CODE_TYPES

    @property
    def has_tensor_kernel(self) -> bool:
        """Returns whether a kernel for tensor units supports these operands."""
        return not self.traits.has_lut and self.activations != "float32"


@dataclass(frozen=True)
class ExpertsProblem:
    """The products of tokens with the weights of their experts. A pair is a token and one of its slots.

    Attributes:
        product: the product with one expert's weight; its M is the number of pairs.
        experts: number of experts.
        top_k: experts of each token.
        rows_by_slot: whether each slot of a token has its own row, as in the second product of a layer.
        reduce: whether the products of a token are added up.
        has_row_weights: whether each product is multiplied by a weight of its row.
        has_bias: whether a bias is added.
        wide_ids: whether expert ids have 8 bytes, otherwise 4.
    """

    product: Problem
    experts: int
    top_k: int = 1
    rows_by_slot: bool = False
    reduce: bool = False
    has_row_weights: bool = False
    has_bias: bool = False
    wide_ids: bool = True

    @classmethod
    def of_tokens(
        cls, tokens: int, top_k: int, experts: int, N: int, K: int, *, reduce: bool = False,
        rows_by_slot: bool = False, **weight: object,
    ) -> ExpertsProblem:  # fmt: skip
        """Returns the problem of a number of tokens. With `reduce`, the products have row weights, too.

        Args:
            tokens: number of tokens.
            top_k: experts of each token.
            experts: number of experts.
            N: columns of an expert's weight.
            K: rows of an expert's weight.
            reduce: whether the products of a token are added up.
            rows_by_slot: whether each slot of a token has its own row.
            weight: further arguments of `Problem`. By default, zero points have the dtype of the activations.
        """
        fields = {"zeros": weight.get("activations", "float16"), **weight}
        product = Problem(tokens * top_k, N, K, **fields)  # type: ignore[arg-type]
        return cls(product, experts, top_k, rows_by_slot, reduce, has_row_weights=reduce)

    @property
    def tokens(self) -> int:
        return self.product.M // self.top_k

    @property
    def combines_products(self) -> bool:
        """Returns whether products are multiplied by row weights or added up."""
        return self.reduce or self.has_row_weights


@dataclass(frozen=True)
class Tiling:
    """One way to compute a product: a tile of a variant, and how K and the rows are divided.

    The numbers may be arrays of the same length, so that the model evaluates many tilings at once.

    Attributes:
        variant: the kernel variant, as `gemm(variant=)` names it.
        kernel: the kernel's name.
        tile: M, N and K of a threadgroup's step; (0, 0, 0) in two_pass.
        stages: copies of the tile's operands in threadgroup memory; 0 if none are staged.
        simdgroups: simdgroups of a threadgroup.
        k_per_slice: the K that is summed by a simdgroup (gemv, fused), a threadgroup (staged, tensor) or a unit
            (striped).
        splits: number of threadgroups that share a tile's K. If there are several, each writes partial sums.
        rest_rows: in fused, the rows of a smaller last block; 0 if the last block is padded to the full number of rows.
        stripes: in striped, the number of threadgroups.
        stripes_share_tiles: in striped, whether several stripes share the K of a tile and write partial sums.
    """

    variant: str
    kernel: str
    tile: tuple[int, int, int]
    stages: int = 0
    simdgroups: Ints = 0
    k_per_slice: Ints = 0
    splits: Ints = 1
    rest_rows: int = 0
    stripes: int = 0
    stripes_share_tiles: bool = False

    @property
    def name(self) -> str:
        """Returns the text that selects the variant and tile in `gemm(variant=)`."""
        return self.variant if self.tile == (0, 0, 0) else f"{self.variant}:{'x'.join(map(str, self.tile))}"

    @property
    def sorts_pairs(self) -> bool:
        """Returns whether moe_sort first divides the pairs of a product with experts into blocks of rows."""
        return self.kernel not in ("moe_gemv", "moe_gemv_reduce")

    def threadgroup_bytes(self, problem: Problem, rows: int) -> Any:
        """Returns the bytes of threadgroup memory if a threadgroup computes `rows` rows."""
        return geometry.threadgroup_bytes(self.variant, self.tile, self.stages, self.simdgroups, problem, rows)

    def row_blocks(self, M: int) -> list[tuple[int, int, int]]:
        """Returns (first row, rows of a block, number of blocks) of each launch."""
        rows = self.tile[0]
        if self.rest_rows == 0:
            return [(0, rows, ceil_divide(M, rows))]
        return [(0, rows, M // rows), (M - M % rows, self.rest_rows, 1)]

    def __len__(self) -> int:
        return 1 if np.ndim(self.splits) == 0 else len(self.splits)  # type: ignore[arg-type]

    def at(self, index: int) -> Tiling:
        """Returns the tiling at an index of the arrays, with plain numbers."""
        if np.ndim(self.splits) == 0:
            return self
        columns = (np.broadcast_to(column, len(self)) for column in (self.simdgroups, self.k_per_slice, self.splits))
        simdgroups, k_per_slice, splits = (int(column[index]) for column in columns)
        return replace(self, simdgroups=simdgroups, k_per_slice=k_per_slice, splits=splits)

    def each(self) -> list[Tiling]:
        """Returns the tilings one by one, without duplicates, because rounding to whole steps can make some equal."""
        return list(dict.fromkeys(self.at(index) for index in range(len(self))))
