"""An embedding whose table stays in 4 bit."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.quantize.weight import quantize_weight

_embedding = torch.ops.torch_marlin_metal.embedding.default


class MarlinEmbedding(MarlinLinear):
    """`nn.Embedding` with a packed 4-bit table, looked up by `torch.ops.torch_marlin_metal.embedding`.

    The table is stored like the weight of a `MarlinLinear` with K = `embedding_dim` inputs and N = `num_embeddings`
    outputs, so that an output head that is tied to the embedding can use the same tensors. Tensors, state_dict,
    `to_packed()` and dtypes are those of `MarlinLinear`; only `forward` differs. The layer returns rows of its `dtype`,
    which `.half()`, `.bfloat16()` and `.to(dtype)` change. The table has no gradient.

    Args:
        num_embeddings: N, the rows of the table.
        embedding_dim: K, the length of a row, a multiple of 8.
        padding_idx: as in `nn.Embedding`; the layer only stores it, for models that read it.
        **options: `weight_format`, `group_size`, `device`, `dtype` and all further arguments of `MarlinLinear` but
            `bias`.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, **options: Any) -> None:
        super().__init__(embedding_dim, num_embeddings, bias=False, **options)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx

    @classmethod
    def from_packed(
        cls, packed: PackedWeight, *, dtype: torch.dtype | None = None, padding_idx: int | None = None
    ) -> "MarlinEmbedding":
        """Makes a layer that holds the tensors of `packed` (without copying them).

        Args:
            packed: the table as a weight `[K, N]`, where K is the length of a row.
            dtype: dtype of the rows; None means the dtype of floating scales or, if scales are codes, the default
                dtype.
            padding_idx: as in `nn.Embedding`.

        Raises:
            ValueError: the weight has a bias.
            PackedWeightError: a field of `packed` breaks a rule of its format.
        """
        if packed.bias is not None:
            raise ValueError(f"MarlinEmbedding: packed: expected no bias, got one of {list(packed.bias.shape)}")
        held = MarlinLinear.from_packed(packed, dtype=dtype)
        layer = cls(
            packed.N,
            packed.K,
            padding_idx,
            weight_format=held.weight_format,
            group_size=held.group_size,
            device="meta",
            dtype=held.dtype,
        )
        for name, tensor in held._buffers.items():
            setattr(layer, name, tensor)
        return layer

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
            embedding: the embedding. Its table is float16, bfloat16 or float32, `embedding_dim` is a multiple of 8, and
                `max_norm`, `scale_grad_by_freq` and `sparse` are not set.
            weight_format: see `quantize_weight`.
            group_size: see `quantize_weight`.
            method: "rtn" or "mse".
            **options: `scale_dtype`, `lut` and `mx_rounding` of `quantize_weight`.

        Raises:
            ValueError: the table or an argument is wrong; see `quantize_weight`.
        """
        if reason := why_not_embedding(embedding):
            raise ValueError(f"MarlinEmbedding: embedding: {reason}")
        packed = quantize_weight(embedding.weight, weight_format, group_size, method, **options)
        layer = cls.from_packed(packed, dtype=embedding.weight.dtype, padding_idx=embedding.padding_idx)
        layer.train(embedding.training)
        return layer

    def forward(self, ids: Tensor) -> Tensor:
        """Returns `[..., embedding_dim]` in the layer's dtype for int32 or int64 `ids [...]`."""
        tensors, named = self._arguments()
        result: Tensor = _embedding(ids, *tensors, dtype=self.dtype, **named)
        return result

    def tied_linear(self, bias: Tensor | None = None) -> MarlinLinear:
        """Returns the output head of this table: a layer that shares its tensors.

        Args:
            bias: `[num_embeddings]`, the head's bias.
        """
        return MarlinLinear.from_packed(replace(self.to_packed(), bias=bias), dtype=self.dtype)

    def extra_repr(self) -> str:
        """Returns sizes and format, for `print(model)`."""
        text = (
            f"{self.num_embeddings}, {self.embedding_dim}, weight_format={self.weight_format}, "
            f"group_size={self.group_size}"
        )
        return text if self.padding_idx is None else f"{text}, padding_idx={self.padding_idx}"


def why_not_embedding(module: nn.Module) -> str:
    """Returns why an embedding cannot become a `MarlinEmbedding`, or "" if it can."""
    if not isinstance(module, nn.Embedding):
        return f"expected nn.Embedding, got {type(module).__name__}"
    if type(module).forward is not nn.Embedding.forward or "forward" in module.__dict__:
        return f"{type(module).__name__} has a forward of its own"
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, name):
            return f"it has {name}={getattr(module, name)}, which changes the table or its gradient"
    if module.embedding_dim % 8 or not module.num_embeddings:
        return f"its rows of {module.embedding_dim} are not a positive multiple of 8 long"
    return ""
