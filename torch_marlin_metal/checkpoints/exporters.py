"""Converts packed layers to the formats of other programs. Refuses layers that a format cannot represent exactly."""

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_marlin_metal.checkpoints.errors import UnsupportedFormat
from torch_marlin_metal.checkpoints.formats.gptq import ONES
from torch_marlin_metal.checkpoints.grouped import SIGN, SYMMETRIC, ZERO_POINT
from torch_marlin_metal.checkpoints.options import check_choice, typed
from torch_marlin_metal.formats import GROUP_SIZES, weight_format
from torch_marlin_metal.packed_weight import SCALE_BLOCK, PackedWeight
from torch_marlin_metal.repack import pack_awq, pack_awq_zeros, pack_codes, pack_gptq, pack_gptq_zeros, unpack_planes


def _refuse(weight: PackedWeight, target: str, reason: str) -> UnsupportedFormat:
    return UnsupportedFormat(f"layer {weight.name!r}: not exported to {target} without loss: {reason}")


def _integer_zeros(weight: PackedWeight, target: str) -> Tensor:
    """Returns the uint8 zero points `[G, N]` of a weight with integer codes. Raises UnsupportedFormat for others."""
    fmt = weight_format(weight.weight_format)
    if fmt.code_kind != "integer" or fmt.zeros_role == "bias":
        raise _refuse(weight, target, f"{weight.weight_format} is not integer codes with zero points")
    if fmt.zeros_role == "none":
        return torch.full(weight.scales.shape, fmt.fixed_offset, dtype=torch.uint8, device=weight.b_packed.device)
    assert weight.zeros is not None
    if weight.zeros.dtype != torch.uint8 or int(weight.zeros.max()) > fmt.largest_code:
        raise _refuse(weight, target, f"its zero points are not codes of 0 to {fmt.largest_code}")
    return weight.zeros


def _in_words(weight: PackedWeight) -> PackedWeight:
    """Multiplies two-level scales into one level, and widens integer codes of 5 or 6 bits to 8."""
    weight, fmt = weight.one_level(), weight_format(weight.weight_format)
    if not fmt.high_bits or fmt.zeros_role == "bias":
        return weight
    codes = unpack_planes(weight.b_packed, weight.b_high, fmt.code_bits)
    if fmt.zeros_role == "none":
        codes += SIGN[8] - fmt.fixed_offset
    name = (SYMMETRIC if fmt.zeros_role == "none" else ZERO_POINT)[8]
    return replace(weight, b_packed=pack_codes(codes, 8), b_high=None, weight_format=name)


def _bits(weight: PackedWeight) -> int:
    return weight_format(weight.weight_format).code_bits


def _packed_zeros(zeros: Tensor, bits: int, version: int) -> Tensor:
    if bits == 4:
        return pack_gptq_zeros(zeros, version)
    words = zeros.contiguous().view(torch.int32)
    return words - ONES[8] if version == 1 else words


def _g_idx(weight: PackedWeight) -> Tensor:
    in_order = torch.arange(weight.K, dtype=torch.int32, device=weight.b_packed.device) // weight.group_size
    if weight.perm is None:
        return in_order
    return torch.empty_like(in_order).index_copy_(0, weight.perm.long(), in_order)


def _stated_group_size(weight: PackedWeight) -> int:
    return weight.group_size if weight.group_size in GROUP_SIZES else -1


def _strategy(weight: PackedWeight) -> dict[str, Any]:
    """Returns the compressed-tensors keys for scales per row ("channel"), per group or per block."""
    if weight.has_block_scales:
        return {"strategy": "block", "group_size": None, "block_structure": (SCALE_BLOCK, SCALE_BLOCK)}
    size = _stated_group_size(weight)
    return {"strategy": "channel", "group_size": None} if size == -1 else {"strategy": "group", "group_size": size}


class Exporter(Protocol):
    """Converts layers to one target format. Call `tensors` once for each layer, then `settings`."""

    def tensors(self, weight: PackedWeight) -> dict[str, Tensor]:
        """Returns the layer's tensors by name within the layer, or raises UnsupportedFormat."""
        ...

    def settings(self) -> dict[str, Any]:
        """Returns the `quantization_config` for the layers that `tensors` converted. There must be at least one."""
        ...

    @property
    def has_layers(self) -> bool: ...


@dataclass
class GptqExporter:
    """Converts layers to GPTQ's layout.

    Args:
        version: 1 ("gptq") stores each zero point minus one, 2 ("gptq_v2") stores it unchanged. A layer with a zero
            point of 0 needs version 2.
    """

    version: int = 1
    layers: dict[str, tuple[int, int]] = field(default_factory=dict)  # layer's name -> (bits, group size)
    symmetric: bool = True
    act_order: bool = False

    def __post_init__(self) -> None:
        check_choice("version", self.version, (1, 2))

    def tensors(self, weight: PackedWeight) -> dict[str, Tensor]:
        """Returns qweight, qzeros, scales and g_idx."""
        weight = _in_words(weight)
        zeros, bits = _integer_zeros(weight, "GPTQ"), _bits(weight)
        if weight.N % (32 // bits):
            raise _refuse(weight, "GPTQ", f"N={weight.N} is not a multiple of {32 // bits}")
        if self.version == 1 and int(zeros.min()) == 0:
            reason = "a zero point of 0, which readers of version 1 take differently"
            raise _refuse(weight, "GPTQ version 1", f"{reason}; {typed('version', 2)} stores it")
        self.layers[weight.name] = (bits, _stated_group_size(weight))
        self.symmetric &= weight_format(weight.weight_format).is_symmetric
        self.act_order |= weight.perm is not None
        return {
            "qweight": pack_gptq(weight.b_packed, perm=weight.perm, code_bits=bits),
            "qzeros": _packed_zeros(zeros, bits, self.version),
            "scales": weight.scales,
            "g_idx": _g_idx(weight),
        }

    @property
    def has_layers(self) -> bool:
        return bool(self.layers)

    def settings(self) -> dict[str, Any]:
        """Returns GPTQModel's keys. `dynamic` lists the layers without the most common bits and group size."""
        bits, group_size = common = Counter(self.layers.values()).most_common(1)[0][0]
        settings: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "group_size": group_size}
        settings |= {"pack_dtype": "int32", "desc_act": self.act_order, "sym": self.symmetric, "lm_head": False}
        settings["checkpoint_format"] = {1: "gptq", 2: "gptq_v2"}[self.version]
        others = {
            name: {"group_size": own[1]} | ({} if own[0] == bits else {"bits": own[0]})
            for name, own in self.layers.items()
            if own != common
        }
        if others:
            settings["dynamic"] = {f"+:^{re.escape(name)}$": entry for name, entry in others.items()}
        return settings


@dataclass
class AwqExporter:
    """Converts layers to AutoAWQ's gemm layout. All layers share one group size, and act-order is not supported."""

    group_size: int | None = None

    def tensors(self, weight: PackedWeight) -> dict[str, Tensor]:
        """Returns qweight, qzeros and scales."""
        weight = weight.one_level()
        zeros = _integer_zeros(weight, "AWQ")
        if _bits(weight) != 4:
            raise _refuse(weight, "AWQ", f"{weight.weight_format} has {_bits(weight)} bits, AWQ's layout has 4")
        if weight.N % 8:
            raise _refuse(weight, "AWQ", f"N={weight.N} is not a multiple of 8")
        if weight.perm is not None:
            raise _refuse(weight, "AWQ", "it has act-order")
        stated = _stated_group_size(weight)
        if self.group_size not in (None, stated):
            raise _refuse(weight, "AWQ", f"its group size is {stated}, but {self.group_size} in earlier layers")
        self.group_size = stated
        return {"qweight": pack_awq(weight.b_packed), "qzeros": pack_awq_zeros(zeros), "scales": weight.scales}

    @property
    def has_layers(self) -> bool:
        return self.group_size is not None

    def settings(self) -> dict[str, Any]:
        """Returns AutoAWQ's keys."""
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.group_size,
            "zero_point": True,
            "version": "gemm",
        }


@dataclass
class CompressedTensorsExporter:
    """Converts layers to compressed-tensors' formats: integers, E4M3, MXFP8, NVFP4 or MXFP4. A model may mix them."""

    layers: dict[str, tuple[str, Any]] = field(default_factory=dict)  # layer's name -> (format, items of its scheme)

    def tensors(self, weight: PackedWeight) -> dict[str, Tensor]:
        """Returns weight_packed, weight_scale and further tensors, which depend on the weight format."""
        weight = _in_words(weight)
        fmt, bits = weight_format(weight.weight_format), _bits(weight)
        if fmt.code_kind == "e4m3":
            return self._e4m3(weight)
        if fmt.has_coded_scales:
            return self._fp4(weight)
        zeros, symmetric = _integer_zeros(weight, "compressed-tensors"), fmt.is_symmetric
        scheme = {"num_bits": bits, "type": "int", "symmetric": symmetric, **_strategy(weight)}
        scheme |= {"actorder": None if weight.perm is None else "group"}
        self.layers[weight.name] = "pack-quantized", tuple(scheme.items())
        tensors = {
            "weight_packed": pack_gptq(weight.b_packed, perm=weight.perm, code_bits=bits).t(),
            "weight_scale": weight.scales.t(),
            "weight_shape": torch.tensor([weight.N, weight.K], device=weight.b_packed.device),
        }
        if not symmetric:
            padded = torch.nn.functional.pad(zeros, (0, -weight.N % (32 // bits)))
            tensors["weight_zero_point"] = _packed_zeros(padded, bits, 2).t()
        if weight.perm is not None:
            tensors["weight_g_idx"] = _g_idx(weight)
        return tensors

    def _e4m3(self, weight: PackedWeight) -> dict[str, Tensor]:
        if weight.perm is not None:
            raise _refuse(weight, "compressed-tensors", "it has act-order")
        codes = weight.b_packed.t().contiguous().view(torch.float8_e4m3fn)
        scheme = {"num_bits": 8, "type": "float", "symmetric": True, **_strategy(weight)}
        coded = weight_format(weight.weight_format).has_coded_scales
        if coded:
            scheme |= {"scale_dtype": "torch.uint8"}
        self.layers[weight.name] = "mxfp8-quantized" if coded else "float-quantized", tuple(scheme.items())
        return {"weight": codes, "weight_scale": weight.scales.t()}

    def _fp4(self, weight: PackedWeight) -> dict[str, Tensor]:
        packed = weight.b_packed.t().contiguous().view(torch.uint8)
        tensors = {"weight_packed": packed, "weight_scale": weight.scales.t()}
        if weight_format(weight.weight_format).scale_coding == "e8m0":
            scheme = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
            scheme |= {"scale_dtype": "torch.uint8"}
            self.layers[weight.name] = "mxfp4-pack-quantized", tuple(scheme.items())
            return tensors
        given = weight.global_scale
        multiplier = torch.ones(1, device=weight.b_packed.device) if given is None else given.reshape(-1)
        divisor = 1 / multiplier
        if divisor.numel() != 1 or not torch.equal(1 / divisor, multiplier):
            raise _refuse(weight, "compressed-tensors", "its global scale is not the inverse of one fp32 number")
        scheme = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
        scheme |= {"scale_dtype": "torch.float8_e4m3fn"}
        self.layers[weight.name] = "nvfp4-pack-quantized", tuple(scheme.items())
        scales = weight.scales.t().contiguous().view(torch.float8_e4m3fn)
        return tensors | {"weight_scale": scales, "weight_global_scale": divisor}

    @property
    def has_layers(self) -> bool:
        return bool(self.layers)

    def settings(self) -> dict[str, Any]:
        """Returns compressed-tensors' keys. The targets of each scheme are the names of its layers."""
        names_of: dict[tuple[str, Any], list[str]] = {}
        for name, key in self.layers.items():
            names_of.setdefault(key, []).append(name)
        groups = [(format_name, dict(scheme), names) for (format_name, scheme), names in names_of.items()]
        formats = {format_name for format_name, _, _ in groups}
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{number}": {"format": format_name, "targets": names, "weights": scheme}
                for number, (format_name, scheme, names) in enumerate(groups)
            },
            "ignore": [],
        }


EXPORTERS: dict[str, type[GptqExporter] | type[AwqExporter] | type[CompressedTensorsExporter]] = {
    "gptq": GptqExporter,
    "awq": AwqExporter,
    "compressed-tensors": CompressedTensorsExporter,
}
