"""The list of parts. A part is a module with a function `case(rng, work)` that runs one case and returns its outcome.

The outcome is a word, or a count for each of several words. `case` raises if the package breaks a promise. All random
choices come from `rng`. `work` is an empty folder.
"""

import importlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Case = Callable[[random.Random, Path], str | Counter[str]]


@dataclass(frozen=True)
class Part:
    """A kind of random case.

    Attributes:
        name: the name of the part's module.
        share: the part's weight when the campaign divides its time.
        limit: seconds after which a case is reported as hanging.
        needs: the modules that the part imports and that may be missing.
    """

    name: str
    share: float
    limit: float = 180.0
    needs: tuple[str, ...] = ()

    def load(self) -> Case:
        found: Case = importlib.import_module(f"tests.campaign.parts.{self.name}").case
        return found

    def missing(self) -> str:
        for need in self.needs:
            try:
                importlib.import_module(need)
            except (ImportError, RuntimeError) as error:
                return str(error)
        return ""


PARTS = {
    part.name: part
    for part in (
        Part("files", 3),
        Part("coverage", 2, limit=600, needs=("atheris",)),
        Part("operators", 3),
        Part("arguments", 1),
        Part("conversions", 3, limit=600),
        Part("allocations", 2, limit=600),
        Part("threads", 1),
        Part("models", 2, needs=("transformers",)),
        Part("device", 2, limit=600, needs=("softmetal",)),
        Part("sanitizers", 2, limit=1800),
    )
}
