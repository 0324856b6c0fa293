"""Rounds scales and biases to two levels: integer codes of groups times a floating value for 256 k."""

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_marlin_metal.packed_weight import SUPER_BLOCK


@dataclass(frozen=True)
class Level:
    """Codes of groups, uint8 or int8 `[R, G]`, and the factor of each block's codes, `[R, B]`."""

    codes: Tensor
    values: Tensor
    blocks: Tensor  # int64 `[G]`, the block of each group

    @classmethod
    def of(cls, numbers: Tensor, group_size: int, dtype: torch.dtype, *, signed: bool) -> "Level":
        """Rounds fp32 `[R, G]` to nearest. The largest magnitude of a block has about the largest code.

        Args:
            numbers: the numbers. Without `signed`, all of them are at least 0 or all are at most 0.
            group_size: divides 256.
            dtype: dtype of the values. The values are rounded up, so that value x largest code is at least every number
                of its block.
            signed: whether the codes have the sign, as int8.
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
        if not signed:
            values = -values if bool((numbers < 0).any()) else values
        divisor = values.float()
        divisor = torch.where(divisor == 0, torch.inf, divisor)[:, blocks]
        codes = torch.round(numbers / divisor).clamp_(-reach if signed else 0, reach)
        return cls(codes.to(torch.int8 if signed else torch.uint8), values, blocks)

    def products(self) -> Tensor:
        """Returns codes times block values, fp32 `[R, G]`, as the operators compute them."""
        return self.codes.float() * self.values.float()[:, self.blocks]
