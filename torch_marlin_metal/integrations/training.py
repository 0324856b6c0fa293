"""Prepares a model with packed weights for training adapters."""

import torch
from torch import nn

from torch_marlin_metal.formats import weight_format
from torch_marlin_metal.layers.fuse import FusedLinear
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.layers.packed_layer import PackedLayer


def prepare_for_training(
    model: nn.Module,
    *,
    gradient_checkpointing: bool = True,
    norms_in_fp32: bool = False,
    round_weights: bool = False,
) -> nn.Module:
    """Freezes a model and enables gradient checkpointing, in place. Call this function before adapters are added.

    peft's `prepare_model_for_kbit_training` does the same, but by default with reentrant checkpoints.

    Args:
        model: a model with packed layers.
        gradient_checkpointing: True to recompute activations in the backward pass. This requires a transformers model.
            The checkpoints are not reentrant, so the inputs need no gradient.
        norms_in_fp32: True to convert the parameters of modules whose class name ends in "Norm" to float32. Without
            autocast, many models then also compute the following layers in float32.
        round_weights: True to let layers of format `lut4` (nf4) round decoded weights to the activations' dtype in
            training mode, see `variant="rounded"` of `gemm`. On CPUs with fast bfloat16 products, this halves the time
            of products with 128 and more bfloat16 rows. Other formats do not change.

    Returns:
        The model.

    Raises:
        ValueError: the model has no packed layer, has fused projections, or does not support gradient checkpointing.
            The model does not change.
    """
    op = "prepare_for_training"
    if not any(isinstance(module, PackedLayer) for module in model.modules()):
        raise ValueError(f"{op}: model: expected packed layers, got {type(model).__name__} without any")
    for name, module in model.named_modules():
        if isinstance(module, FusedLinear):
            raise ValueError(
                f"{op}: model: expected no fused projections, got {name!r}: load the model with fuse=False"
            )
    if gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise ValueError(
                f"{op}: gradient_checkpointing: expected False for {type(model).__name__}, "
                "which does not support it, got True"
            )
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, MarlinLinear):
            module.rounds_in_training = round_weights and weight_format(module.weight_format).has_lut
    if norms_in_fp32:
        for module in model.modules():
            if type(module).__name__.endswith("Norm"):
                module.to(torch.float32)
    return model
