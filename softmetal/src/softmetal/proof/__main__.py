"""Runs kernels in Apple's compiled form and in ours, and compares the results: `python -m softmetal.proof --help`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from . import (
    attention,
    elementwise,
    gathered,
    matmul,
    quantized,
    references,
    rows,
    tensors,
    torch_products,
    vectors,
)
from .case import Case, Outcome, compare, sources
from .mistakes import MISTAKES, Mistake


def all_cases() -> list[Case]:
    """Returns the cases of all families."""
    families = (quantized, matmul, attention, rows, elementwise, vectors, gathered, tensors)
    return [case for family in families for case in family.cases()]


def all_references() -> list[references.Reference]:
    """Returns the kernels without public source, of all families."""
    return [*references.references(), *torch_products.references()]


def outcomes(cases: Iterable[Case], *, seed: int = 0, checked: bool = False) -> Iterator[Outcome]:
    """Compares the two compiled forms of each case, Apple's and ours, and yields the outcomes."""
    chosen = list(cases)
    together = sources(chosen)
    for case in chosen:
        yield compare(case, together[case], seed=seed, checked=checked)


def prove(mistake: Mistake) -> Outcome:
    """Compares the two forms of the kernel that should show a mistake, after making the mistake in our form."""
    case = next(c for c in all_cases() if c.kernel == mistake.kernel)
    return compare(case, (case.instance,), mistake=mistake)


def _say(*lines: str) -> None:
    print(*lines, sep="\n    ", flush=True)


def _compare_all(chosen: list[Case], seed: int, checked: bool) -> Counter[str]:
    """Prints the cases that are not equal, and the counts of each family."""
    counts: dict[str, Counter[str]] = {}
    elements = runs = 0
    for outcome in outcomes(chosen, seed=seed, checked=checked):
        kinds = counts.setdefault(outcome.case.family, Counter())
        kinds["failed" if outcome.error else "equal" if outcome.is_equal else "different"] += 1
        if outcome.case.verify is not None:
            kinds["right" if outcome.is_right else "wrong"] += 1
        elements, runs = elements + outcome.elements, runs + outcome.runs
        if outcome.error:
            _say(f"failed: {outcome.case.kernel}", *outcome.error.split("\n")[:6])
        elif outcome.differences:
            _say(f"different: {outcome.case.kernel}", *map(str, outcome.differences[:3]))
        if outcome.wrong:
            _say(f"wrong: {outcome.case.kernel}", *outcome.wrong[:3])
    for family, kinds in counts.items():
        _say(f"{family}: {', '.join(f'{n} {k}' for k, n in kinds.items())}")
    total = sum(counts.values(), Counter())
    _say(f"our compile and Apple's, {len(chosen)} kernels, {runs} runs, {elements} elements written: "
         f"{', '.join(f'{total[k]} {k}' for k in ('equal', 'different', 'failed'))}; "
         f"compared with fp64: {total['right']} right, {total['wrong']} wrong")  # fmt: skip
    return total


def _check_references(chosen: list[references.Reference], seed: int, checked: bool) -> int:
    wrong: Counter[str] = Counter()
    families = Counter(r.family for r in chosen)
    for reference in chosen:
        messages = references.check(reference, seed=seed, checked=checked)
        wrong[reference.family] += bool(messages)
        if messages:
            _say(f"wrong: {reference.kernel}", *messages[:3])
    for family, count in families.items():
        _say(f"{family}: {count - wrong[family]} of {count} right")
    _say(f"Apple's compile and torch's CPU results, {len(chosen)} kernels: {wrong.total()} wrong")
    return wrong.total()


def _check_racing() -> int:
    """Runs kernels with known races in checked mode. Returns the number of kernels without a report."""
    missed = 0
    for reference in references.racing():
        messages = references.check(reference, checked=True)
        is_seen = bool(messages) and "race" in messages[0]
        missed += not is_seen
        _say(f"{'race, as it should be' if is_seen else 'NO RACE SEEN'}: {reference.kernel}",
             *(messages[0].split("\n")[:1] if messages else []))  # fmt: skip
    return missed


def table() -> str:
    """Returns the comparisons as a Markdown table, with a row for each form that is compared with Apple's."""
    rows = [(Counter(c.family for c in all_cases()), "our compile, bit for bit"),
            (Counter(r.family for r in all_references()), "torch on the CPU, within a bound")]  # fmt: skip
    lines = ["| compared with | kernels | families |", "|---|---|---|"]
    for families, other in rows:
        names = ", ".join(f"{family} {count}" for family, count in sorted(families.items()))
        lines.append(f"| {other} | {families.total()} | {names} |")
    return "\n".join(lines) + "\n"


def _prove_all() -> int:
    missed = 0
    for mistake in MISTAKES:
        outcome = prove(mistake)
        missed += outcome.is_equal or bool(outcome.error)
        found = outcome.error or (str(outcome.differences[0]) if outcome.differences else "NOT CAUGHT")
        _say(f"mistake: {mistake.name}", f"{mistake.kernel}: {found}")
    _say(f"{len(MISTAKES) - missed} of {len(MISTAKES)} deliberate mistakes caught")
    return missed


def _main() -> int:
    parser = argparse.ArgumentParser(prog="softmetal.proof", description=__doc__)
    parser.add_argument("--family", help="only this family")
    parser.add_argument("--kernel", default="", help="only kernels whose name holds this")
    parser.add_argument("--checked", action="store_true", help="in checked mode: no kernel may break a rule")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--prove", action="store_true", help="only: compile with deliberate mistakes, which must show")
    parser.add_argument("--table", action="store_true", help="only: print what is compared")
    options = parser.parse_args()
    if options.table:
        print(table(), end="")
        return 0
    started = time.monotonic()
    if options.prove:
        failed = _prove_all()
    else:
        wanted = [c for c in all_cases() if options.family in (None, c.family) and options.kernel in c.kernel]
        chosen = [r for r in all_references() if options.family in (None, r.family) and options.kernel in r.kernel]
        total = _compare_all(wanted, options.seed, options.checked)
        failed = (
            total["different"]
            + total["failed"]
            + total["wrong"]
            + _check_references(chosen, options.seed, options.checked)
        )
        if not options.family and not options.kernel:
            failed += _check_racing()
    _say(f"{time.monotonic() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(_main())
