"""Builds NVFP4, MXFP4 and MXFP8 weights. The readers of several checkpoint formats share these functions."""

import torch
from torch import Tensor

from torch_marlin_metal.packed_weight import PackedWeight

MX_BLOCK = 32
NVFP4_BLOCK = 16
NVFP4_LARGEST = 448.0 * 6.0  # E4M3's largest scale times E2M1's largest code
E8M0_ONE = 127
# Format -> (mask of the magnitude bits in a word, words in a block). Codes are zero if these bits are all 0.
MAGNITUDES = {"mxfp4": (0x77777777, 4), "mxfp8": (0x7F7F7F7F, 8)}


def nvfp4(
    b_packed: Tensor, scales: Tensor, global_scale: Tensor | None, bias: Tensor | None, source: str
) -> PackedWeight:
    """Builds an NVFP4 weight from E4M3 codes `scales [K/16, N]` and the `global_scale` that multiplies them."""
    return PackedWeight(
        b_packed=b_packed,
        scales=scales.contiguous(),
        weight_format="nvfp4",
        group_size=NVFP4_BLOCK,
        global_scale=None if global_scale is None else global_scale.float().reshape(-1),
        bias=bias,
        source=source,
    )


def untiled(stored: Tensor, N: int, blocks: int) -> Tensor:
    """Returns scale codes `[blocks, N]` of a file that stores them in padded tiles of 128 rows x 4 blocks.

    A tile is stored as `[32, 4, 4]`: the scale of row r and block b is element (r % 32, r // 32, b). cuBLAS reads
    scales in this order (see "block scaling factors" in its documentation).
    """
    across = -(-blocks // 4)
    rows = stored.reshape(-1, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return rows.reshape(-1, 4 * across)[:N, :blocks].t()


def mx(b_packed: Tensor, scales: Tensor, weight_format: str, bias: Tensor | None, source: str) -> PackedWeight:
    """Builds a weight of "mxfp4" or "mxfp8" from E8M0 codes `scales [K/32, N]`.

    If all codes of a block are zero, the block's scale has no effect, and programs store any exponent there. ggml
    stores exponent code 0, the scale 2^-127, which is too small for the operators. Blocks of zeros therefore get the
    scale 1.
    """
    outside = (scales < 16) | (scales > 240)
    if bool(outside.any()):
        mask, words = MAGNITUDES[weight_format]
        magnitudes = b_packed & mask
        blocks = torch.nn.functional.pad(magnitudes, (0, 0, 0, -magnitudes.shape[0] % words)).reshape(
            -1, words, magnitudes.shape[1]
        )
        empty = (blocks == 0).all(dim=1)
        scales = torch.where(outside & empty & (scales != 255), E8M0_ONE, scales)
    return PackedWeight(
        b_packed=b_packed,
        scales=scales.to(torch.uint8).contiguous(),
        weight_format=weight_format,
        group_size=MX_BLOCK,
        bias=bias,
        source=source,
    )
