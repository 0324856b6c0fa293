"""Implements `torch.mps.compile_shader` on the software device. The classes match those that torch returns on a Mac."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_uint64, c_void_p
from typing import Any

import torch

from .native import Argument, Library

_CASTS = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


class ShaderKernel:
    """One kernel of a library. A call encodes a dispatch on the current stream."""

    def __init__(self, native: Library, library: ShaderLibrary, name: str) -> None:
        self._native, self._owner = native, library
        error = c_void_p()
        self._pipeline = native.new_pipeline_named(library._handle, name.encode(), ctypes.byref(error))
        message = native.take_text(error.value)
        if message is not None:
            raise RuntimeError(message)
        limits = (c_uint64 * 3)()
        native.pipeline_limits(self._pipeline, limits)
        self.max_threads_per_threadgroup, self.thread_execution_width, self.static_thread_group_memory_length = limits

    def __del__(self) -> None:
        if getattr(self, "_pipeline", None):
            self._native.release(self._pipeline)

    def __call__(
        self,
        *args: Any,
        threads: int | Sequence[int] | None = None,
        group_size: int | Sequence[int] | None = None,
        arg_casts: str | dict[int, str] | None = None,
        error_buf_idx: int | None = None,
    ) -> None:
        """Encodes one dispatch.

        Args:
            args: mps tensors, numbers (int64 or float32 unless cast), lists of numbers, or lists of mps tensors.
            threads: threads of the grid, 1 to 3 numbers. The default is the number of elements of the first tensor.
            group_size: threads of a threadgroup, with as many numbers as `threads`.
            arg_casts: the element type of numbers, for all arguments or by argument index.
            error_buf_idx: slot of the stream's error buffer. An error that a kernel reports there is raised as
                torch.AcceleratorError at the next wait.

        Raises:
            TypeError: an argument has none of these types.
            ValueError: a threadgroup has more threads than the kernel allows.
            RuntimeError: the dispatch breaks a rule of Metal.
        """
        grid = _dimensions("threads", threads)
        if grid is None:
            first = next((a for a in args if isinstance(a, torch.Tensor)), None)
            if first is None:
                raise RuntimeError(
                    "compile_shader: threads: expected a number, because no argument is a tensor, got None"
                )
            grid = [first.numel()]
        most: int = self.max_threads_per_threadgroup
        group = _dimensions("group_size", group_size) or [min(most, grid[0]) if len(grid) == 1 else most]
        if group_size is not None and len(group) != len(grid):
            raise RuntimeError("size and group_size must have same number of dimensions")
        if math.prod(group) > most:
            raise ValueError(f"Threadgroup size exceeds {most} limit")
        keep: list[object] = []
        count = len(args) if error_buf_idx is None else max(len(args), error_buf_idx + 1)
        arguments = (Argument * count)()
        for i, value in enumerate(args):
            cast = arg_casts.get(i) if isinstance(arg_casts, dict) else arg_casts
            arguments[i] = self._argument(i, value, cast, keep)
        if error_buf_idx is not None:
            arguments[error_buf_idx] = Argument(self._native.error_buffer())
        sizes = [(c_uint64 * 3)(*[*dimensions, 1, 1][:3]) for dimensions in (grid, group)]
        error = self._native.dispatch(self._pipeline, arguments, count, *sizes)
        message = self._native.take_text(error)
        if message is not None:
            raise RuntimeError(message)

    def _argument(self, index: int, value: Any, cast: str | None, keep: list[object]) -> Argument:
        if isinstance(value, torch.Tensor) and value.is_mps:
            return Argument(value.untyped_storage().data_ptr(), value.storage_offset() * value.element_size())
        resident: list[int] = []
        if isinstance(value, torch.Tensor):
            if value.dim() != 0:
                raise RuntimeError("Passed CPU tensor to MPS op")
            numbers = value.float() if value.dtype == torch.float64 else value
        elif isinstance(value, list | tuple) and value and all(isinstance(v, torch.Tensor) for v in value):
            numbers = torch.tensor([self._address(v) for v in value], dtype=torch.int64)
            # Kernels reach these tensors through their addresses. On a Mac, that works although PyTorch does not call
            # useResource for them. This device therefore treats them as resident.
            resident = [v.untyped_storage().data_ptr() for v in value]
        else:
            numbers = _numbers(index, value, cast)
        numbers = numbers.contiguous()
        handles = (c_void_p * len(resident))(*resident)
        keep += [numbers, handles]
        size = numbers.numel() * numbers.element_size()
        return Argument(None, 0, numbers.data_ptr(), size, handles, len(resident))

    def _address(self, tensor: torch.Tensor) -> int:
        if not tensor.is_mps:
            raise RuntimeError("Passed CPU tensor to MPS op")
        start: int = self._native.gpu_address(tensor.untyped_storage().data_ptr())
        return start + int(tensor.storage_offset()) * tensor.element_size()


def _numbers(index: int, value: Any, cast: str | None) -> torch.Tensor:
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values or not all(isinstance(v, int | float) for v in values):
        raise TypeError(
            f"compile_shader: argument {index}: expected an mps tensor, a number, or a list of either, got {value!r}"
        )
    if cast is not None and cast not in _CASTS:
        raise RuntimeError(f"compile_shader: arg_casts: expected one of {', '.join(_CASTS)}, got {cast!r}")
    default = torch.float32 if any(isinstance(v, float) for v in values) else torch.int64
    return torch.tensor(values, dtype=_CASTS[cast] if cast is not None else default)


def _dimensions(name: str, value: int | Sequence[int] | None) -> list[int] | None:
    if value is None:
        return None
    sizes = [value] if isinstance(value, int) else list(value)
    if not 1 <= len(sizes) <= 3:
        raise RuntimeError(f"compile_shader: {name}: expected 1 to 3 numbers, got {value!r}")
    return sizes


class ShaderLibrary:
    """Kernels compiled from Metal source. Each kernel is an attribute.

    Args:
        native: the device library.
        source: the text.

    Raises:
        SyntaxError: the source does not compile. The compiler's messages follow.
    """

    def __init__(self, native: Library, source: str) -> None:
        self._native = native
        self._kernels: dict[str, ShaderKernel] = {}
        error = c_void_p()
        self._handle = native.new_shader_library(source.encode(), ctypes.byref(error))
        message = native.take_text(error.value)
        if message is not None:
            raise SyntaxError(f"failed to compile {source} with\n{message}")
        self._names = (native.take_text(native.function_names(self._handle)) or "").split()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._native.release(self._handle)

    def __dir__(self) -> list[str]:
        return list(self._names)

    def __getattr__(self, name: str) -> ShaderKernel:
        if name not in self._names:
            raise AttributeError(f"the shader library has no function {name!r}; it has {', '.join(self._names)}")
        if name not in self._kernels:
            self._kernels[name] = ShaderKernel(self._native, self, name)
        return self._kernels[name]
