"""The list of parts. A part is a module with `case(rng, work)`, which makes and tries one case and returns the outcome.

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
    """One kind of attack.

    Attributes:
        name: the name of the part's module.
        share: the part's weight when the campaign divides its time.
        limit: seconds after which a case counts as hanging.
        needs: the modules that the part imports and that may be missing.
    """

    name: str
    share: float
    limit: float = 180.0
    needs: tuple[str, ...] = ()

    def load(self) -> Case:
        """Imports the module and returns its `case`."""
        found: Case = importlib.import_module(f"tests.campaign.parts.{self.name}").case
        return found

    def missing(self) -> str:
        """Returns why the part cannot run here, or an empty string."""
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
