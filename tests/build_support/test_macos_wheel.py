"""Tests how the wheel for macOS is packed, without compiling and linking."""

import hashlib
import time
from pathlib import Path

import pytest

from build_support import macos


def test_two_packs_of_the_same_files_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setattr(macos, "OUT", folder)
        for file in (macos.MODULE, macos.CPP_LIBRARY.name):
            (folder / file).write_bytes(file.encode())
        wheel = macos.pack(folder / macos.MODULE, folder / macos.CPP_LIBRARY.name, "2.15.0")
        assert wheel.name == f"torch_marlin_metal-0.1.0+torch2.15-{macos.TAG}.whl"
        digests.append(hashlib.sha256(wheel.read_bytes()).hexdigest())
        time.sleep(2)  # dates in a zip file have a resolution of two seconds
    assert digests[0] == digests[1]
