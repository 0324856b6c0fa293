"""Inspects the forwards of modules, copies them with other functions, and records the modules' arguments.

A forward finds functions by global names of its Python file. The replacement is a copy of the forward for which these
names refer to other functions. The file itself and the other classes in it do not change. Decorators are preserved: the
copy of a decorator's function calls the copy of the forward.
"""

import dis
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

Forward = Callable[..., Any]


def code_of(forward: Forward) -> CodeType | None:
    """Returns the code of the innermost decorated function, or None if it is not a Python function."""
    inner = inspect.unwrap(forward)
    return inner.__code__ if isinstance(inner, FunctionType) else None


def globals_of(forward: Forward) -> Iterator[tuple[str, Any]]:
    """Yields the names that the innermost decorated function uses, each with its global value or None."""
    inner = inspect.unwrap(forward)
    if isinstance(inner, FunctionType):
        yield from ((name, inner.__globals__.get(name)) for name in inner.__code__.co_names)


def function_called(forward: Forward, parameters: list[str]) -> tuple[str, FunctionType] | None:
    """Returns the name and object of the first function in a forward whose parameters start with `parameters`."""
    for name, value in globals_of(forward):
        if (
            isinstance(value, FunctionType)
            and list(inspect.signature(value).parameters)[: len(parameters)] == parameters
        ):
            return name, value
    return None


def _loaded(step: dis.Instruction) -> tuple[str, ...]:
    """Returns the local variables that an instruction loads. Since Python 3.13, one instruction may load two."""
    if not step.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "STORE_FAST_LOAD_FAST")):
        return ()
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def updated_argument(forward: Forward) -> str | None:
    """Returns the name of the argument whose method `update` a forward calls, or None."""
    code = code_of(forward)
    if code is None:
        return None
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    last: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.argval == "update" and step.opname in ("LOAD_ATTR", "LOAD_METHOD") and last and last[-1] in arguments:
            return last[-1]
        last = _loaded(step)
    return None


def reads(function: Forward, kinds: tuple[Any, ...]) -> bool:
    """Returns True if a function reads a parameter of one of these kinds, for example `**kwargs`, or is not Python."""
    code = code_of(function)
    if code is None:
        return True
    names = {p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds}
    return any(names & set(_loaded(step)) for step in dis.get_instructions(code))


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def forward_with(forward: Any, functions: dict[str, Any]) -> FunctionType | None:
    """Returns a copy of a forward in which some global names have other values.

    Returns None if a decorator's function does not have the decorated function in its closure.
    """
    names, closure = forward.__globals__, forward.__closure__
    inner = getattr(forward, "__wrapped__", None)
    if inner is None:
        # Without __name__, torch.compile uses these globals and not those of the file's module.
        names = {key: value for key, value in names.items() if key != "__name__"} | functions
    else:
        changed = forward_with(inner, functions)
        held = [_contents(cell) is inner for cell in closure or ()]
        if changed is None or not any(held):
            return None
        closure = tuple(CellType(changed) if is_held else cell for cell, is_held in zip(closure, held, strict=True))
    made = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, closure)
    made.__kwdefaults__ = forward.__kwdefaults__
    if inner is not None:
        made.__dict__["__wrapped__"] = changed
    return made


class Watched:
    """The innermost modules that received a transformers cache, and those that received rotary tables.

    Attributes:
        caches: the modules that received a cache and passed it to no other module.
        rotations: the modules that received a pair of tables `[B, S, R]` and passed it to no other module.
    """

    def __init__(self) -> None:
        self.caches: set[nn.Module] = set()
        self.rotations: set[nn.Module] = set()

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        utils = sys.modules.get("transformers.cache_utils")
        for value in (*args, *kwargs.values()):
            if utils is not None and isinstance(value, utils.Cache):
                self.caches.add(module)
            is_pair = isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, Tensor) for v in value)
            if is_pair and value[0].dim() == 3 and value[0].shape == value[1].shape:
                self.rotations.add(module)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Records the arguments of all modules of a model while the context is open."""
        modules = list(model.modules())
        handles = [module.register_forward_pre_hook(self._see, with_kwargs=True) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        for found in (self.caches, self.rotations):
            outer = {m for m in found if any(part in found for part in m.modules() if part is not m)}
            found -= outer
