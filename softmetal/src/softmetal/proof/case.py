"""Describes a kernel, its two compiled forms (Apple's and ours) and its launches, and compares the output bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import device
from . import libraries
from .air.compiler import load
from .mistakes import Mistake, mistaken

Array = npt.NDArray[Any]
Generator = np.random.Generator
Launches = Callable[[Generator], list["Launch"]]
KERNELS = "mlx/backend/metal/kernels"
_PREAMBLE = "#include <metal_stdlib>\nusing namespace metal;\n"
# Number of template instances that are compiled together. A larger batch parses the headers less often, but a run of
# one case then compiles more instances in vain.
_BATCH = 10

# MLX's name of an element type -> Metal's name
FLOATS = {"float32": "float", "float16": "half", "bfloat16": "bfloat16_t"}
# MLX's name of an element type -> NumPy's type. A bfloat is stored as its bits.
STORAGE: dict[str, type] = {
    **{"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "bool_": np.bool_},
    **{f"{u}int{n}": getattr(np, f"{u}int{n}") for u in ("", "u") for n in (8, 16, 32, 64)},
}


def to_bfloat(x: Array) -> Array:
    """Returns the bits of the bfloat nearest to each float (ties to even)."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def stored(x: Array, name: str) -> Array:
    """Rounds numbers to the element type with MLX's name `name`, and returns them as the kernel stores them."""
    with np.errstate(over="ignore"):
        return to_bfloat(x) if name == "bfloat16" else x.astype(STORAGE[name])


def numbers(array: Array, name: str) -> Array:
    """Returns in double precision the numbers that `stored` made."""
    if name == "bfloat16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


@dataclass
class Launch:
    """One run of a kernel, on copies of the arrays. A None in `buffers` means an unbound argument."""

    label: str
    buffers: list[Any]
    group: int | tuple[int, ...]
    groups: int | tuple[int, ...] | None = None
    threads: int | tuple[int, ...] | None = None
    threadgroup_memory: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A kernel of MLX: its name in the metallib, and its template instance in the source.

    `verify` compares the output of Apple's form with fp64. It returns an error message, or "".
    """

    family: str
    kernel: str
    headers: tuple[str, ...]
    instance: str
    launches: Launches
    constants: tuple[tuple[str, bool | int], ...] = ()
    wheel: str = libraries.MLX
    verify: Callable[[Launch, Sequence[Any]], str] | None = None


@dataclass(frozen=True)
class Difference:
    """The first element that differs between two results."""

    launch: str
    buffer: int
    element: int
    ours: str
    apples: str
    count: int
    total: int

    def __str__(self) -> str:
        return (
            f"{self.launch}: buffer {self.buffer}[{self.element}]: ours {self.ours}, Apple's {self.apples}; "
            f"{self.count} of {self.total} elements differ"
        )


@dataclass
class Outcome:
    """The outcome of a comparison. If the comparison failed before both forms ran, `error` is the message."""

    case: Case
    runs: int = 0
    elements: int = 0
    differences: list[Difference] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # results outside of their bound around fp64
    error: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether both forms ran, and both wrote equal bits in every run."""
        return not self.error and not self.differences

    @property
    def is_right(self) -> bool:
        """Whether the results were compared with fp64, and all are inside their bounds."""
        return self.case.verify is not None and not self.error and not self.wrong


def numbered(value: Any) -> Any:
    """Converts a number to constant bytes: an int to int32, a float to float32. A NumPy scalar keeps its type."""
    if isinstance(value, bool | int):
        return np.int32(value).tobytes()
    if isinstance(value, float):
        return np.float32(value).tobytes()
    return value.tobytes() if isinstance(value, np.generic) else value


def run(library: device.Library, kernel: str, launch: Launch) -> list[Any]:
    """Runs a kernel on copies of a launch's buffers. Returns the copies."""
    return counted(library, kernel, launch)[0]


def counted(library: device.Library, kernel: str, launch: Launch) -> tuple[list[Any], device.Counters]:
    """Runs a kernel on copies of a launch's buffers. Returns the copies and the counters."""
    bound = [b.copy() if isinstance(b, np.ndarray) else numbered(b) for b in launch.buffers]
    counters = library.kernel(kernel).launch(
        group=launch.group,
        groups=launch.groups,
        threads=launch.threads,
        buffers=bound,
        threadgroup_memory=launch.threadgroup_memory,
        seed=1,
    )
    return bound, counters


@functools.lru_cache(maxsize=64)
def _compiled(
    headers: tuple[str, ...],
    instances: tuple[str, ...],
    constants: tuple[tuple[str, bool | int], ...],
    checked: bool,
    mistake: Mistake | None,
    wheel: str,
) -> device.Library:
    lines = [f'#include "{KERNELS}/{h}"' for h in ("utils.h", *headers)]
    lines += [f'template [[host_name("{i}")]] [[kernel]] decltype({i}) {i};' for i in instances]
    return device.compile(
        # The cache identifies a compiled library by its source text. A deliberate mistake does not change the text, so
        # the mistake's name is added to it.
        _PREAMBLE + "\n".join([*lines, f"// {mistake.name}" if mistake else ""]),
        constants=dict(constants),
        include_paths=[str(libraries.mlx_include(wheel))],
        checked=checked,
        version=400 if wheel == libraries.MLX_WITH_TENSORS else 310,
    )


def sources(cases: Iterable[Case]) -> dict[Case, tuple[str, ...]]:
    """Returns, for each case, the instances that are compiled together, including the case's own instance."""
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.headers, case.constants, case.wheel), []).append(case)
    together = {}
    for members in groups.values():
        for start in range(0, len(members), _BATCH):
            batch = members[start : start + _BATCH]
            names = tuple(dict.fromkeys(c.instance for c in batch))
            together |= dict.fromkeys(batch, names)
    return together


def compare(
    case: Case, instances: tuple[str, ...], *, seed: int = 0, checked: bool = False, mistake: Mistake | None = None
) -> Outcome:
    """Runs both forms of a kernel on all its launches.

    Args:
        case: the kernel.
        instances: the template instances that are compiled together, including the case's own instance.
        seed: the seed of the random inputs.
        checked: whether to run in checked mode, so that each form must also obey Metal's rules.
        mistake: the mistake to make in our compile.
    """
    outcome = Outcome(case)
    try:
        apples = load(libraries.mlx_library(case.wheel), case.kernel, constants=dict(case.constants), checked=checked)
        with mistaken(mistake):
            ours = _compiled(case.headers, instances, case.constants, checked, mistake, case.wheel)
        for launch in case.launches(np.random.default_rng(seed)):
            results = run(apples, case.kernel, launch)
            _compare_launch(outcome, launch, run(ours, case.instance, launch), results)
            if case.verify is not None and (problem := case.verify(launch, results)):
                outcome.wrong.append(problem)
    except (device.CompileError, device.KernelFault, KeyError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


def _compare_launch(outcome: Outcome, launch: Launch, ours: Sequence[Any], apples: Sequence[Any]) -> None:
    outcome.runs += 1
    changed = False
    for slot, (before, a, b) in enumerate(zip(launch.buffers, ours, apples, strict=True)):
        if not isinstance(before, np.ndarray):
            continue
        raw = [x.reshape(-1).view(f"u{x.itemsize}") for x in (before, a, b)]
        changed |= bool((raw[2] != raw[0]).any())
        outcome.elements += int((raw[2] != raw[0]).sum())
        unequal = np.flatnonzero(raw[1] != raw[2])
        if unequal.size:
            at = int(unequal[0])
            outcome.differences.append(
                Difference(launch.label, slot, at, _shown(a, at), _shown(b, at), unequal.size, raw[1].size)
            )
    if not changed:
        outcome.error = f"{launch.label}: the kernel wrote nothing: the launch tests nothing"


def _shown(array: Array, at: int) -> str:
    value = array.reshape(-1)[at]
    return f"{value} ({value.tobytes()[::-1].hex()})"


def outputs(shape: int | tuple[int, ...], name: str) -> Array:
    """Returns an output array, filled with a value that no kernel writes by chance."""
    array: Array = np.empty(shape, STORAGE[name])
    array.view(np.uint8)[...] = 0x7B if name != "bool_" else 1
    return array
