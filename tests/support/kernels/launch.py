"""Launches the kernels of `kernels/` on the software Metal device, with guard bytes around each tensor."""

import functools
import json
import struct as struct_module
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from softmetal.device import Buffer, Counters, Kernel, Library, compile
from softmetal.msl.compiler import DEFAULT_VERSION

ROOT = Path(__file__).resolve().parents[3]
KERNELS = ROOT / "kernels"
# Guards are filled with 0xFF. These bytes are NaN in every floating type, and in the scale codings E4M3 and E8M0.
GUARD_BYTES = 256
CHECKED = True
# Libraries that need a later language version than the others.
VERSIONS = {"gemm/tensor": 400, "gemm/tensor_probe": 400, "experts/moe_tensor": 400}
METAL_TYPES = {"float16": "half", "bfloat16": "bfloat", "float32": "float"}
WIDE = {
    "a_row_stride",
    "a_slot_stride",
    "x_stride",
    "residual_stride",
    "gate_row",
    "up_row",
    "gate_column",
    "up_column",
}
ELEMENT_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.uint8: "uint8",
    torch.int8: "int8",
}


@functools.cache
def facts() -> dict:
    """Returns the constants, structs and kernels that kernels/shared/kernel_list.h defines."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "facts"
        source = Path(__file__).with_name("facts.cpp")
        subprocess.run(["g++", "-std=c++20", "-I", ROOT, source, "-o", program], check=True)
        return json.loads(subprocess.run([program], check=True, capture_output=True).stdout)


def number(name: str) -> int:
    return facts()["numbers"][name]


def element_type(dtype: torch.dtype | None) -> int:
    return facts()["element_types"][ELEMENT_NAMES[dtype]] if dtype is not None else 0


def parameters(struct: str, **fields: float | bytes) -> bytes:
    """Returns the bytes of a parameter struct. The C++ compiler gives the offsets of the fields. Strides have 64 bits.

    For a field that is itself a struct, pass the bytes of that struct.
    """
    layout = facts()["structs"][struct]
    data = bytearray(layout["end"])
    for name, value in fields.items():
        wide = name in WIDE or "." in name
        code = f"{len(value)}s" if isinstance(value, bytes) else "f" if isinstance(value, float) else "Iq"[wide]
        struct_module.pack_into(f"<{code}", data, layout[name], value)
    return bytes(data)


class Guarded(Buffer):
    """Uninitialized device memory between guards. Checked mode reports accesses after the memory's last byte."""

    def __init__(self, length: int, *, lead: int = 0) -> None:
        allocation = np.full(length + lead + 2 * GUARD_BYTES + 256, 0xFF, np.uint8)
        start = -allocation.ctypes.data % 256
        self.memory = allocation[start:]
        offset = GUARD_BYTES + lead
        super().__init__(self.memory[: offset + length], offset)
        self.written = np.zeros(offset + length, np.uint8)

    def fill(self, position: int, data: np.ndarray) -> None:
        first = self.offset + position
        self.array[first : first + data.nbytes] = data
        self.written[first : first + data.nbytes] = 1

    def read(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Checks that the guards are unchanged, and returns the tensor that a kernel wrote."""
        assert (self.memory[: self.offset] == 0xFF).all(), "written before the output"
        assert (self.memory[self.array.nbytes :] == 0xFF).all(), "written past the output"
        return torch.from_numpy(self.array[self.offset :].copy()).view(dtype).reshape(shape)


def place(tensor: torch.Tensor, *, offset: int = 0, row_stride: int | None = None) -> Guarded:
    """Copies a tensor to device memory, `offset` elements after an aligned address.

    Each row starts `row_stride` elements after the row before.
    Guards and gaps contain NaN, and checked mode treats both as uninitialized memory.
    """
    rows = tensor.contiguous().reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor.contiguous().reshape(1, -1)
    step = (row_stride or rows.shape[1]) * rows.element_size()
    data = rows.view(torch.uint8).numpy()
    buffer = Guarded((len(data) - 1) * step + data.shape[1], lead=offset * rows.element_size())
    for i, row in enumerate(data):
        buffer.fill(i * step, row)
    return buffer


def place_output(shape: tuple[int, ...], dtype: torch.dtype) -> Guarded:
    return Guarded(int(np.prod(shape)) * dtype.itemsize)


def absent() -> Buffer:
    """Returns the buffer to bind for an absent tensor. A kernel that reads this buffer causes a fault."""
    return place_output((4,), torch.int32)


def compile_library(
    library: str, constants: Mapping[str, int | bool] | None = None, *, replaced: tuple[str, str] = ("", ""), **options
) -> Library:
    """Compiles a file of `kernels/` in the language version that the host uses.

    `replaced` is a pair: a text of the file, and the text to put in its place.
    """
    path = KERNELS / f"{library}.metal"
    text = path.read_text()
    assert replaced[0] in text
    return compile(
        text.replace(*replaced) if replaced[0] else text,
        constants=dict(constants or {}),
        file_name=str(path),
        include_paths=[str(KERNELS.parent)],
        version=VERSIONS.get(library, DEFAULT_VERSION),
        **options,
    )


@functools.lru_cache(maxsize=512)
def _specialise(
    kernel: str,
    weight_format: str,
    element: str,
    constants: tuple[tuple[str, int | bool], ...],
    checked: bool,
    extra_defines: tuple[str, ...],
) -> Kernel:
    library, naming, _ = facts()["kernels"][kernel]
    name = kernel
    defines = [*extra_defines]
    if naming:  # compiles only the tested function, as the host does
        weight = f"WeightFormat::{weight_format}, " if naming >= 2 else ""
        name = "_".join([kernel, *([weight_format] if naming >= 2 else []), element])
        defines += [f"MARLIN_ONLY={kernel}<{weight}{METAL_TYPES[element]}>", f'MARLIN_ONLY_NAME="{name}"']
    return compile_library(library, dict(constants), checked=checked, defines=defines).kernel(name)


def launch(
    kernel: str,
    buffers: Mapping[str, Buffer | bytes],
    *,
    group: tuple[int, ...],
    groups: tuple[int, ...],
    weight_format: str = "",
    element: str = "",
    constants: Mapping[str, int | bool] | None = None,
    threadgroup_bytes: int = 0,
    checked: bool = CHECKED,
    seed: int = 1,
    perturb_seed: int = 0,
    defines: Sequence[str] = (),
) -> Counters:
    """Runs one kernel.

    Keys of `buffers` are slot names without `kSlot`. Slots without a key get the buffer of absent tensors.
    """
    values = dict.fromkeys(facts()["constants"][:-1], 0) | dict(constants or {})
    typed = tuple(sorted(values.items()))
    handle = _specialise(kernel, weight_format, element, typed, checked, tuple(defines))
    declared = facts()["kernels"][kernel][2]
    slots = (i for i in range(number("kSlotCount")) if i != number("kSlotParams"))
    bound: dict[int, Buffer | bytes] = {i: absent() for i in slots if declared >> i & 1}
    bound |= {number(f"kSlot{name}"): buffer for name, buffer in buffers.items()}
    assert all(declared >> slot & 1 for slot in bound), f"{kernel} does not declare one of {sorted(buffers)}"
    memory = {0: threadgroup_bytes} if threadgroup_bytes else None
    return handle.launch(
        group=group,
        groups=groups,
        buffers=bound,
        threadgroup_memory=memory,
        seed=seed,
        perturb_seed=perturb_seed,
    )


def launch_elementwise(
    kernel: str, columns: int, rows: int, buffers: Mapping[str, Buffer | bytes], *, layers: int = 1, **options
) -> Counters:
    width, height = number("kElementwiseWidth"), number("kElementwiseHeight")
    groups = (-(-columns // width), -(-rows // height), layers)
    return launch(kernel, buffers, group=(width, height, 1), groups=groups, **options)
