"""Huge pages for the memory of large weights on the CPU."""

from torch import Tensor

from torch_marlin_metal import extension


def prefer_huge_pages(tensor: Tensor) -> Tensor:
    """Advises Linux to back a tensor's memory with huge pages, and returns the tensor.

    Call this before the tensor is filled, because pages that exist already stay as they are. The advice covers only
    the huge pages (2 MB) that lie within the tensor, so the process never takes more memory. It changes no result.
    The function does nothing for tensors on other devices, on other systems, and without the compiled extension. The
    advice has no effect if huge pages are switched off.
    """
    is_real = type(tensor) is Tensor  # a fake tensor has no memory
    if is_real and tensor.device.type == "cpu" and extension.refusal is None:
        extension.native.prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor
