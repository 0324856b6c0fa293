"""The object `layer.weight` of a packed layer: dtype, device and shape, and an error for everything else."""

from typing import Any, NoReturn

import torch

NO_TENSOR = (
    "got the weight of a packed layer, which has only dtype, device, shape, ndim, size(), dim(), numel() and "
    "requires_grad; call the layer, or layer.dequantize() for the values"
)
# Python looks up these methods on the class, so `__getattr__` does not see them.
OPERATORS = (
    *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv"),
    *("floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "matmul", "rmatmul", "imatmul", "neg", "pos", "abs"),
    *("lt", "le", "gt", "ge", "invert", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rshift"),
    *("getitem", "setitem", "len", "iter", "contains", "float", "int", "index", "array"),
)


class WeightInfo:
    """Replaces `layer.weight` for models that read its dtype, device or shape. It is not a tensor.

    Raises:
        TypeError: a torch function or a Python operator was applied to the object.
        AttributeError: another attribute of a tensor was read, or an attribute was set, which would be lost.
    """

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    ndim: int
    requires_grad: bool

    def __init__(self, dtype: torch.dtype, device: torch.device, shape: torch.Size) -> None:
        vars(self).update(dtype=dtype, device=device, shape=shape, ndim=len(shape), requires_grad=False)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def __repr__(self) -> str:
        return f"WeightInfo(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int | float | torch.Tensor):  # the comparison would be False for any weight
            raise TypeError(f"weight.__eq__: {NO_TENSOR}")
        return NotImplemented

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"weight.{name}: {NO_TENSOR}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "requires_grad" or value:
            raise AttributeError(f"weight.{name} = ...: {NO_TENSOR}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raises an error for every torch function. This keeps nn.TransformerEncoderLayer off its fused path."""
        raise TypeError(f"{getattr(func, '__name__', func)}: {NO_TENSOR}")


def _refusal(name: str) -> Any:
    def refuse(self: WeightInfo, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"weight.{name}: {NO_TENSOR}")

    return refuse


for _name in OPERATORS:
    setattr(WeightInfo, f"__{_name}__", _refusal(f"__{_name}__"))
