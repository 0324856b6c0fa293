"""Makes all operators refuse sparse and nested tensors with a ValueError that names the right call.

Without this module, PyTorch would raise an internal error, or list the backends of the operator. The refusals are
kernels for these tensors' own dispatch keys, so they cost nothing for dense tensors.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._pytree import tree_leaves

NAMESPACE = "torch_marlin_metal"
NESTED = "AutogradNestedTensor", "NestedTensorCPU"
OTHERS = "SparseCPU", "SparseCsrCPU", "MkldnnCPU", "QuantizedCPU"


def install() -> torch.library.Library:
    """Registers the refusals for all operators. They are active while the returned library exists."""
    library = torch.library.Library(NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{NAMESPACE}::")]
    for full in names:
        name = full.partition("::")[2]
        # In inference mode, jagged tensors have no autograd key and reach the rule of their class.
        torch.library.register_torch_dispatch(full, NestedTensor, _jagged_rule(name), lib=library)
        for key in (*NESTED, *OTHERS):
            library.impl(name, _refusal(name.partition(".")[0]), key)  # type: ignore[no-untyped-call]
    return library


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        wrong = next(tensor for tensor in tensors if what_is_wrong(tensor))
        raise ValueError(f"{name}: expected dense tensors, got {what_is_wrong(wrong)}")

    return refuse


def _jagged_rule(name: str) -> Callable[..., NoReturn]:
    refuse = _refusal(name)

    def rule(kind: type, operator: Any, types: Any, args: Any, kwargs: Any) -> NoReturn:
        refuse(*args, **(kwargs or {}))

    return rule


def what_is_wrong(tensor: Tensor) -> str:
    """Returns "" for a dense tensor, else a description of its layout and the remedy."""
    if tensor.is_nested:
        is_jagged = tensor.layout == torch.jagged
        return f"a nested tensor: pass {'.values(), the rows of all parts' if is_jagged else 'the parts of .unbind()'}"
    if tensor.layout != torch.strided:
        return f"one with the layout {tensor.layout}: use .to_dense()"
    return f"one of {tensor.dtype}: use .dequantize()" if tensor.is_quantized else ""
