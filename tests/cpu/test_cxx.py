"""Tests that several test workers can compile in one folder with tests/support/cxx.py."""

import os
import sysconfig
from pathlib import Path

import pytest

from tests.support import cxx


def test_sources_with_the_same_name_get_different_objects(tmp_path: Path) -> None:
    found = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        source = folder / "same.cpp"
        source.write_text("int global;\n")
        found.append(cxx.objects(tmp_path, [source], [cxx.compiler()])[source])
    assert found[0] != found[1]


def test_every_request_gets_the_compilers_error(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text("#error as expected\n")
    for _ in range(2):
        with pytest.raises(AssertionError, match="as expected"):
            cxx.objects(tmp_path, [source], [cxx.compiler()])
        source.write_text("")  # would compile now, but the result of the first attempt is kept for the whole run
    assert not list(tmp_path.rglob("*.o"))


def test_objects_of_the_extension_are_current_if_it_was_linked_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cxx, "ROOT", tmp_path)
    monkeypatch.setattr(cxx, "EXTENSION", tmp_path / "build")
    source, header, kernel = (tmp_path / name for name in ("csrc/a.cpp", "csrc/a.h", "kernels/a.metal"))
    built = tmp_path / "build/csrc/a.o"
    linked = tmp_path / f"torch_marlin_metal/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert cxx.of_extension([source]) is None
    # ninja did not compile a.cpp again, because only the kernel had changed
    for time, path in enumerate((source, header, built, kernel, linked), 1):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (time, time))
    assert cxx.of_extension([source]) == {source: built}
    for changed in (source, header, kernel):
        os.utime(changed, (6, 6))
        assert cxx.of_extension([source]) is None
        os.utime(changed, (1, 1))
    for missing in (built, linked):
        content = missing.rename(tmp_path / "away")
        assert cxx.of_extension([source]) is None
        content.rename(missing)
    assert cxx.of_extension([source]) == {source: built}
