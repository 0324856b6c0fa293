"""Finds the matrices of a model that stay in floats, with their bytes and the reasons."""

import warnings
from collections.abc import Callable

from torch import Tensor, nn

from torch_marlin_metal.checkpoints.float_layers import is_matrix
from torch_marlin_metal.models.report import LayerReport, Report
from torch_marlin_metal.sizes import human_size

# Modules that look up or convolve with their parameters, and never use them in a matrix product.
TABLES = (nn.Embedding, nn.EmbeddingBag)
CONVOLUTIONS = (nn.modules.conv._ConvNd,)
NAMED = 8  # number of matrices that a message lists


def left_matrices(
    model: nn.Module, chosen: Callable[[str, nn.Module], bool], is_listed: Callable[[nn.Module], bool], tables: bool
) -> list[LayerReport]:
    """Lists the matrices, and stacks of matrices, in the parameters of modules that cannot be quantized.

    Args:
        model: the model in its current state.
        chosen: returns True if the caller selects a module. It is called with the name of the module, or of a
            parameter, and the module.
        is_listed: returns True if the report already lists a module. Parameters in this module are not listed again.
        tables: True to list the tables of embeddings too.
    """
    found, seen = [], set()
    listed = tuple(f"{name}." for name, module in model.named_modules(remove_duplicate=False) if is_listed(module))
    for prefix, module in model.named_modules():
        if isinstance(module, CONVOLUTIONS if tables else (*TABLES, *CONVOLUTIONS)) or f"{prefix}.".startswith(listed):
            continue
        for key, tensor in module._parameters.items():
            if tensor is None or id(tensor) in seen or not (tensor.is_floating_point() and is_matrix(tensor.shape)):
                continue
            seen.add(id(tensor))
            name = f"{prefix}.{key}" if prefix else key
            if chosen(name, module) or chosen(prefix, module):
                found.append(_entry(name, module, tensor))
    return found


def _entry(name: str, module: nn.Module, tensor: Tensor) -> LayerReport:
    kind, shape = type(module).__name__, tuple(tensor.shape)
    what = f"a stack of {shape[0]} matrices" if len(shape) == 3 else "a matrix"
    packs = "Linear layers"
    if isinstance(module, TABLES):
        what, packs = "a table", "Linear layers and tables of the vocabulary in an nn.Embedding"
    reason = f"{what} inside {kind}; only {packs} are packed"
    return LayerReport(name, kind, (shape[-2], shape[-1]), bytes_before=tensor.nbytes, reason=reason)


def check_coverage(op: str, report: Report) -> None:
    """Warns if less than half of the bytes were quantized, and names the largest matrices in floats.

    Raises:
        ValueError: nothing was quantized.
    """
    left, share = report.left_bytes, report.quantized_share
    if share >= 0.5:
        return
    worst = sorted(report.left, key=lambda layer: -layer.bytes_before)
    names = [f"{layer.name} ({human_size(layer.bytes_before)}): {layer.reason}" for layer in worst[:NAMED]]
    more = f"; and {len(worst) - NAMED} more" if len(worst) > NAMED else ""
    listing = "; ".join(names) + more
    if not report.converted:
        raise ValueError(
            f"{op}: no layer was quantized"
            + (f"; {human_size(left)} of matrix weights stay in floats: {listing}" if worst else ": the model has none")
        )
    warnings.warn(
        f"{op}: only {share:.0%} of the matrix weights were quantized; {human_size(left)} stay in floats: {listing}",
        stacklevel=3,
    )
