"""Huge pages for the memory of large CPU weights."""

from torch import Tensor

from torch_marlin_metal import extension


def prefer_huge_pages(tensor: Tensor) -> Tensor:
    """Advises Linux to back a tensor's memory with huge pages, and returns the tensor.

    Call this function before the tensor is filled, because existing pages do not change. The advice covers only huge
    pages (2 MB) that lie entirely in the tensor, so the process never uses more memory. Results do not change. The
    function does nothing for tensors on other devices, on other systems, and without the compiled extension. The advice
    has no effect if huge pages are disabled.
    """
    is_real = type(tensor) is Tensor  # a fake tensor has no memory
    if is_real and tensor.device.type == "cpu" and extension.refusal is None:
        extension.native.prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor
