"""Implements `torch.mps.Stream`, which exists since torch 2.15.

Without this module, `torch.mps.Stream` cannot be instantiated in a torch without Metal.
"""

from typing import Any

import torch


def _initialize(self: Any, stream_id: int | None = None) -> None:
    if stream_id is None:
        self._stream = torch.Stream(device="mps")  # takes one from the pool
    else:
        kind = torch.accelerator.current_stream().device_type
        self._stream = torch.Stream(stream_id=stream_id, device_index=0, device_type=kind)


def install() -> None:
    """Makes `torch.mps.Stream` and its functions work. Does nothing if torch does not have them."""
    native: Any = torch._C
    base = getattr(native, "_MPSStreamBase", None)
    if base is None:
        return
    base.__new__ = lambda cls, *args, **kwargs: object.__new__(cls)
    base.__init__ = _initialize
    base.__eq__ = lambda self, other: isinstance(other, base) and self.stream_id == other.stream_id
    base.__hash__ = lambda self: hash(self.stream_id)
    base.stream_id = property(lambda self: self._stream.stream_id)
    base.synchronize = lambda self: self._stream.synchronize()
    native._mps_getCurrentStream = lambda: torch.accelerator.current_stream()
    native._mps_setStream = lambda stream: torch.accelerator.set_stream(stream._stream)
