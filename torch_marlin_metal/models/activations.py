"""Lets packed layers round their activations to 8 bits, on request."""

from torch import nn

from torch_marlin_metal.formats import weight_format
from torch_marlin_metal.layers.equivalence import check_module
from torch_marlin_metal.layers.linear import MarlinLinear


def set_activations(model: nn.Module, activations: str | None) -> list[str]:
    """Selects the rounding of activations in the `MarlinLinear` layers of a model on the CPU, in place.

    The setting is a property of the layers in memory and is not stored in a state_dict or checkpoint. Embeddings and
    the experts of mixtures do not round their activations. On mps, a layer with this setting raises an error.

    Args:
        model: a model with packed layers.
        activations: "int8" to round activations to 8 bits as in `gemm`, or None for no rounding.

    Returns:
        The names of the changed layers. Fused projections are one layer, for example "q_proj.fused".

    Raises:
        TypeError: `model` is not a module.
        ValueError: `activations` has another value, there is no layer, or a layer's format has no integer codes. The
            model does not change.

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
