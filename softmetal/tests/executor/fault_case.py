"""A row of the table of faults: a small faulty kernel, the expected report, and the corrected kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from softmetal.device import FaultKind

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
FIRST_LINE = HEAD.count("\n") + 1


@dataclass
class Case:
    """A kernel with a fault. /*bad|good*/ marks the text that differs in the corrected kernel."""

    name: str
    kind: FaultKind
    source: str
    line: int  # the line that the report must name, counted from the kernel's first line
    report: str
    buffers: list[Any] = field(default_factory=lambda: [np.ones(64, np.float32), np.zeros(64, np.float32)])
    launch: dict[str, Any] = field(default_factory=lambda: {"groups": 1, "group": 64})
    seeds: int = 3  # number of seeds with which the faulty kernel runs

    def text(self, good: bool) -> str:
        return HEAD + re.sub(r"/\*(.*?)\|(.*?)\*/", r"\2" if good else r"\1", self.source, flags=re.DOTALL)


def floats(count: int, value: float = 1.0) -> np.ndarray:
    return np.full(count, value, np.float32)


ARGUMENTS = "device const float* x [[buffer(0)]], device float* y [[buffer(1)]]"
INDEX = "uint i [[thread_index_in_threadgroup]]"
LANE = "ushort lane [[thread_index_in_simdgroup]]"
