"""`python -m softmetal.witness [--family NAME] [--kernel TEXT] [--checked] [--seed N] [--limit N]`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from . import elementwise, matmul, quantized, rows
from .case import Case, Outcome, compare, sources


def all_cases() -> list[Case]:
    """Every case, of all families."""
    return [*quantized.cases(), *matmul.cases(), *rows.cases(), *elementwise.cases()]


def outcomes(cases: Iterable[Case], *, seed: int = 0, checked: bool = False) -> Iterator[Outcome]:
    """Compares cases one after another."""
    chosen = list(cases)
    together = sources(chosen)
    for case in chosen:
        yield compare(case, together[case], seed=seed, checked=checked)


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family")
    parser.add_argument("--kernel", help="only kernels whose name holds this")
    parser.add_argument("--checked", action="store_true", help="in checked mode: neither form may break a rule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    chosen = [c for c in all_cases() if options.family in (None, c.family) and (options.kernel or "") in c.kernel]
    started, cpu = time.monotonic(), time.process_time()
    counts: dict[str, Counter[str]] = {}
    for outcome in outcomes(chosen[: options.limit], seed=options.seed, checked=options.checked):
        kind = "failed" if outcome.error else "equal" if outcome.is_equal else "different"
        counts.setdefault(outcome.case.family, Counter())[kind] += 1
        if not outcome.is_equal:
            print(f"{kind}: {outcome.case.kernel}", flush=True)
            for line in (outcome.error.split("\n")[:6] if outcome.error else map(str, outcome.differences[:3])):
                print(f"    {line}", flush=True)
    for family, kinds in counts.items():
        print(f"{family}: {', '.join(f'{n} {k}' for k, n in kinds.items())}")
    total = sum(counts.values(), Counter())
    print(f"{sum(total.values())} kernels: {', '.join(f'{total[k]} {k}' for k in ('equal', 'different', 'failed'))}; "
          f"{time.monotonic() - started:.0f} s")  # fmt: skip
    del cpu
    return int(total["equal"] != sum(total.values()))


if __name__ == "__main__":
    sys.exit(_main())
