"""Tests that several test workers can compile in one folder with tests/support/cxx.py."""

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
