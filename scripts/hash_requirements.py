"""Writes .ci/requirements.txt: the installed packages, each with the hash of its wheel.

    .venv/bin/python scripts/hash_requirements.py

Run this script after a change of the packages in pyproject.toml. It needs x86-64 Linux, Python 3.11 and the .venv of
`make lint`. It omits torch, this package, and packages without a wheel, which CI installs by version.
"""

import hashlib
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TARGET = Path(__file__).parents[1] / ".ci" / "requirements.txt"
LEFT_OUT = {"torch", "torch-marlin-metal", "pip", "hqq"}
HEAD = """\
# Written by scripts/hash_requirements.py for x86-64 Linux and Python 3.11. .ci/run installs it with --require-hashes.
"""


def name_of(distribution: str) -> str:
    """Returns a package's name in the normalized form of package indices."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def requirements(wheels: Path) -> str:
    """Returns a line for each wheel in a folder: the name, the version and the hash."""
    lines = []
    for wheel in wheels.glob("*.whl"):
        name, version, *_ = wheel.name.split("-")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{name_of(name)}=={version} --hash=sha256:{digest}\n")
    return HEAD + "".join(sorted(lines))


def main() -> None:
    """Downloads the wheels and writes the file."""
    installed = {name_of(found.name): found.version for found in importlib.metadata.distributions()}
    pins = [f"{name}=={version}" for name, version in sorted(installed.items()) if name not in LEFT_OUT]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", folder, *pins], check=True)
        TARGET.write_text(requirements(Path(folder)))


if __name__ == "__main__":
    main()
