"""Reuses one run of the compiler's front end for all specializations of a kernel.

Metal's compiler reads the source once, and a pipeline sets the values of the function constants later. Here, the front
end's LLVM text has an external variable for each function constant of an integer type, and a specialization defines the
variable. Constants of other types have their values in the C++ text, so their specializations share nothing.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..entries import FunctionConstant
from ..tools import store

_VARIABLE = re.compile(r"^@sm_constant_(\d+) = external (?:hidden )?constant (i\d+)(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class FrontEnd:
    """The front end's result for a kernel.

    Attributes:
        llvm: LLVM text that no pass has touched.
        constants: name and index of each function constant, in the order of the source.
    """

    llvm: str
    constants: tuple[tuple[str, int], ...]

    def with_values(self, values: Mapping[str, str]) -> str:
        """Inserts the values of function constants into the LLVM text. The values are C text, by name or by index."""

        def define(match: re.Match[str]) -> str:
            name, index = self.constants[int(match[1])]
            value = integer(values.get(name, values.get(str(index), "")))
            return f"@sm_constant_{match[1]} = internal constant {match[2]} {value}{match[3]}"

        return _VARIABLE.sub(define, self.llvm)


def integer(value: str) -> int:
    """Returns the value of a C integer or boolean literal."""
    return int(value == "true") if value in ("true", "false") else int(value.rstrip("uUlL"))


def of(llvm: str, constants: Sequence[FunctionConstant]) -> FrontEnd:
    return FrontEnd(llvm, tuple((c.name, c.index) for c in constants))


def save(path: Path, front_end: FrontEnd) -> None:
    """Writes a front end's result to a cache file."""
    store(path, zlib.compress(json.dumps([front_end.llvm, front_end.constants]).encode(), 1))


def load(path: Path) -> FrontEnd:
    llvm, constants = json.loads(zlib.decompress(path.read_bytes()))
    return FrontEnd(llvm, tuple((name, index) for name, index in constants))
