"""Tests some of the journeys of first-time users, or all of them with --everything."""

import pytest

from tests.journeys.table import JOURNEYS, take

SAMPLE = (1, 4, 6, 9, 11)


def pytest_generate_tests(metafunc) -> None:
    metafunc.parametrize("number", JOURNEYS if metafunc.config.getoption("--everything") else SAMPLE)


@pytest.mark.filterwarnings("ignore")
def test_a_journey_ends_as_it_must(number) -> None:
    went, told = take(number)
    assert went, told
