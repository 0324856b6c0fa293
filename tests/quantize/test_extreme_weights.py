"""At the ends of the float range, quantize_weight is as exact as in the middle, or refuses the weight."""

import pytest
import torch

from tests.support.reference import FORMATS
from torch_marlin_metal.quantize.weight import quantize_weight


def relative_error(w: torch.Tensor, *arguments: object, **options: object) -> float:
    made = quantize_weight(w, *arguments, **options).validate()
    return float((made.dequantize().T.double() - w.double()).norm() / w.double().norm())


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("method", ["rtn", "mse"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_at_the_ends_of_the_range_is_exact_or_refused(name, method, scale_dtype, everything) -> None:
    """Scales a weight by powers of two: by all of them with --everything.

    A sample has those near the ends of float16, and every fourth of the others. Each format has its own sample.
    """
    w = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    expected = relative_error(w, name, None, method, scale_dtype=scale_dtype)
    assert expected < 0.2
    held, refusals = [], set()
    turn = FORMATS.index(name)
    exponents = [e for e in range(-140, 127) if everything or (e - turn) % 4 == 0 or abs(abs(e) - 15) < 4]
    for exponent in exponents:
        try:
            got = relative_error(w * 2.0**exponent, name, None, method, scale_dtype=scale_dtype)
        except ValueError as error:
            refusals.add(str(error).partition(" of ")[0].partition(" value")[0])
        else:
            assert got <= 1.2 * expected, exponent
            held.append(exponent)
    assert refusals <= {
        f"quantize_weight: {rest}"
        for rest in ("scale_dtype: the largest scale", "scale_dtype: the largest bias", "w: expected a largest")
    }
    first = exponents.index(held[0])
    assert held == exponents[first : first + len(held)]
    wide = name in ("nvfp4", "mxfp4") or scale_dtype != torch.float16
    assert held[0] < (-105 if wide else -15)
    assert held[-1] > (95 if wide else 13)


@pytest.mark.parametrize("name", FORMATS)
def test_a_weight_of_zeros_stays_zero(name) -> None:
    assert not quantize_weight(torch.zeros(4, 64), name).validate().dequantize().any()
