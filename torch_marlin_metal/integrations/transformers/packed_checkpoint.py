"""Connects the loader with transformers, which supplies names and devices and loads all other tensors.

`place` puts placeholders into the model before transformers loads tensors, so that transformers does not report or
initialize the packed weights as missing. After transformers has loaded all other tensors, `fill` replaces the
placeholders by packed layers.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from transformers.core_model_loading import PrefixChange
from transformers.integrations.accelerate import get_device
from transformers.utils import logging

from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.checkpoints.model_names import ModelNames
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.integrations.transformers.config import MarlinConfig
from torch_marlin_metal.integrations.transformers.mlx import changes_back
from torch_marlin_metal.integrations.transformers.names import loaded_names, tied_modules
from torch_marlin_metal.integrations.transformers.parallel import split_of
from torch_marlin_metal.layers.float_experts import WEIGHTS, is_stack
from torch_marlin_metal.load.caller import Caller
from torch_marlin_metal.load.loader import EXPERT, Loader, read_ahead
from torch_marlin_metal.models.linear_layers import listing

OP = "from_pretrained"
DEVICES = ("cpu", "mps")
logger = logging.get_logger(__name__)


class PackedCheckpoint:
    """A checkpoint with packed layers that `from_pretrained` loads. `Caller` explains the argument `parts`."""

    def __init__(self, reader: CheckpointReader, config: MarlinConfig, parts: bool = False) -> None:
        self.reader = reader
        self._config, self._parts = config, parts
        self._loader: Loader | None = None
        self._device_map: dict[str, Any] | None = None
        self._added: list[Any] = []

    def read_ahead(self) -> None:
        """Starts threads that read complete layers while transformers prepares the model."""
        if not self._parts:
            read_ahead(self.reader)

    def place(self, model: Any, conversions: list[Any], reinitializes: bool) -> list[Any]:
        """Replaces the modules of packed layers by placeholders. A second call does nothing.

        Returns the conversions between checkpoint and model that transformers must apply, for the conversions that it
        would apply. `Caller` explains the argument `reinitializes`.

        Raises:
            ModelMismatchError: the plan of the load fails.
        """
        if self._loader is not None:
            return [*self._added, *conversions]
        self._added = changes_back(self.reader)
        conversions = [*self._added, *conversions]
        names = ModelNames(model, conversions, is_stack)
        unused = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
        keys = model.all_tied_weights_keys
        biases = {name: source for name, source in keys.items() if name.endswith(".bias")}
        caller = Caller(
            op=OP,
            find=names.find,
            ties=tied_modules(keys),
            bias_ties=biases,
            exclude=self._config.modules_to_not_convert,
            ignore=self._config.ignore,
            exclude_argument="modules_to_not_convert",
            hosted=True,
            unused=lambda source: any(one.search(names.tensor(f"{source}.weight")) for one in unused),
            reinitializes=reinitializes,
            parts=self._parts,
            device_of=lambda name: device_of(self._device_map, name),
            progress=logging.is_progress_bar_enabled(),
        )
        self._loader = Loader(model, self.reader, caller, logger.warning)
        plan = self._loader.plan
        for source, reason in plan.left_out.items():
            logger.warning(f"{self.reader.path}: {source} is left out: {reason}")
        if plan.prefix:
            logger.warning(f"{self.reader.path}: names begin with {plan.prefix!r}, which is removed")
            prefix = PrefixChange(prefix_to_remove=re.escape(plan.prefix.removesuffix(".")))
            self._added, conversions = [prefix, *self._added], [prefix, *conversions]
        self._loader.place()
        packed_biases = {f"{name}.bias" for place in plan.places for name in place.spot.target.names}
        for name, source in biases.items():
            if not packed_biases.isdisjoint((name, source)):
                del keys[name]
        for name in plan.settled:
            keys.pop(f"{name}.weight", None)
        dense = {name for name, _, _ in self.reader.others()}
        kept = {name.removeprefix(plan.prefix) for name in self.reader.tensor_files().keys() - dense}
        packed = {EXPERT.sub(".experts.0.", name) for name in kept}  # the patterns below match any number
        # transformers would merge the floats of these experts. The loader reads them instead.
        packed |= {f"{name}.{kind}" for name, experts in plan.experts.items() if experts.floats for kind in WEIGHTS}
        packed |= {name.removeprefix(plan.prefix) for name in plan.unused}
        reported = packed | loaded_names(packed, conversions)
        model._keys_to_ignore_on_load_unexpected |= {
            "^" + re.sub(r"\d+", r"\\d+", re.escape(n)) + "$" for n in reported
        }
        return conversions

    def fill(self, model: Any, device_map: dict[str, Any] | None) -> None:
        """Reads the packed layers one at a time, and replaces each placeholder by its layer."""
        assert self._loader is not None
        self._device_map = device_map
        model._weight_conversions = [
            change for change in getattr(model, "_weight_conversions", ()) if change not in self._added
        ]
        split = split_of(OP, model)
        if split is not None:
            for place in self._loader.plan.places:  # drop the hooks of the style "replicate", which do nothing
                for spot in place.spots():
                    spot.target.module.__dict__.pop("forward", None)
        try:
            self._loader.fill(split)
        finally:
            self.reader.stop_reading_ahead()


def check_files(reader: CheckpointReader, asked: Iterable[str]) -> None:
    """Raises an error if transformers or diffusers found other files in a directory than the reader."""
    files, names = {file.name for file in reader.tensor_files().values()}, set(asked)
    if files != names:
        raise UnsupportedFormat(
            f"{reader.path}: the library asks for {listing(names)}, the checkpoint's tensors are in {listing(files)}"
        )


def check_devices(op: str, device_map: dict[str, Any]) -> None:
    """Raises an error for a device map with the disk or with devices that have no kernels."""
    for module, place in device_map.items():
        kind = place if isinstance(place, str) and place == "disk" else torch.device(place).type
        if kind not in DEVICES:
            raise ValueError(
                f"{op}: device_map: expected {' or '.join(DEVICES)}, got {place!r} for {module or 'the model'!r}"
            )


def device_of(device_map: dict[str, Any] | None, name: str) -> torch.device:
    """Returns the device for a layer.

    If a map contains both mps and cpu, accelerate also runs the CPU's modules on mps. It copies the parameters of these
    modules to mps for each call, but their buffers are always on mps. A packed weight is a buffer, so it is loaded to
    mps directly.
    """
    if device_map is None:
        return torch.device("cpu")
    main = [torch.device(place) for place in device_map.values() if torch.device(place).type != "cpu"]
    return main[0] if main else torch.device(get_device(device_map, name, valid_torch_device=True))
