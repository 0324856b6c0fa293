"""The package's own format: the state_dict of each `MarlinLinear`, and settings that describe each layer.

docs/formats/formats.md is its specification.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from torch_marlin_metal.checkpoints.checkpoint import DTYPE_NAMES, Checkpoint
from torch_marlin_metal.checkpoints.errors import CheckpointError, UnsupportedFormat
from torch_marlin_metal.checkpoints.format_interface import DirectoryFormat, endings
from torch_marlin_metal.checkpoints.layer_tensors import Layer
from torch_marlin_metal.checkpoints.options import ReadOptions
from torch_marlin_metal.checkpoints.reader import CheckpointReader
from torch_marlin_metal.checkpoints.settings import OWN_METHOD, Settings
from torch_marlin_metal.formats import WEIGHT_FORMATS
from torch_marlin_metal.layers.linear import MarlinLinear
from torch_marlin_metal.layers.packed_layer import FORMAT_VERSION, GUARD
from torch_marlin_metal.packed_weight import WEIGHT_TENSORS, PackedWeight, PackedWeightError

METHOD = OWN_METHOD
FORMAT_NAMES = tuple(WEIGHT_FORMATS)
LAYER_TENSORS = ("bias", "packed_format", GUARD)  # tensors of a layer that are not part of its weight
# transformers and diffusers show this advice if the package is not imported; see `NativeExporter.settings`.
ADVICE = (
    "This model has packed weights: install the package torch_marlin_metal and write "
    "'import torch_marlin_metal.integrations.transformers' before from_pretrained "
    "(integrations.diffusers for a model of diffusers); 'python -m torch_marlin_metal.run' starts other programs so"
)


@dataclass
class NativeExporter:
    """The `exporters.Exporter` for this format. `layers` maps a layer's name to its entry in the settings."""

    layers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def tensors(self, weight: PackedWeight) -> dict[str, Tensor]:
        """Returns the state_dict of the layer."""
        self.describe(weight, weight.name)
        return dict(MarlinLinear.from_packed(weight).state_dict())

    def describe(self, weight: PackedWeight, name: str) -> None:
        """Adds a layer's entry to the settings. Reads only the shapes and dtypes of the weight, no values."""
        self.layers[name] = _describe(weight)

    def own_tensors(self, weight: PackedWeight, name: str) -> dict[str, Tensor]:
        """Describes a layer and returns its state_dict, for the safetensors writers of other libraries."""
        tensors = self.tensors(replace(weight, name=name))
        # Layers may share a table or a permutation, but safetensors refuses tensors that share memory.
        return {key: value.clone() if key in ("lut", "perm") else value for key, value in tensors.items()}

    @property
    def has_layers(self) -> bool:
        return bool(self.layers)

    def settings(self) -> dict[str, Any]:
        """Returns the `quantization_config` of a checkpoint with these layers.

        If a program has not imported this package, transformers only warns of the unknown `quant_method` and continues
        with random weights. Two settings make it raise an error instead. With `load_in_4bit`, transformers and
        diffusers treat the settings as bitsandbytes'. They then look up the value of `bnb_4bit_compute_dtype` as an
        attribute of torch. That value is `ADVICE`, so the error about the missing attribute shows the advice.
        """
        stops = {"load_in_4bit": True, "bnb_4bit_compute_dtype": ADVICE}
        return {"quant_method": METHOD, "format_version": FORMAT_VERSION, **stops, "layers": self.layers}


def _describe(weight: PackedWeight) -> dict[str, Any]:
    """Returns the arguments for an empty `MarlinLinear` that can load the weight."""
    entry: dict[str, Any] = {
        "in_features": weight.K,
        "out_features": weight.N,
        "bias": weight.bias is not None,
        "weight_format": weight.weight_format,
        "group_size": weight.group_size,
        "scale_dtype": _dtype_name(weight.scales),
        "perm": weight.perm is not None,
    }
    if weight.zeros is not None:
        entry["zeros_dtype"] = _dtype_name(weight.zeros)
    if weight.super_scales is not None:
        entry["super_dtype"] = _dtype_name(weight.super_scales)
    if weight.global_scale is not None and weight.global_scale.numel() > 1:
        entry["global_scale_per_column"] = True
    if weight.has_block_scales:
        entry["block_scales"] = True
    return entry


class StateReader(CheckpointReader):
    """Reads the packed layers of a plain state_dict.

    A state_dict has no settings. The tensor `packed_format` of each layer contains its format and group size.

    Args:
        path: the location of the state_dict, for error messages.
        state: the tensors.
    """

    def __init__(self, path: Path, state: Mapping[str, Tensor]) -> None:
        super().__init__(path, ReadOptions())
        self.format = FORMAT
        self._state = state

    def names(self) -> list[str]:
        return [key.removesuffix(".b_packed") for key in self._state if key.endswith(".b_packed")]

    def convert(self, index: int) -> PackedWeight:
        name = self.layer_names[index]
        tensors = {role: self._state.get(f"{name}.{role}") for role in (*WEIGHT_TENSORS, "bias")}
        described = self._state.get(f"{name}.packed_format")
        version, number, group_size = (
            described.tolist() if described is not None and described.numel() == 3 else (0,) * 3
        )
        if version != FORMAT_VERSION or not 0 <= number < len(FORMAT_NAMES) or tensors["scales"] is None:
            raise CheckpointError(f"{self.path}: layer {name!r}: expected scales and packed_format, version 1")
        given: dict[str, Any] = tensors
        weight = PackedWeight(weight_format=FORMAT_NAMES[number], group_size=group_size, name=name, **given)
        try:
            return weight.validate()
        except PackedWeightError as error:
            raise CheckpointError(f"{self.path}: layer {name!r}: {error}") from error

    def bias(self, index: int) -> Tensor | None:
        return self._state.get(f"{self.layer_names[index]}.bias")

    def others(self) -> Iterator[tuple[str, Callable[[], Tensor], str]]:
        packed = {f"{name}.{role}" for name in self.layer_names for role in (*WEIGHT_TENSORS, *LAYER_TENSORS)}
        for name, tensor in self._state.items():
            if name not in packed:
                yield name, partial(self._state.__getitem__, name), DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check(checkpoint: Checkpoint, settings: Settings) -> None:
    version = settings.integer("format_version")
    if version != FORMAT_VERSION:
        raise UnsupportedFormat(f"{settings.file}: format_version {version} is not read; known: {FORMAT_VERSION}")


def _read(layer: Layer, settings: Settings, options: ReadOptions) -> PackedWeight:
    layer.expect("packed_format", ("I32",), 3)
    version, format_id, group_size = (int(value) for value in layer.read("packed_format"))
    if version != FORMAT_VERSION or not 0 <= format_id < len(FORMAT_NAMES):
        raise layer.error(
            "packed_format",
            f"expected version {FORMAT_VERSION} and a format of 0..{len(FORMAT_NAMES) - 1}, got {version}, {format_id}",
        )
    entry = settings.section("layers").section(layer.name)
    stated = (entry.text("weight_format"), entry.integer("group_size"))
    if stated != (FORMAT_NAMES[format_id], group_size):
        raise layer.error(
            "packed_format", f"{FORMAT_NAMES[format_id]}, {group_size} does not agree with the settings' {stated}"
        )
    tensors: dict[str, Any] = {role: layer.read(role) for role in (*WEIGHT_TENSORS, "bias") if role in layer}
    if "scales" not in tensors:
        raise layer.error("b_packed", "scales are missing")
    weight = PackedWeight(weight_format=FORMAT_NAMES[format_id], group_size=group_size, source="native", **tensors)
    found = _describe(weight)
    for key, value in entry.items():  # sizes are not compared, because only a part of the layer may have been read
        if key.endswith("_dtype") and found.get(key) != value:
            role = key.replace("scale_dtype", "scales").replace("super_dtype", "super_scales").removesuffix("_dtype")
            role = role if role in layer else "scales"
            raise layer.error(role, f"{key}: expected {value!r} as in the settings, got {found.get(key)!r}")
    return weight


FORMAT = DirectoryFormat(
    name="native",
    title="This package's own format (docs/formats/formats.md)",
    methods=(METHOD,),
    variants=(("every weight format", "any"),),
    refused=(("format_version other than 1", "unknown"),),
    anchors={".b_packed": "b_packed"},
    roles=endings(*WEIGHT_TENSORS[1:], *LAYER_TENSORS),
    axes={
        "b_packed": ("K/8", "N"),
        "b_high": ("H", "N"),
        "scales": ("G", "N"),
        "zeros": ("G", "N"),
        "super_scales": ("S", "N"),
        "super_zeros": ("S", "N"),
        "global_scale": ("N",),
        "perm": ("order",),
        "bias": ("N",),
    },
    check=_check,
    listed=lambda settings: set(settings.section("layers")),
    read=_read,
)
