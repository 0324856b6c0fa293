"""DoRA for a layer with a packed weight."""

import weakref
from dataclasses import replace
from typing import Any

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import Linear
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn

from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.layers.packed_layer import version_of
from torch_marlin_metal.ops.gemm import gemm
from torch_marlin_metal.packed_weight import PackedWeight

_NORM_BYTES = 64 << 20  # bytes of decoded weights in memory at a time while row norms are computed


# The tensors of a weight, each with its version: the number of times that it was written.
WeightState = list[tuple["weakref.ref[Tensor]", int]]


class MarlinDoraLayer(DoraLinearLayer):  # type: ignore[misc]
    """DoRA's magnitudes without a float copy of the weight.

    The squared norm of row n of W + s B A is |w_n|^2 + 2 s b_n . (A w_n) + s^2 b_n (A A^T) b_n^T. The first term is
    constant. The second needs the product A W^T, which has only as many rows as A.
    """

    def __init__(self) -> None:
        super().__init__(fan_in_fan_out=False)
        self._squares: tuple[WeightState, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and pickle. A copy has new tensors, so it computes their norms again."""
        return {**self.__dict__, "_squares": None}

    def update_layer(
        self, *, base_layer: MarlinLinear, lora_A: Tensor, lora_B: Tensor, scaling: float, place_on_cpu: bool = False
    ) -> None:
        """Sets the magnitudes to the row norms of the current weight."""
        norm = self.norm(base_layer, lora_A, lora_B, scaling).to(lora_A.dtype)
        self.weight = nn.Parameter(norm.cpu() if place_on_cpu else norm, requires_grad=True)

    @torch.no_grad()
    def norm(self, base: MarlinLinear, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
        """Returns the norms of the rows of W + scaling B A, float32 `[N]`, also under autocast."""
        if lora_A.is_meta or base.b_packed.is_meta:
            return torch.empty(base.out_features, device="meta")
        A, B = lora_A.float(), lora_B.float()
        packed = replace(base.to_packed(), bias=None)
        constant = self._constant(packed)
        with torch.autocast(base.b_packed.device.type, enabled=False):
            mixed = (B * gemm(A, packed).T).sum(1)
            squares = constant + 2 * scaling * mixed + scaling**2 * ((B @ (A @ A.T)) * B).sum(1)
        return squares.clamp_min(0).sqrt()

    def _constant(self, packed: PackedWeight) -> Tensor:
        """Returns the squared row norms of the base weight. They are cached until one of its tensors is written."""
        if torch.compiler.is_compiling():  # a graph cannot test if a tensor was written
            return _squared_norms(packed)
        if self._squares is None or not _is_state(self._squares[0], packed):
            self._squares = _state(packed), _squared_norms(packed)
        return self._squares[1]

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Linear,
        lora_B: nn.Linear,
        scaling: float,
        base_layer: MarlinLinear,
        base_result: Tensor | None = None,
        adapter_name: str = "default",
    ) -> Tensor:
        """Returns DoRA's update, which peft adds to the result of the base layer."""
        # In the dtype of the magnitudes, the ratio of an untrained adapter is exactly 1.
        norm = self.norm(base_layer, lora_A.weight, lora_B.weight, scaling).to(self.weight.dtype)
        ratio = (self.weight / norm).view(1, -1)
        if base_result is None:
            base_result = gemm(x, replace(base_layer.to_packed(), bias=None))
        elif base_layer.bias is not None:
            base_result = base_result - base_layer.bias
        added: Tensor = (ratio - 1) * base_result + ratio * lora_B(lora_A(x)) * scaling
        return added


class MarlinDoraVariant(DoraLinearVariant):  # type: ignore[misc]
    """peft's DoRA with `MarlinDoraLayer`. `MarlinLoraLinear` merges it."""

    @staticmethod
    def init(module: Linear, adapter_name: str, **kwargs: Any) -> None:
        """Adds an adapter's magnitudes to its layer."""
        if not module.lora_magnitude_vector:
            module.adapter_layer_names = (*module.adapter_layer_names[:], "lora_magnitude_vector")
        layer = MarlinDoraLayer()
        layer.update_layer(
            base_layer=module.get_base_layer(),
            lora_A=module.lora_A[adapter_name].weight,
            lora_B=module.lora_B[adapter_name].weight,
            scaling=module.scaling[adapter_name],
        )
        module.lora_magnitude_vector[adapter_name] = layer


def _squared_norms(packed: PackedWeight) -> Tensor:
    """Returns the squared norm of each column of a weight `[K, N]`, float32 `[N]`. Decodes some columns at a time."""
    parts = []
    width = max(1, _NORM_BYTES // (4 * packed.K))
    for start in range(0, packed.N, width):
        columns = packed.columns(slice(start, start + width))
        parts.append(columns.dequantize().square().sum(0))
    return torch.cat(parts)


def _state(packed: PackedWeight) -> WeightState:
    return [(weakref.ref(tensor), version_of(tensor)) for tensor in packed.tensors().values()]


def _is_state(state: WeightState, packed: PackedWeight) -> bool:
    tensors = list(packed.tensors().values())
    return len(tensors) == len(state) and all(
        reference() is tensor and version == version_of(tensor)
        for tensor, (reference, version) in zip(tensors, state, strict=True)
    )
