"""Fuzzes every reader for some minutes and counts the results; test_damaged_checkpoints.py does so briefly.

    python tests/checkpoints/fuzz_readers.py --minutes 10

The run damages copies of every real checkpoint of tests/data/layers, and of a checkpoint in the package's own format. A
damaged copy must be read, or refused with CheckpointError, within seconds. Anything else ends the run and prints the
seed that repeats the case.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table
from test_damaged_checkpoints import DATA, NATIVE, WRITTEN, prepare, try_damaged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    slowest = 0.0
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as work:
        copies = {folder: prepare(folder, Path(work) / str(i)) for i, folder in enumerate([*WRITTEN, NATIVE])}
        turn = 0
        while time.monotonic() < end:
            turn += 1
            for folder, copy in copies.items():
                name = folder.relative_to(DATA).parts[0]
                seed = f"{options.seed}-{turn}-{name}-{folder.name}"
                began = time.monotonic()
                try:
                    outcome = try_damaged(copy, random.Random(seed))
                except Exception:
                    traceback.print_exc()
                    shutil.copytree(copy, Path("fuzz-failure"), dirs_exist_ok=True)
                    sys.exit(f"{folder}: seed {seed!r}; the damaged copy is in fuzz-failure")
                slowest = max(slowest, time.monotonic() - began)
                counts.setdefault(name, Counter())[outcome] += 1
    table = Table("reader", "read", "refused", caption=f"seed {options.seed}, slowest {slowest:.2f} s")
    for name, counted in counts.items():
        table.add_row(name, str(counted["read"]), str(counted["refused"]))
    total = sum(counts.values(), Counter())
    table.add_row("all", str(total["read"]), str(total["refused"]))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
