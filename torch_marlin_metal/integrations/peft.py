"""Importing this module lets peft put LoRA adapters on `MarlinLinear` layers.

    import torch_marlin_metal.integrations.peft
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))

peft has no registry for layers of other packages, but each `LoraConfig` takes custom ones. The import wraps
`LoraModel.inject_adapter`, through which every adapter of peft passes. The wrapper registers `MarlinLoraLinear` in the
config and checks all targets before peft changes the model.
"""

import copy
import functools
import warnings
from dataclasses import fields, replace
from typing import Any

import torch
from peft import LoraConfig, LoraModel, PeftType
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import Linear
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.tuners_utils import BaseTunerLayer, _maybe_include_all_linear_layers, check_adapters_to_merge
from torch import Tensor, nn

from torch_marlin_metal.integrations.training import prepare_for_training
from torch_marlin_metal.layers.embedding import MarlinEmbedding
from torch_marlin_metal.layers.fuse import FusedLinear
from torch_marlin_metal.layers.linear import WEIGHT_BUFFERS, MarlinLinear
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.quantize.weight import quantize_weight

__all__ = ["MarlinLoraLinear", "install", "prepare_for_training", "restore"]

# Other initializations read or change the weight of the base layer as a float tensor.
INITIALIZATIONS = (True, False, "gaussian")
_NORM_BYTES = 64 << 20  # of decoded weights at a time, for the norms of a weight's rows


class MarlinLoraLinear(Linear):  # type: ignore[misc]
    """peft's LoRA layer on a `MarlinLinear`: LoRA, rsLoRA and DoRA, with dropout, biases and several adapters.

    peft's own code adds the adapters to the result of the packed layer. Merging quantizes the sum of weight and
    adapters again, in the base layer's format, and keeps the packed weight from before: `unmerge` restores its bits.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: LoraConfig,
        r: int = 0,
        lora_alpha: int = 1,
        **kwargs: Any,
    ) -> None:
        check_config(config)
        super().__init__(base_layer, adapter_name, config, r=r, lora_alpha=lora_alpha, **kwargs)
        self.fan_in_fan_out = False  # MarlinLinear has nn.Linear's orientation also where it replaces a Conv1D
        self._unmerged: PackedWeight | None = None

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Adds an adapter, or replaces the one of this name.

        Raises:
            ValueError: the config asks for what this layer does not support.
        """
        check_config(config)
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    def _get_in_out_features(self, module: MarlinLinear) -> tuple[int, int]:
        return module.in_features, module.out_features

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Returns the variants of LoRA that this layer supports, for peft."""
        return {(): None, ("use_dora",): MarlinDoraVariant}

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight and quantizes the sum.

        However many adapters are merged, and in however many calls, the weight is quantized once from the original.

        Args:
            safe_merge: changes nothing here: the result is always checked before the layer is changed.
            adapter_names: the adapters to merge; None means the active ones.

        Raises:
            ValueError: the sum is not finite, or the format cannot hold it. The layer is unchanged.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        base: MarlinLinear = self.get_base_layer()
        original = self._unmerged or base.to_packed()
        merged = [*self.merged_adapters, *names]
        _set_weight(base, self._quantized_sum(original, merged))
        self._unmerged = original
        self.merged_adapters.extend(names)

    def unmerge(self) -> None:
        """Restores the packed weight from before the first merge, bit for bit."""
        if self._unmerged is None:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        base: MarlinLinear = self.get_base_layer()
        _set_weight(base, self._unmerged.to(base.b_packed.device))
        self._unmerged = None
        self.merged_adapters.clear()

    @torch.no_grad()
    def _quantized_sum(self, original: PackedWeight, names: list[str]) -> PackedWeight:
        """Returns the original weight with adapters, in the same format."""
        device = self.get_base_layer().b_packed.device
        original = original.to(device)
        base = original.dequantize().T  # [N, K]
        total, bias = base, original.bias
        for name in names:
            delta = (self.lora_B[name].weight.float() @ self.lora_A[name].weight.float()) * self.scaling[name]
            total = total + delta.to(device)
            if name in self.lora_variant:
                norm = torch.linalg.vector_norm(base + delta.to(device), dim=1)
                total = total * (self.lora_magnitude_vector[name].weight.float() / norm).unsqueeze(1)
            if self.lora_bias[name]:
                if bias is None:
                    raise ValueError(
                        f"merge: adapter {name!r}: expected a base layer with a bias for lora_bias, got one without"
                    )
                bias = (bias.float() + self.lora_B[name].bias.float() * self.scaling[name]).to(bias.dtype)
            if not torch.isfinite(total).all() or (bias is not None and not torch.isfinite(bias).all()):
                raise ValueError(
                    f"merge: NaNs detected in the merged weights. The adapter {name} seems to be broken: "
                    "expected finite values"
                )
        if original.perm is not None:
            total = total[:, original.perm]
        options: dict[str, Any] = {} if original.lut is None else {"lut": original.lut}
        if original.scales.is_floating_point():
            options["scale_dtype"] = original.scales.dtype
        try:
            packed = quantize_weight(
                total.contiguous(), original.weight_format, original.group_size, "mse", name=original.name, **options
            )
        except ValueError as error:
            raise ValueError(
                f"merge: adapters {names}: {original.weight_format} cannot hold the sum: {error}"
            ) from error
        return replace(packed, perm=original.perm, bias=bias, source=original.source)


class MarlinDoraLayer(DoraLinearLayer):  # type: ignore[misc]
    """DoRA's magnitudes, without a copy of the weight in floats.

    The squared norm of row n of W + s B A is |w_n|^2 + 2 s b_n . (A w_n) + s^2 b_n (A A^T) b_n^T. The first term is
    constant, and the product A W^T has only as many rows as A.
    """

    def __init__(self) -> None:
        super().__init__(fan_in_fan_out=False)
        self._squares: tuple[Tensor, Tensor] | None = None

    def update_layer(
        self, *, base_layer: MarlinLinear, lora_A: Tensor, lora_B: Tensor, scaling: float, place_on_cpu: bool = False
    ) -> None:
        """Sets the magnitudes to the norms of the present weight."""
        norm = self.norm(base_layer, lora_A, lora_B, scaling).to(lora_A.dtype)
        self.weight = nn.Parameter(norm.cpu() if place_on_cpu else norm, requires_grad=True)

    @torch.no_grad()
    def norm(self, base: MarlinLinear, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
        """Returns the norms of the rows of W + scaling B A, float32 `[N]`."""
        if lora_A.is_meta or base.b_packed.is_meta:
            return torch.empty(base.out_features, device="meta")
        A, B = lora_A.float(), lora_B.float()
        packed = replace(base.to_packed(), bias=None)
        if self._squares is None or self._squares[0] is not base.b_packed:
            self._squares = base.b_packed, _squared_norms(packed)
        squares = self._squares[1] + 2 * scaling * (B * packed(A).T).sum(1) + scaling**2 * ((B @ (A @ A.T)) * B).sum(1)
        return squares.clamp_min(0).sqrt()

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
        """Returns what is added to the result of the base layer, as peft's layer does."""
        norm = self.norm(base_layer, lora_A.weight, lora_B.weight, scaling)
        ratio = (self.weight / norm).view(1, -1)
        if base_result is None:
            base_result = replace(base_layer.to_packed(), bias=None)(x)
        elif base_layer.bias is not None:
            base_result = base_result - base_layer.bias
        added: Tensor = (ratio - 1) * base_result + ratio * lora_B(lora_A(x)) * scaling
        return added


class MarlinDoraVariant(DoraLinearVariant):  # type: ignore[misc]
    """peft's DoRA with `MarlinDoraLayer`; `MarlinLoraLinear` merges it."""

    @staticmethod
    def init(module: MarlinLoraLinear, adapter_name: str, **kwargs: Any) -> None:
        """Adds the magnitudes of an adapter to its layer."""
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


def check_config(config: LoraConfig) -> None:
    """Raises a ValueError that names the first setting that `MarlinLoraLinear` does not support."""
    where = "MarlinLoraLinear: LoraConfig: "
    if config.init_lora_weights not in INITIALIZATIONS:
        raise ValueError(
            f"{where}init_lora_weights: expected True, False or 'gaussian' on a packed weight, "
            f"got {config.init_lora_weights!r}"
        )
    for field in fields(config):
        value = getattr(config, field.name)
        if field.metadata.get("is_lora_variant") and field.name != "use_dora" and value:
            raise ValueError(f"{where}{field.name}: expected {field.default!r} on a packed weight, got {value!r}")


def check_targets(tuner: LoraModel, model: nn.Module, config: Any) -> None:
    """Raises a ValueError if an adapter or a trainable copy would go onto a packed layer that cannot take it."""
    saved = getattr(config, "modules_to_save", None) or ()
    for name, module in model.named_modules():
        layer = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
        if not isinstance(layer, MarlinLinear | FusedLinear | MarlinEmbedding):
            continue
        if any(f".{part}." in f".{name}." for part in saved):
            raise ValueError(
                f"MarlinLoraLinear: layer {name!r}: expected a float layer for modules_to_save, got a "
                f"{type(layer).__name__}, whose weight cannot be trained: exclude the layer from quantization"
            )
        if not name or not tuner._check_target_module_exists(config, name):
            continue
        if isinstance(layer, FusedLinear):
            raise ValueError(
                f"MarlinLoraLinear: layer {name!r}: expected a MarlinLinear, got one of several fused projections: "
                "load the model with fuse=False"
            )
        if isinstance(layer, MarlinEmbedding):
            raise ValueError(
                f"MarlinLoraLinear: layer {name!r}: expected a MarlinLinear, got a MarlinEmbedding, which passes no "
                "gradients"
            )
        if config.peft_type != PeftType.LORA:
            raise ValueError(
                f"MarlinLoraLinear: layer {name!r}: expected peft_type LORA on a packed weight, got "
                f"{getattr(config.peft_type, 'value', config.peft_type)}"
            )
        check_config(config)


def _include_all_linear(model: Any, config: Any) -> None:
    """Replaces the target "all-linear" by names: peft's own choice, and every packed layer but the output head."""
    targets = config.target_modules
    if not (isinstance(targets, str) and targets.lower() == "all-linear"):
        return
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    inside = tuple(f"{n}." for n, module in model.named_modules() if isinstance(module, BaseTunerLayer | FusedLinear))
    packed = {  # fused projections too, so that check_targets refuses them
        name
        for name, module in model.named_modules()
        if isinstance(module, MarlinLinear | FusedLinear) and module is not head and not name.startswith(inside)
    }
    config.target_modules = packed | set(_maybe_include_all_linear_layers(config, model).target_modules)


def install() -> None:
    """Makes peft find `MarlinLoraLinear`; a second call does nothing. Importing the module calls it."""
    original = LoraModel.inject_adapter
    if hasattr(original, "without_marlin"):
        return

    @functools.wraps(original)
    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        config = self.peft_config[adapter_name]
        if any(isinstance(module, MarlinLinear | FusedLinear | MarlinEmbedding) for module in model.modules()):
            planned = copy.copy(config)  # a refused config stays as the caller wrote it
            _include_all_linear(model, planned)
            if getattr(planned, "target_modules", None) is None:  # peft fills in the model family's default
                planned = self._prepare_adapter_config(planned, self.get_model_config(model))
            check_targets(self, model, planned)
            if isinstance(config.target_modules, str):
                config.target_modules = planned.target_modules
        if isinstance(config, LoraConfig):
            config._register_custom_module({MarlinLinear: MarlinLoraLinear})
        original(self, model, adapter_name, *args, **kwargs)

    inject_adapter.without_marlin = original  # type: ignore[attr-defined]
    LoraModel.inject_adapter = inject_adapter


def restore() -> None:
    """Undoes `install`; models that have adapters keep them."""
    LoraModel.inject_adapter = getattr(LoraModel.inject_adapter, "without_marlin", LoraModel.inject_adapter)


def _set_weight(layer: MarlinLinear, packed: PackedWeight) -> None:
    """Gives a layer the tensors of another weight with the same sizes and format."""
    made = MarlinLinear.from_packed(packed, dtype=layer.dtype)
    for name in (*WEIGHT_BUFFERS, "packed_format"):
        setattr(layer, name, getattr(made, name))
    layer.group_size = made.group_size
    layer.bias = made.bias


def _squared_norms(packed: PackedWeight) -> Tensor:
    """Returns the sum of squares of each column of the weight `[K, N]`, float32 `[N]`, some columns at a time."""
    parts = []
    width = max(1, _NORM_BYTES // (4 * packed.K))
    for start in range(0, packed.N, width):
        columns = slice(start, start + width)
        cut: dict[str, Any] = {
            name: tensor[..., columns].contiguous()
            for name, tensor in packed.tensors().items()
            if name in ("b_packed", "scales", "zeros") or (name == "global_scale" and tensor.numel() > 1)
        }
        parts.append(replace(packed, **cut).dequantize().square().sum(0))
    return torch.cat(parts)


install()
