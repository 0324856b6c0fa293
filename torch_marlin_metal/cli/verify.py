"""`torch-marlin-metal verify`: compares two checkpoints, layer by layer and tensor by tensor."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from torch_marlin_metal.checkpoints.checkpoint import Checkpoint, open_checkpoint
from torch_marlin_metal.cli import arguments
from torch_marlin_metal.cli.output import ANSWER_IS_NO, DONE, Json, progress_bar, show
from torch_marlin_metal.convert import CheckpointError, CheckpointReader, NotQuantized, ReadOptions, open_reader
from torch_marlin_metal.packed_weight import PackedWeight
from torch_marlin_metal.printing import table
from torch_marlin_metal.repack import unpack_codes


@dataclass
class _Side:
    """One of the two checkpoints, quantized or in floats."""

    reader: CheckpointReader | None
    floats: Checkpoint | None
    positions: dict[str, int]  # name of a layer -> its index in the reader

    @classmethod
    def open(cls, path: Path, options: ReadOptions) -> "_Side":
        try:
            reader = open_reader(path, options)
        except NotQuantized:
            floats = open_checkpoint(path, options.allow_pickle, quantized=False)
            names = [name.removesuffix(".weight") for name in floats.tensors if name.endswith(".weight")]
            return cls(None, floats, dict.fromkeys(names, 0))
        return cls(reader, None, {name: position for position, name in enumerate(reader.layer_names)})

    def layer(self, name: str) -> tuple[PackedWeight | None, Tensor]:
        """Returns a layer's packed weight, or None if it is not packed, and its weight as floats `[N, K]`."""
        if self.reader is None:
            assert self.floats is not None
            return None, self.floats.read(f"{name}.weight").float()
        weight = self.reader.read(self.positions[name])
        assert weight is not None
        return weight if isinstance(weight, PackedWeight) else None, weight.dequantize().t()

    def others(self) -> dict[str, Any]:
        if self.reader is None:
            return {}
        return {name: read for name, read, _ in self.reader.others()}


def verify(
    a: arguments.Checkpoint,
    b: arguments.Checkpoint,
    tolerance: Annotated[float, typer.Option(min=0, help="Largest difference of a weight that counts as equal.")] = 0.0,
    allow_pickle: arguments.AllowPickle = False,
    gguf_names: arguments.Names = "gguf",
    as_json: Json = False,
) -> int:
    """Compares two checkpoints, layer by layer.

    Reports if the codes are equal and how much the weights differ. One checkpoint may be unquantized. Layers are
    matched by name. The exit code is 1 if a layer is missing or differs.
    """
    options = ReadOptions("dequantize", allow_pickle, gguf_names=gguf_names)
    sides = [_Side.open(path, options) for path in (a, b)]
    first, second = sides if sides[0].reader is not None else sides[::-1]
    names, others = list(first.positions), set(second.positions)
    if first.reader is None:
        raise CheckpointError(f"{a} and {b} are both unquantized: nothing to compare")
    missing = [name for name in names if name not in others]
    if second.reader is not None:
        missing += sorted(others - set(names))
    compared = []
    with progress_bar(len(names), "layer", as_json) as bar:
        for name in names:
            if name in others:
                compared.append(_compare(name, first, second))
            bar.update()
    unequal = _unequal_tensors(first, second)
    for layer in compared:
        layer["equal"] = layer["max_error"] <= tolerance
    differing = [layer["name"] for layer in compared if not layer["equal"]]
    same = bool(compared) and not (missing or differing or unequal)
    value = {"a": str(a), "b": str(b), "equal": same, "layers": compared}
    show(value | {"missing_layers": missing, "differing_tensors": unequal}, _table(value, missing, unequal), as_json)
    return DONE if same else ANSWER_IS_NO


def _compare(name: str, first: _Side, second: _Side) -> dict[str, Any]:
    (packed, weight), (other_packed, other) = first.layer(name), second.layer(name)
    if weight.shape != other.shape:
        return {"name": name, "codes": None, "max_error": float("inf"), "relative_error": float("inf")}
    codes = None
    if packed is not None and other_packed is not None:
        codes = torch.equal(_codes_in_order(packed), _codes_in_order(other_packed))
    difference = weight - other
    norm = float(other.norm())
    return {
        "name": name,
        "codes": codes,
        "max_error": float(difference.abs().max()),
        "relative_error": float(difference.norm()) / norm if norm else 0.0,
    }


def _codes_in_order(weight: PackedWeight) -> Tensor:
    codes = unpack_codes(weight.b_packed)
    return codes if weight.perm is None else torch.empty_like(codes).index_copy_(0, weight.perm.long(), codes)


def _unequal_tensors(first: _Side, second: _Side) -> list[str]:
    """Returns the names of tensors outside the layers (embeddings, norms) that are missing or differ."""
    if second.reader is None:
        return []
    one, other = first.others(), second.others()
    return [
        name
        for name in {**one, **other}
        if name not in one or name not in other or not _same_bits(one[name](), other[name]())
    ]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    same_kind = one.dtype == other.dtype and one.shape == other.shape
    return same_kind and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _table(value: dict[str, Any], missing: list[str], unequal: list[str]) -> Any:
    codes = {True: "equal", False: "differ", None: "floats"}
    rows = [
        (one["name"], codes[one["codes"]], f"{one['max_error']:.3g}", f"{one['relative_error']:.3g}")
        for one in value["layers"]
    ]
    verdict = "equal" if value["equal"] else "not equal"
    others = f"; other tensors that differ: {', '.join(unequal)}" if unequal else ""
    return table(
        f"{value['a']} against {value['b']}",
        *("layer", "codes", "largest error", "relative error"),
        rows=[*rows, *((name, "missing", "", "") for name in missing)],
        right=("largest error", "relative error"),
        caption=f"{verdict}: {len(rows)} layers compared, {len(missing)} missing{others}",
    )
