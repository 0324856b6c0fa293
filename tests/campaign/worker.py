"""Runs cases of one part. Prints a line of JSON before and after each case.

python -m tests.campaign.worker PART CASE                       runs one case, and prints the traceback
python -m tests.campaign.worker PART PREFIX NUMBER SECONDS      runs PREFIX-NUMBER and the cases after it, for SECONDS
"""

import json
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch

from tests.campaign.parts import PARTS


def main() -> None:
    name, seed, *rest = sys.argv[1:]
    part = PARTS[name]
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    case = part.load()
    if not rest:
        with tempfile.TemporaryDirectory() as work:
            print(f"{seed}: {case(random.Random(seed), Path(work))}")
        return
    number, end = int(rest[0]), time.monotonic() + float(rest[1])
    while time.monotonic() < end:
        began = time.monotonic()
        print(json.dumps({"case": f"{seed}-{number}"}), flush=True)
        with tempfile.TemporaryDirectory() as work:
            try:
                outcome = case(random.Random(f"{seed}-{number}"), Path(work))
                told = {"outcome": {outcome: 1} if isinstance(outcome, str) else outcome}
            except Exception:
                told = {"finding": traceback.format_exc()[-2000:]}
        print(json.dumps(told | {"seconds": time.monotonic() - began}), flush=True)
        number += 1


if __name__ == "__main__":
    main()
