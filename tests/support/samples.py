"""Samples of test cases."""

from collections import Counter
from collections.abc import Hashable, Sequence


def covering(cases: Sequence[set[Hashable]]) -> set[int]:
    """Returns the numbers of few cases that together have each part that any case has.

    Among cases with equally many new parts, it takes the one whose parts were taken least often.
    """
    left, taken, used = set().union(*cases), set(), Counter[Hashable]()
    while left:
        best = max(range(len(cases)), key=lambda i: (len(left & cases[i]), -sum(used[part] for part in cases[i])))
        left -= cases[best]
        used.update(cases[best])
        taken.add(best)
    return taken
