"""Tests that the sources still contain the text that `make macos-mistakes` replaces by deliberate mistakes."""

import shutil
from pathlib import Path

import pytest

from build_support import macos, macos_mistakes
from softmetal.apple import api_check


@pytest.mark.parametrize("mistake", macos_mistakes.MISTAKES, ids=lambda m: m.what)
def test_the_text_that_a_mistake_replaces_is_in_the_sources(mistake: macos_mistakes.Mistake, tmp_path: Path) -> None:
    shutil.copytree(macos.ROOT / "csrc" / "mps", tmp_path / "csrc" / "mps")
    shutil.copytree(api_check.INCLUDE, tmp_path / "include")
    assert macos_mistakes.spoil(tmp_path, mistake) > 0
    assert (tmp_path / "csrc" / "mps" / mistake.source).is_file()
