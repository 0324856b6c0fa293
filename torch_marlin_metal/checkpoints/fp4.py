"""E2M1 weights with coded block scales, shared by the formats that contain them."""

import torch
from torch import Tensor

from torch_marlin_metal.packed_weight import PackedWeight

MXFP4_BLOCK = 32
NVFP4_BLOCK = 16
E8M0_ONE = 127


def nvfp4(
    b_packed: Tensor, scales: Tensor, global_scale: Tensor | None, bias: Tensor | None, source: str
) -> PackedWeight:
    """Puts an NVFP4 weight together; `scales` are E4M3 codes `[K/16, N]`, `global_scale` multiplies."""
    return PackedWeight(
        b_packed=b_packed,
        scales=scales.contiguous(),
        weight_format="nvfp4",
        group_size=NVFP4_BLOCK,
        global_scale=None if global_scale is None else global_scale.float().reshape(-1),
        bias=bias,
        source=source,
    )


def mxfp4(b_packed: Tensor, scales: Tensor, bias: Tensor | None, source: str) -> PackedWeight:
    """Puts an MXFP4 weight together; `scales` are E8M0 codes `[K/32, N]`.

    A block whose codes are all zero has value zero under any scale, and writers leave arbitrary exponents there (ggml:
    0, which is 2^-127). That block gets the scale 1, and its neighbours keep theirs.
    """
    outside = (scales < 16) | (scales > 240)
    if bool(outside.any()):
        magnitudes = b_packed & 0x77777777  # E2M1 is zero if its three magnitude bits are
        blocks = torch.nn.functional.pad(magnitudes, (0, 0, 0, -magnitudes.shape[0] % 4)).reshape(
            -1, 4, magnitudes.shape[1]
        )
        empty = (blocks == 0).all(dim=1)
        scales = torch.where(outside & empty & (scales != 255), E8M0_ONE, scales)
    return PackedWeight(
        b_packed=b_packed,
        scales=scales.to(torch.uint8).contiguous(),
        weight_format="mxfp4",
        group_size=MXFP4_BLOCK,
        bias=bias,
        source=source,
    )
