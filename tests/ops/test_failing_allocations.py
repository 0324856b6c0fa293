"""Every allocation of a product, a product with experts, a load and a conversion fails in turn, and only raises."""

import sys

import pytest

from tests.campaign.parts import allocations

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="replaces the allocator of GNU's C library")


# A function that makes the calls, and the minimum number of failing allocations of each kind.
LEAST = {"product": 1, "experts": 1, "loading": 5, "conversion": 1}
CALLS = [(kind, 3, of_extension) for kind in LEAST for of_extension in (False, True)]


def test_every_allocation_may_fail(tmp_path) -> None:
    results = allocations.run(CALLS, tmp_path, most=2000)
    for (kind, _, of_extension), (count, all_of_them) in zip(CALLS, results, strict=True):
        assert all_of_them, (kind, of_extension)
        assert count >= LEAST[kind], (kind, of_extension)
