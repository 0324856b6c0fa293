"""Checks a product with the installed package on the given devices: `python check_installed.py cpu mps`.

The release workflow runs this script on every wheel, in a folder without the sources.
"""

import sys

import torch

import torch_marlin_metal as tmm


def check(device: str) -> None:
    """Compares the output of a 4-bit layer with the product of its decoded weight.

    Raises:
        SystemExit: the two differ by more than the rounding of fp32 sums.
    """
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 96)
    layer = tmm.MarlinLinear.from_packed(tmm.quantize_weight(linear.weight, "uint4b8", 128)).to(device)
    a = torch.randn(3, 256)
    wanted = a.double() @ layer.dequantize().cpu().double().T
    error = float((layer(a.to(device)).cpu().double() - wanted).abs().max())
    print(f"torch {torch.__version__}, torch_marlin_metal {tmm.__version__}, {device}: largest error {error:.1e}")
    if not error <= 1e-3:
        raise SystemExit(f"the product on {device} is wrong")


if __name__ == "__main__":
    for name in sys.argv[1:] or sys.exit("usage: python check_installed.py cpu [mps]"):
        check(name)
