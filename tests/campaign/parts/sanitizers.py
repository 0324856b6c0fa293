"""Runs the C++ tests of the CPU kernels under ThreadSanitizer, or under AddressSanitizer with UBSan.

Unlike `make test`, this part also compiles the vector kernels with sanitizers.
"""

import hashlib
import os
import random
import tempfile
from functools import cache
from pathlib import Path

from tests.cpu.test_cpu_kernels import ROOT, build, run

KINDS = {
    "ASan and UBSan": ("-Og", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "TSan": ("-Og", "-fsanitize=thread"),
}
FOLDERS = ("csrc", "kernels/shared", "tests/cpu", "tests/support")
PROGRAMS = {"cpu_kernels_test": ["3"], "cpu_weights_test": ["3"], "cpu_mlstm_test": ["3"]}


@cache
def state() -> str:
    """Returns a digest of the sources.

    The digest is part of the name of the programs' folder, so that programs of older sources do not run.
    """
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".h", ".cpp"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def case(rng: random.Random, work: Path) -> str:
    """Runs one program. Programs are built once for each machine and each version of the sources."""
    del work
    kind, program = rng.choice(sorted(KINDS)), rng.choice(sorted(PROGRAMS))
    folder = Path(tempfile.gettempdir()) / f"campaign_sanitizers_{os.getuid()}_{state()}"
    folder.mkdir(exist_ok=True)
    done = run(build(folder, *KINDS[kind])[program], *PROGRAMS[program])
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    assert done.stdout.endswith(" 0 failed\n")
    return f"{kind}: {program}"
