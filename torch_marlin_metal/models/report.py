"""The report of a model's conversion, layer by layer."""

from dataclasses import dataclass, field

from rich.table import Table
from torch import nn

from torch_marlin_metal.printing import RichText, table
from torch_marlin_metal.quantize.fit import Fit
from torch_marlin_metal.sizes import human_size


@dataclass(frozen=True)
class LayerReport:
    """One layer of a model.

    Attributes:
        name: the layer's name in the model, or the first of several names.
        kind: the class of the original module.
        shape: `(N, K)`, or None if the shape is unknown.
        weight_format: the format of the new layer, or "" if the layer was not converted.
        group_size: the group size of the new layer, or 0 if the layer was not converted.
        bytes_before: bytes of the original layer's parameters and buffers.
        bytes_after: bytes of the new layer's parameters and buffers.
        error: ||w - p|| / ||w|| in Frobenius norms, where p is the packed weight. None if the layer's weight was packed
            before and therefore did not change.
        reason: the reason why the layer was not converted, or "" if it was converted.
    """

    name: str
    kind: str
    shape: tuple[int, int] | None = None
    weight_format: str = ""
    group_size: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    error: float | None = None
    reason: str = ""


@dataclass
class Report(RichText):
    """The report for a complete model. `print` and rich show it as a table.

    Attributes:
        title: the table's title.
        layers: all layers that the conversion considered, in the model's order.
        bytes_before: bytes of the model's parameters and buffers before the conversion.
        bytes_after: bytes of the model's parameters and buffers after the conversion.
        fit: the selection of formats under a memory limit, or None without a limit.
    """

    title: str
    layers: list[LayerReport] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0
    fit: Fit | None = None

    @property
    def converted(self) -> list[LayerReport]:
        """Returns the layers that were replaced by a new module."""
        return [layer for layer in self.layers if not layer.reason]

    @property
    def left(self) -> list[LayerReport]:
        """Returns the layers that were not converted, each with its reason."""
        return [layer for layer in self.layers if layer.reason]

    @property
    def left_bytes(self) -> int:
        """Returns the bytes of the layers that were not converted."""
        return sum(layer.bytes_before for layer in self.left)

    @property
    def quantized_share(self) -> float:
        """Returns the share of the converted layers, 0 to 1, in the bytes of all layers in the report."""
        done = sum(layer.bytes_before for layer in self.converted)
        return done / (done + self.left_bytes) if done else 0.0

    def __rich__(self) -> Table:
        rows = [
            (
                layer.name,
                layer.kind,
                "x".join(map(str, layer.shape)) if layer.shape else "",
                f"{layer.weight_format} g{layer.group_size}" if layer.weight_format else "",
                human_size(layer.bytes_before) + ("" if layer.reason else f" > {human_size(layer.bytes_after)}"),
                "" if layer.error is None else f"{layer.error:.2%}",
                layer.reason,
            )
            for layer in self.layers
        ]
        headings = ("layer", "kind", "N x K", "format", "bytes", "error", "left because")
        return table(self.title, *headings, rows=rows, right=("N x K", "bytes", "error"), caption=self.summary())

    def summary(self) -> str:
        """Returns a line with counts and sizes."""
        errors = [layer.error for layer in self.converted if layer.error is not None]
        text = (
            f"{len(self.converted)} layers converted, {len(self.left)} left; "
            f"model {human_size(self.bytes_before)} > {human_size(self.bytes_after)}"
        )
        if self.left:
            text += f"; {human_size(self.left_bytes)} of floats left ({1 - self.quantized_share:.0%} of what could be)"
        text += f"; error mean {sum(errors) / len(errors):.2%}, worst {max(errors):.2%}" if errors else ""
        return text if self.fit is None else f"{text}\n{self.fit.summary()}"


def module_bytes(module: nn.Module) -> int:
    """Returns the bytes of the parameters and buffers of a module and its children. Shared tensors count once."""
    return sum(tensor.nbytes for tensors in (module.parameters(), module.buffers()) for tensor in tensors)
