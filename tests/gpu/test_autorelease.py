"""A call that fails leaves no autorelease pool behind: what such a pool holds stays until the thread ends."""

import sys

import pytest
import torch

import torch_marlin_metal as tmm

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="counts the software Metal device's pools")


@pytest.fixture
def pools(mps):
    import softmetal

    assert softmetal.autorelease_pools() == 0
    return softmetal.autorelease_pools


def weight() -> tmm.PackedWeight:
    return tmm.quantize_weight(
        torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), "uint4b8", group_size=32
    )


def test_a_failing_compile(pools):
    import softmetal

    packed = weight().to("mps")
    for kind in ("library", "pipeline"):
        dtype = torch.float32 if kind == "library" else torch.bfloat16
        with softmetal.compiles(lambda c, kind=kind: "broken" if c.kind == kind else None), pytest.raises(RuntimeError):
            torch.ops.torch_marlin_metal.embedding(
                torch.zeros(1, dtype=torch.int64, device="mps"), packed.b_packed, packed.scales,
                weight_format="uint4b8", group_size=32, dtype=dtype,
            )  # fmt: skip
        assert pools() == 0, kind
