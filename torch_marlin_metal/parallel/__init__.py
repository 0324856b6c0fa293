"""Packed weights split over the processes of `torch.distributed`."""

from torch_marlin_metal.parallel.split import join_columns, join_rows, reorder_columns, split_columns, split_rows
from torch_marlin_metal.parallel.styles import MarlinColwiseParallel, MarlinRowwiseParallel

__all__ = [
    "MarlinColwiseParallel",
    "MarlinRowwiseParallel",
    "join_columns",
    "join_rows",
    "reorder_columns",
    "split_columns",
    "split_rows",
]
