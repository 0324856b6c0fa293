"""Every allocation of a product, a product with experts, a load and a conversion fails in turn. Each failure is only an exception."""

import sys

import pytest

from tests.campaign.parts import allocations

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="replaces the allocator of GNU's C library")


@pytest.mark.parametrize("of_extension", [False, True], ids=["large", "of the extension"])
@pytest.mark.parametrize(("kind", "least"), [("product", 1), ("experts", 1), ("loading", 5), ("conversion", 1)])
def test_every_allocation_may_fail(tmp_path, kind, least, of_extension) -> None:
    count, all_of_them = allocations.run(kind, 3, of_extension, tmp_path, most=2000)
    assert all_of_them
    assert count >= least
