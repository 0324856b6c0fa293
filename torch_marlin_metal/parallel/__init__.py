"""Splits packed weights over the processes of `torch.distributed`."""

from torch_marlin_metal.parallel.agreement import check_checkpoint
from torch_marlin_metal.parallel.failures import naming_failed_ranks
from torch_marlin_metal.parallel.plan import SplitPlan
from torch_marlin_metal.parallel.split import join_columns, join_rows, reorder_columns, split_columns, split_rows
from torch_marlin_metal.parallel.styles import MarlinColwiseParallel, MarlinExpertParallel, MarlinRowwiseParallel

__all__ = [
    "MarlinColwiseParallel",
    "MarlinExpertParallel",
    "MarlinRowwiseParallel",
    "SplitPlan",
    "check_checkpoint",
    "join_columns",
    "join_rows",
    "naming_failed_ranks",
    "reorder_columns",
    "split_columns",
    "split_rows",
]
