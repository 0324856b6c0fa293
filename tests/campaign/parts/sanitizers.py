"""The C++ tests of the CPU kernels, vector kernels included, under ThreadSanitizer or AddressSanitizer with UBSan."""

import os
import random
import tempfile
from pathlib import Path

from tests.cpu.test_cpu_kernels import build, run

KINDS = {
    "ASan and UBSan": ("-Og", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "TSan": ("-Og", "-fsanitize=thread"),
}
PROGRAMS = {"cpu_kernels_test": ["3"], "cpu_weights_test": ["3"], "cpu_mlstm_test": ["3"]}


def case(rng: random.Random, work: Path) -> str:
    """Runs one program. Programs are built once for each machine and each state of the sources."""
    del work
    kind, program = rng.choice(sorted(KINDS)), rng.choice(sorted(PROGRAMS))
    folder = Path(tempfile.gettempdir()) / f"campaign_sanitizers_{os.getuid()}"
    folder.mkdir(exist_ok=True)
    done = run(build(folder, *KINDS[kind])[program], *PROGRAMS[program])
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    assert done.stdout.endswith(" 0 failed\n")
    return f"{kind}: {program}"
