"""The page of features has a row for each feature, with a place and a test; test_docs.py checks that both exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "tests/features.md").read_text()
# The features of each of the five documents. A row may change, but must not be removed.
FEWEST = {
    "Primitives": 18,
    "Stripes": 20,
    "The fused product and its rivals": 18,
    "The mLSTM": 18,
    "Tiles, occupancy and profiles": 24,
}


def test_each_feature_has_a_place_and_a_test() -> None:
    sections = dict(re.findall(r"^## (.+)\n\n((?:\|.*\n)+)", PAGE, flags=re.MULTILINE))
    assert sections.keys() == FEWEST.keys()
    for title, table in sections.items():
        rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
        assert len({feature for feature, *_ in rows}) >= FEWEST[title], title
        for feature, where, tried in rows:
            assert re.fullmatch(r"`[\w/.-]+`(, `[\w/.-]+`)*", where), feature
            assert re.fullmatch(r"`[\w/]+\.py::\w+`(, `[\w/]+\.py::\w+`)*", tried), feature


def test_the_idea_has_its_sources() -> None:
    page = (ROOT / "README.md").read_text()
    assert "https://arxiv.org/abs/2408.11743" in page and "https://github.com/IST-DASLab/marlin" in page
