"""Loads the compiled extension, which registers `torch.ops.torch_marlin_metal.*`.

If the extension is missing, or does not match this torch version or these Python files, the import warns and states the
reason. Checkpoints can still be inspected and converted without the extension. Every operator and function of the
extension raises `ExtensionError`; there is no fallback.
"""

import importlib
import platform
import warnings
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from torch_marlin_metal import interface, interrupt, layouts, source_tree

BUILD_COMMAND = "`pip install --no-build-isolation --force-reinstall --no-deps .` in the source tree"
WHAT_WORKS = (
    "Until then only checkpoints can be inspected and converted, with slower code; every operator raises an error."
)


class ExtensionError(RuntimeError):
    """The compiled extension cannot be used. The message states the reason and the command that repairs it."""


class Unavailable:
    """A placeholder for an operator, a function or a namespace of an extension that cannot be used."""

    def __init__(self, name: str, reason: str) -> None:
        self._name = name
        self._reason = reason

    def __getattr__(self, name: str) -> "Unavailable":
        if name.startswith("_"):  # Python and other packages test any object for such optional methods
            raise AttributeError(name)
        # "default" is an operator's overload. Error messages name only the operator.
        return self if name == "default" else Unavailable(f"{self._name}.{name}", self._reason)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise ExtensionError(f"{self._name}: {self._reason}")


def _load() -> Any:
    try:
        compiled: Any = importlib.import_module("torch_marlin_metal._C")
    except ModuleNotFoundError as error:
        raise ExtensionError(
            source_tree.why_not_the_installed()
            or f"no compiled extension for Python {platform.python_version()} is installed. Build it: {BUILD_COMMAND}."
        ) from error
    except ImportError as error:  # its message may contain a symbol's name of hundreds of characters
        raise ExtensionError(
            f"the compiled extension does not load with torch {torch.__version__}, most likely "
            f"because it was built for another torch. Build it for this one: {BUILD_COMMAND}."
        ) from error
    built_for = compiled.torch_version
    if built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ExtensionError(
            f"the extension was built for torch {built_for}, but this is torch "
            f"{torch.__version__}. Build it again: {BUILD_COMMAND}, or `pip install torch=={built_for}`."
        )
    difference = interface.first_difference(compiled)
    if difference is not None:
        raise ExtensionError(
            "the compiled extension was built from another version of the sources than the Python files: "
            f"{difference}. Build it again: {BUILD_COMMAND}, or `python setup.py build_ext --inplace` for an "
            "editable installation."
        )
    return compiled


native: Any
#: The reason why the extension cannot be used, or None if it is loaded.
refusal: str | None = None
try:
    native = _load()
    _refusals = layouts.install()
except ExtensionError as error:
    refusal = str(error)
    native = Unavailable("torch_marlin_metal._C", refusal)
    # An extension that was refused after loading has already registered its operators. They are hidden too.
    vars(torch.ops)["torch_marlin_metal"] = Unavailable("torch.ops.torch_marlin_metal", refusal)


def warn() -> None:
    """Warns if the extension cannot be used, and states the reason."""
    if refusal is not None:
        warnings.warn(f"torch_marlin_metal: {refusal} {WHAT_WORKS}", RuntimeWarning, stacklevel=2)


if not interrupt.is_command():  # the command line calls `warn` itself and formats the warning
    warn()


def require(caller: str) -> None:
    """Raises an error if the extension cannot be used.

    Some functions work for a long time before their first operator, or treat an operator's error as a fault of the
    model. They call this function first.

    Args:
        caller: the function or argument that needs the extension, for the message.

    Raises:
        ExtensionError: the extension cannot be used.
    """
    if refusal is not None:
        raise ExtensionError(f"{caller}: {refusal}")


@dataclass(frozen=True)
class CpuCapability:
    """The instruction sets that the CPU kernels use on this machine.

    Attributes:
        isa: the instruction set in use: "portable", "avx2", "avx512", "amx" or "neon".
        reason: a sentence that explains the choice.
        features: the CPU features that the kernels can use and that this CPU and operating system provide.
        available: instruction sets that `TORCH_MARLIN_METAL_CPU_ISA` can select on this machine.
    """

    isa: str
    reason: str
    features: tuple[str, ...]
    available: tuple[str, ...]


def cpu_capability() -> CpuCapability:
    """Returns the instruction set that the CPU kernels use, with the reason.

    Raises:
        RuntimeError: `TORCH_MARLIN_METAL_CPU_ISA` names an instruction set that is unknown or not available here.

    Examples:
        >>> isinstance(tmm.cpu_capability().isa, str)  # "avx512", for example
        True
    """
    isa, reason, features, available = native.cpu_capability()
    return CpuCapability(isa, reason, tuple(features), tuple(available))
