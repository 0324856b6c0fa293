"""The table of measured choices, a small JSON file with a section for each machine."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs
import torch

from torch_marlin_metal.extension import native
from torch_marlin_metal.gpu.tuning.products import Product
from torch_marlin_metal.version import __version__

FILE_VERSION = 1

_reading = threading.Lock()
_was_read = False


@dataclass(frozen=True)
class Machine:
    """The machine and the versions of a measurement, which is ignored on any other machine or version.

    Attributes:
        gpu: the name that the GPU reports, for example "Apple M2 Max".
        cores: number of GPU cores.
        torch: PyTorch's version.
        package: this package's version.
    """

    gpu: str
    cores: int
    torch: str
    package: str

    @classmethod
    def current(cls) -> Machine:
        """Returns this machine.

        Raises:
            RuntimeError: torch has no mps device here.
        """
        if not torch.backends.mps.is_available():
            raise RuntimeError("tuning: torch has no mps device on this machine: there is no GPU to tune for")
        name, cores = torch.backends.mps.get_name(), torch.backends.mps.get_core_count()
        return cls(name, cores, torch.__version__, __version__)


@dataclass(frozen=True)
class TunedRange:
    """The fastest variant of a product for a range of row counts. A range from `tune` has a single row count.

    Attributes:
        product: the weight's shape and format, and the activations' dtype.
        first_rows: smallest row count of the range.
        last_rows: largest row count of the range.
        variant: the fastest variant, as a name for `gemm(variant=...)`.
        seconds: the median time of `variant`.
        model_variant: the choice of the planner's model, without measurements.
        speedup: time of `model_variant` divided by the time of `variant`, the median over the rounds. It is 1 if the
            difference is within the noise, and `variant` is then `model_variant`. It is also 1 if `model_variant` is in
            `faults`.
        times: the median time in seconds of each measured candidate, by name.
        faults: the reasons why candidates were not measured, by name: wrong results, or an error.
    """

    product: Product
    first_rows: int
    last_rows: int
    variant: str
    seconds: float
    model_variant: str
    speedup: float
    times: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TuningTable:
    """The measured choices for one machine.

    Examples:
        >>> import pathlib
        >>> from torch_marlin_metal.gpu.tuning.table import Machine
        >>> table = tmm.tuning.TuningTable(Machine("Apple M1", 8, "2.13.0", "0.1.0"), ())
        >>> table.machine.gpu
        'Apple M1'
    """

    machine: Machine
    ranges: tuple[TunedRange, ...]

    def merged(self, other: TuningTable) -> TuningTable:
        """Returns this table with the choices of `other`, which replace the choices for equal products."""
        replaced = {entry.product for entry in other.ranges}
        kept = tuple(entry for entry in self.ranges if entry.product not in replaced)
        return TuningTable(self.machine, kept + other.ranges)


def table_path() -> Path:
    """Returns the path of the table: `TORCH_MARLIN_METAL_TUNED`, or else `tuned.json` in the user's cache folder.

    Examples:
        >>> tmm.tuning.table_path().name
        'tuned.json'
    """
    named = os.environ.get("TORCH_MARLIN_METAL_TUNED")
    return Path(named) if named else platformdirs.user_cache_path("torch_marlin_metal") / "tuned.json"


def load(path: Path | None = None) -> list[TuningTable]:
    """Returns the tables in a file, one per machine, or an empty list if the file does not exist.

    Raises:
        ValueError: the file is not a table of choices. The message names the file.

    Examples:
        >>> import pathlib
        >>> from torch_marlin_metal.gpu.tuning.table import Machine
        >>> table = tmm.tuning.TuningTable(Machine("Apple M1", 8, "2.13.0", "0.1.0"), ())
        >>> file = tmm.tuning.save(table, pathlib.Path("loaded.json"))
        >>> tmm.tuning.load(file) == [table]
        True
    """
    path = path or table_path()
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text())
        if content["version"] != FILE_VERSION:
            raise ValueError(f"{path}: version: expected {FILE_VERSION}, got {content['version']}")
        return [
            TuningTable(Machine(**table["machine"]), tuple(_range(entry) for entry in table["ranges"]))
            for table in content["tables"]
        ]
    except (LookupError, TypeError, AttributeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a table of tuned products: {type(error).__name__} {error}") from error


def save(table: TuningTable, path: Path | None = None) -> Path:
    """Adds a table to a file and returns the path. Replaces older choices for the same machine and products.

    Concurrent calls wait for each other, so no choice is lost.

    Raises:
        ValueError: the file exists but is damaged. It is not changed.
        OSError: the file cannot be written. It is not changed.

    Examples:
        >>> import pathlib
        >>> from torch_marlin_metal.gpu.tuning.table import Machine
        >>> table = tmm.tuning.TuningTable(Machine("Apple M1", 8, "2.13.0", "0.1.0"), ())
        >>> tmm.tuning.save(table, pathlib.Path("saved.json")).name
        'saved.json'
    """
    path = path or table_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        tables = load(path)
        mine = [old for old in tables if old.machine == table.machine]
        merged = mine[0].merged(table) if mine else table
        others = [old for old in tables if old.machine != table.machine]
        content = {"version": FILE_VERSION, "tables": [dataclasses.asdict(entry) for entry in (*others, merged)]}
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=1)
            os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    return path


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Waits for other processes and threads that save into the folder. The lock is released if the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def use(table: TuningTable | None) -> None:
    """Makes `gemm(variant="auto")` on mps use the choices in a table. With None, the planner's model chooses again.

    Raises:
        ValueError: the table belongs to another machine or contains an unknown variant.

    Examples:
        >>> tmm.tuning.use(None)  # back to the planner's own choices
    """
    if table is not None and table.machine != Machine.current():
        raise ValueError(f"tuning.use: table: expected one of {Machine.current()}, got one of {table.machine}")
    native.set_tuned([_row(entry) for entry in table.ranges] if table is not None else [])


def use_saved(path: Path | None = None) -> bool:
    """Uses the table for this machine from a file. Returns True if the file contains such a table.

    If the file is damaged or cannot be read, this function warns and the planner's model chooses.

    Examples:
        >>> import pathlib
        >>> tmm.tuning.use_saved(pathlib.Path("nothing-was-saved.json"))
        False
    """
    path = path or table_path()
    if not torch.backends.mps.is_available():
        return False
    try:
        machine = Machine.current()
        for table in load(path):
            if table.machine == machine:
                use(table)
                return True
    except (ValueError, OSError) as error:
        warnings.warn(f"torch_marlin_metal: tuned choices are not used: {error}", stacklevel=2)
    return False


def use_saved_once() -> None:
    """Calls `use_saved` once per process. The planner calls this before its first choice for this machine's GPU."""
    global _was_read
    with _reading:  # Python releases the GIL while a thread waits for this lock, so the lock cannot deadlock
        if not _was_read:
            use_saved()
            _was_read = True


def _row(entry: TunedRange) -> tuple[str, str, int, int, int, int, int, str]:
    product = entry.product
    return (
        product.weight_format,
        product.dtype,
        min(product.group_size, product.K),
        product.K,
        product.N,
        entry.first_rows,
        entry.last_rows,
        entry.variant,
    )


def _range(entry: dict[str, Any]) -> TunedRange:
    found = TunedRange(**{**entry, "product": Product(**entry["product"])})
    product = found.product
    numbers = (product.N, product.K, product.group_size, found.first_rows, found.last_rows)
    texts = (product.weight_format, product.dtype, found.variant)
    if not all(type(number) is int and 0 < number < 1 << 31 for number in numbers) or not all(
        type(text) is str for text in texts
    ):
        raise TypeError(f"expected sizes of 31 bits and names, got {[*numbers, *texts]}")
    return found
