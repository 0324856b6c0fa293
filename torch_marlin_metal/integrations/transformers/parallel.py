"""Applies transformers' tensor-parallel plan: each process loads its part of the packed layers.

transformers adds its hooks to the placeholders of packed layers, like to float layers. The hooks disappear when the
placeholders are replaced. Their replacements are the layers of `torch_marlin_metal.parallel`, which need no hooks.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.models.linear_layers import LinearShape

if TYPE_CHECKING:
    from torch_marlin_metal.parallel.styles import LinearStyle

WHOLE = "replicate"  # transformers' style for a layer that each process stores in full
_STYLES: dict[str, dict[str, Any]] = {
    "colwise": {},
    "colwise_gather_output": {"gather": True},
    "colwise_rep": {"gather": True},
    "packed_colwise": {"parts": 2},
    "rowwise": {},
}
_SIZES = ("ep_size", "dp_size", "pp_size")


def check_sizes(op: str, model: Any, pre_quantized: bool) -> bool:
    """Raises an error for distributed configurations in which packed layers would not be split or would be lost.

    Returns:
        True if each process loads only its parts of the layers.

    Raises:
        NotImplementedError: the config of `from_pretrained` requests such a configuration.
    """
    config = getattr(model.config, "distributed_config", None)
    asked = [name for name in _SIZES if (getattr(config, name, 1) or 1) > 1]
    if asked:
        raise NotImplementedError(
            f"{op}: distributed_config: expected {', '.join(_SIZES)} of 1 for a model with packed weights, got "
            + ", ".join(f"{name}={getattr(config, name)}" for name in asked)
        )
    tp_size = getattr(config, "tp_size", 1) or 1
    if not pre_quantized and tp_size > 1:
        raise NotImplementedError(
            f"{op}: distributed_config: expected tp_size=1 for a checkpoint of floats that is quantized while it "
            f"loads, got {tp_size}; quantize it once (torch-marlin-metal quantize), then load the result in parts"
        )
    return bool(tp_size > 1)


class TransformersSplit:
    """transformers' plan for splitting a model, which comes from `from_pretrained` with a `tp_size` above 1."""

    def __init__(self, op: str, model: Any) -> None:
        self._op, self._plan = op, dict(model.tp_plan)
        self._group = model._mesh_manager.get_mesh("tp").get_group()
        self._styles: dict[str, LinearStyle] = {}

    def begin(
        self,
        op: str,
        model: nn.Module,
        layers: Mapping[str, LinearShape],
        whole: Collection[str],
        reader: CheckpointReader,
    ) -> None:
        """Finds the styles of packed layers, and compares the processes' packages and checkpoints; see `Split`.

        Raises:
            NotImplementedError: the plan has a style that this package lacks for the layer, or the plan splits a layer
                in `whole`.
        """
        from torch_marlin_metal.parallel.agreement import check_checkpoint
        from torch_marlin_metal.parallel.styles import MarlinColwiseParallel, MarlinRowwiseParallel

        for name in [*layers, *whole]:
            parents = name.split(".")
            for depth in range(1, len(parents)):
                if (style := self._style_of(parent := ".".join(parents[:depth]))) not in (None, WHOLE):
                    raise self._error(parent, style, f"a style for this module, whose {name} is packed")
            style = self._style_of(name)
            if style in (None, WHOLE):
                continue
            if name in whole or style not in _STYLES:
                known = WHOLE if name in whole else f"{', '.join(_STYLES)} or {WHOLE}"
                raise self._error(name, style, f"{known} for this packed layer")
            options = dict(_STYLES[style])
            if count := options.get("parts"):
                options["parts"] = [layers[name].N // count] * count
            self._styles[name] = (MarlinRowwiseParallel if style == "rowwise" else MarlinColwiseParallel)(**options)
        check_checkpoint(op, reader, self._group)

    def load(
        self,
        op: str,
        names: Sequence[str],
        shape: LinearShape,
        reader: CheckpointReader,
        index: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module | None:
        """Makes this process's part of a layer; see `LinearStyle.load`."""
        style = next((self._styles[name] for name in names if name in self._styles), None)
        if style is None:
            return None
        return style.load(op, names[0], shape, reader, index, self._group, device=device, dtype=dtype)

    def _style_of(self, name: str) -> Any:
        return self._plan.get(name, self._plan.get(replace_layer_number_by_wildcard(name)))

    def _error(self, name: str, style: Any, expected: str) -> NotImplementedError:
        return NotImplementedError(
            f"{self._op}: tp_plan: layer {name!r}: expected {expected}, got {style!r}; "
            f"DistributedConfig(tp_plan={{...: {WHOLE!r}}}) keeps a layer whole, and load_quantized(split=) takes "
            "plans of torch_marlin_metal.parallel"
        )


def split_of(op: str, model: Any) -> TransformersSplit | None:
    """Returns transformers' plan for splitting a model, or None if the model is not split."""
    return TransformersSplit(op, model) if getattr(model, "_tp_size", None) not in (None, 1) else None
