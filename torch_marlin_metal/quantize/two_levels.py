"""Rounds scales and biases to two levels: an integer code for each group, times a floating-point value for 256 k."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_marlin_metal.packed_weight import SUPER_BLOCK


@dataclass(frozen=True)
class Level:
    """Numbers `[R, G]`, one per group, as products: the code of the group times the value of the group's block.

    Codes are uint8 or int8 `[R, G]`, values floating point `[R, B]`.
    """

    codes: Tensor
    values: Tensor
    blocks: Tensor  # int64 `[G]`, the index of each group's block

    @classmethod
    def of(cls, numbers: Tensor, group_size: int, dtype: torch.dtype, *, signed: bool) -> "Level":
        """Rounds fp32 numbers `[R, G]` to nearest. The largest magnitude in a block gets about the largest code.

        Args:
            numbers: one number per group. Without `signed`, all of them must be at least 0, or all must be at most 0.
            group_size: the group size, a divisor of 256.
            dtype: dtype of the block values. Block values are rounded up, so that block value x largest code is at
                least every number of the block.
            signed: True for int8 codes with a sign, False for uint8 codes.
        """
        rows, groups = numbers.shape
        inside = SUPER_BLOCK // group_size
        blocks = torch.arange(groups, device=numbers.device) // inside
        count = -(-groups // inside)
        padded = torch.nn.functional.pad(numbers, (0, count * inside - groups)).view(rows, count, inside)
        largest = padded.abs().amax(2)
        reach = 127 if signed else 255
        exact = largest / reach
        values = exact.to(dtype)
        values = torch.where(
            values.float() < exact, torch.nextafter(values, torch.full_like(values, torch.inf)), values
        )
        if not signed and bool((numbers < 0).any()):
            values = -values
        divisor = values.float()
        divisor = torch.where(divisor == 0, torch.inf, divisor)[:, blocks]
        codes = torch.round(numbers / divisor).clamp_(-reach if signed else 0, reach)
        return cls(codes.to(torch.int8 if signed else torch.uint8), values, blocks)

    def products(self) -> Tensor:
        """Returns codes times block values, fp32 `[R, G]`, with the operators' arithmetic."""
        return self.codes.float() * self.values.float()[:, self.blocks]
