"""An embedding layer with a packed table."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.layers.packed_layer import options_of
from torch_marlin_metal.packed_weight import FLOAT_DTYPES, PackedWeight
from torch_marlin_metal.quantize.weight import quantize_weight

_embedding = torch.ops.torch_marlin_metal.embedding.default


class MarlinEmbedding(MarlinLinear):
    """`nn.Embedding` with a packed table, looked up by `torch.ops.torch_marlin_metal.embedding`.

    The table is stored like the weight of a `MarlinLinear` with K = `embedding_dim` inputs and N = `num_embeddings`
    outputs, so a tied output layer can use the same tensors. The layer has the tensors, state_dict, `to_packed()` and
    dtypes of `MarlinLinear`; only `forward` differs. `forward` returns rows of the layer's `dtype`, which `.half()`,
    `.bfloat16()` and `.to(dtype)` change. The table has no gradient.

    Args:
        num_embeddings: N, the number of rows in the table.
        embedding_dim: K, the length of a row, a multiple of 8.
        padding_idx: as in `nn.Embedding`. The layer only stores this number, for models that read it.
        scale: a factor for the rows. As in Gemma, the factor and the rows are first rounded to the layer's dtype.
        **options: `weight_format`, `group_size`, `device`, `dtype` and all further arguments of `MarlinLinear` except
            `bias`.

    Examples:
        >>> table = tmm.MarlinEmbedding.from_embedding(nn.Embedding(100, 64), "uint4", group_size=32)
        >>> table(torch.tensor([[1, 5]])).shape
        torch.Size([1, 2, 64])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        scale: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(embedding_dim, num_embeddings, bias=False, **options)
        self.scale = scale
        self._scales = {kind: float(torch.tensor(scale, dtype=kind, device="cpu")) for kind in FLOAT_DTYPES}
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx

    @classmethod
    def from_packed(
        cls,
        packed: PackedWeight,
        *,
        dtype: torch.dtype | None = None,
        padding_idx: int | None = None,
        scale: float = 1.0,
    ) -> "MarlinEmbedding":
        """Makes a layer from the tensors of `packed`, without copies.

        Args:
            packed: the table as a weight `[K, N]`, where K is the length of a row.
            dtype: dtype of the rows. None means the dtype of floating-point scales or, for scale codes, the default
                dtype.
            padding_idx: as in `nn.Embedding`.
            scale: a factor for the rows.

        Raises:
            ValueError: the weight has a bias.
            PackedWeightError: a field of `packed` violates a rule of its format.
        """
        if packed.bias is not None:
            raise ValueError(f"MarlinEmbedding: packed: expected no bias, got one of {list(packed.bias.shape)}")
        held = MarlinLinear.from_packed(packed, dtype=dtype)
        layer = cls(packed.N, packed.K, padding_idx, scale, **options_of(packed), device="meta", dtype=held.dtype)
        for name, tensor in held._buffers.items():
            setattr(layer, name, tensor)
        return layer

    @classmethod
    def like(cls, embedding: Any, packed: PackedWeight, dtype: torch.dtype | None) -> "MarlinEmbedding":
        """Makes the packed layer that replaces an embedding. `why_not_embedding` must have returned ""."""
        scale = embedding.scale if isinstance(embedding, MarlinEmbedding) else scale_of(embedding) or 1.0
        return cls.from_packed(packed, dtype=dtype, padding_idx=embedding.padding_idx, scale=scale)

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        weight_format: str = "uint4b8",
        group_size: int | None = None,
        method: str = "rtn",
        **options: Any,
    ) -> "MarlinEmbedding":
        """Quantizes an embedding on its device.

        Args:
            embedding: an embedding with a table in float16, bfloat16 or float32 and `embedding_dim` a multiple of 8.
                `max_norm`, `scale_grad_by_freq` and `sparse` must not be set.
            weight_format: see `quantize_weight`.
            group_size: see `quantize_weight`.
            method: "rtn" or "mse".
            **options: `scale_dtype`, `lut` and `mx_rounding` of `quantize_weight`.

        Raises:
            ValueError: the table or an argument is invalid; see `quantize_weight`.
        """
        if reason := why_not_embedding(embedding):
            raise ValueError(f"MarlinEmbedding: embedding: {reason}")
        packed = quantize_weight(embedding.weight, weight_format, group_size, method, **options)
        layer = cls.like(embedding, packed, embedding.weight.dtype)
        layer.train(embedding.training)
        return layer

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up rows `[..., embedding_dim]` in the layer's dtype for int32 or int64 `ids [...]`."""
        tensors, named = self._arguments()
        result: Tensor = _embedding(ids, *tensors, dtype=self.dtype, **named)
        return result if self.scale == 1 else result * self._scales[self.dtype]

    def tied_linear(self, bias: Tensor | None = None) -> MarlinLinear:
        """Makes an output layer that shares the tensors of this table.

        Args:
            bias: the bias `[num_embeddings]` of the output layer.
        """
        return MarlinLinear.from_packed(replace(self.to_packed(), bias=bias), dtype=self.dtype)

    def extra_repr(self) -> str:
        text = (
            f"{self.num_embeddings}, {self.embedding_dim}, weight_format={self.weight_format}, "
            f"group_size={self.group_size}"
        )
        text += "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return text if self.scale == 1 else f"{text}, scale={self.scale:.6g}"


def scale_of(module: nn.Module) -> float | None:
    """Returns the factor for the rows of an embedding such as Gemma's, or None for other embeddings.

    Gemma's classes are recognized by their attributes and by their results for a few rows.
    """
    scale, kind = getattr(module, "scalar_embed_scale", None), type(module)
    return float(scale) if isinstance(scale, float | int) and _multiplies(kind) else None  # type: ignore[arg-type]


@cache
def _multiplies(kind: Any) -> bool:
    """Returns True if a class multiplies the rows of its embeddings by `embed_scale` in the dtype of the table."""
    scale, ids = 3.3, torch.tensor([[2, 0, 1]], device="cpu")
    try:
        for dtype in FLOAT_DTYPES:
            with torch.device("cpu"):
                embedding = kind(3, 8, None, embed_scale=scale).to(dtype)
            rows = torch.linspace(-2, 3, 24, dtype=dtype, device="cpu").reshape(3, 8)
            embedding.weight = nn.Parameter(rows)
            with torch.no_grad():
                if not torch.equal(embedding(ids), rows[ids] * torch.tensor(scale, dtype=dtype, device="cpu")):
                    return False
    except (TypeError, AttributeError):
        return False
    return True


def why_not_embedding(module: nn.Module) -> str:
    """Returns the reason why an embedding cannot become a `MarlinEmbedding`, or ""."""
    if not isinstance(module, nn.Embedding):
        return f"expected nn.Embedding, got {type(module).__name__}"
    plain = type(module).forward is nn.Embedding.forward or scale_of(module) is not None
    if not plain or "forward" in module.__dict__:
        return f"{type(module).__name__} has a forward of its own"
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, name):
            return f"it has {name}={getattr(module, name)}, which changes the table or its gradient"
    if module.embedding_dim % 8 or not module.num_embeddings:
        return f"its rows of {module.embedding_dim} are not a positive multiple of 8 long"
    return ""
