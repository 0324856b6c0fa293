"""Rounds the activations of a model's packed layers to 8 bits, on request."""

from torch import nn

from torch_marlin_metal.formats import weight_format
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.models.swap import check_module


def set_activations(model: nn.Module, activations: str | None) -> list[str]:
    """Sets how the `MarlinLinear` layers of a model multiply their activations on the CPU, in place.

    The setting belongs to the layers in memory: no state_dict and no checkpoint holds it. Embeddings and the experts of
    mixtures keep their activations. On mps, such a layer raises an error.

    Args:
        model: holds packed layers.
        activations: "int8" rounds them to 8 bits, as `gemm` does; None keeps them as they are.

    Returns:
        The names of the layers that were set. Fused projections are one layer, such as "q_proj.fused".

    Raises:
        TypeError: `model` is no module.
        ValueError: `activations` has another value, there is no layer, or the codes of a layer are no integers. The
            model is then unchanged.

    Examples:
        >>> model = nn.Sequential(tmm.MarlinLinear.from_linear(nn.Linear(64, 32)), nn.ReLU())
        >>> tmm.set_activations(model, "int8")
        ['0']
        >>> model(torch.randn(2, 64)).shape
        torch.Size([2, 32])
    """
    op = "set_activations"
    check_module(op, model)
    if activations not in (None, "int8"):
        raise ValueError(f"{op}: activations: expected None or 'int8', got {activations!r}")
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, MarlinLinear)}
    if not layers:
        raise ValueError(f"{op}: model: expected MarlinLinear layers, got {type(model).__name__} without any")
    for name, layer in layers.items():
        kind = weight_format(layer.weight_format).code_kind
        if activations is not None and kind not in ("integer", "e2m1"):
            raise ValueError(
                f"{op}: activations: expected None, because the codes of layer {name!r} ({layer.weight_format}) are no "
                "integers, got 'int8'; set the attribute `activations` of the other layers"
            )
    for layer in layers.values():
        layer.activations = activations
    return list(layers)
