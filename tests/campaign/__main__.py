"""Runs the parts of the campaign in turn, each in separate processes, and prints the findings.

    python -m tests.campaign --minutes 10
    python -m tests.campaign --part files --case 1700000000-files-12

The first command runs the campaign. The second repeats one case, which its seed determines completely. The exit code is
1 if there is a finding.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaign.parts import PARTS, Part

ROOT = Path(__file__).parents[2]
MOST_FINDINGS = 5  # a part ends after this many findings, because most further ones have the same cause


@dataclass
class Record:
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    findings: list[tuple[str, str]] = field(default_factory=list)


def run_part(part: Part, seed: int, seconds: float, record: Record) -> None:
    """Runs cases for some time.

    If a process dies or hangs, this is a finding, and the next case runs in a new process.
    """
    began, number = time.monotonic(), 0
    cpu_before = cpu_seconds()
    while (left := seconds - (time.monotonic() - began)) > 0 and len(record.findings) < MOST_FINDINGS:
        command = [
            sys.executable,
            "-m",
            "tests.campaign.worker",
            part.name,
            f"{seed}-{part.name}",
            str(number),
            str(left),
        ]
        worker = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        errors: list[str] = []
        reader = threading.Thread(target=lambda worker=worker, errors=errors: errors.append(worker.stderr.read()))
        reader.start()
        limit = threading.Timer(left + part.limit, os.killpg, (worker.pid, signal.SIGKILL))
        limit.start()
        case = ""
        for line in worker.stdout:
            try:
                told = json.loads(line)
            except ValueError:  # a library printed this line
                continue
            if "case" in told:
                case = told["case"]
                continue
            number += 1
            record.slowest = max(record.slowest, told["seconds"])
            if "finding" in told:
                record.findings.append((case, told["finding"]))
                if len(record.findings) >= MOST_FINDINGS:
                    os.killpg(worker.pid, signal.SIGKILL)
            else:
                record.cases += 1
                record.outcomes.update(told["outcome"])
            case = ""
        code = worker.wait()
        limit.cancel()
        reader.join()
        if code == 0 or len(record.findings) >= MOST_FINDINGS:
            break
        record.findings.append((case, f"the process ended with {code}: {errors[0][-1500:].strip()}"))
        number += 1
        if not case:  # the worker ended before the first case
            break
    record.seconds = time.monotonic() - began
    record.cpu_seconds = cpu_seconds() - cpu_before


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--part", choices=PARTS, action="append", help="run only this part; may be repeated")
    parser.add_argument(
        "--without", choices=PARTS, action="append", default=[], help="leave this part out; may be repeated"
    )
    parser.add_argument("--case", help="repeat one case of --part")
    options = parser.parse_args()
    if options.case:
        command = [sys.executable, "-m", "tests.campaign.worker", options.part[0], options.case]
        sys.exit(subprocess.run(command, cwd=ROOT, check=False).returncode)
    chosen = [part for name, part in PARTS.items() if name in (options.part or PARTS) and name not in options.without]
    records = {part.name: Record() for part in chosen}
    print(f"campaign of {options.minutes:g} minutes, seed {options.seed}", flush=True)
    weights = sum(part.share for part in chosen)
    for part in chosen:
        reason = part.missing()
        if reason:
            print(f"{part.name:12} left out: {reason}", flush=True)
            continue
        record = records[part.name]
        run_part(part, options.seed, 60 * options.minutes * part.share / weights, record)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(record.outcomes.items()))
        print(
            f"{part.name:12} {record.seconds:7.0f} s, CPU {record.cpu_seconds:.0f} s, {record.cases} cases: "
            f"{counts or 'none ended'}; slowest {record.slowest:.1f} s; {len(record.findings)} findings",
            flush=True,
        )
        for case, finding in record.findings:
            print(f"  FOUND {finding}\n  repeat: python -m tests.campaign --part {part.name} --case {case}", flush=True)
    sys.exit(any(record.findings for record in records.values()))


if __name__ == "__main__":
    main()
