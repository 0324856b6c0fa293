"""Explains the cost of a product on an Apple GPU: chips, occupancy, tiles, rooflines, explanations, traces.

Every number comes from the planner's own tables and model: `chips.h`, `cost/instruction_counts.h` and
`cost/cost.h` of `csrc/planner`.
"""

from torch_marlin_metal.gpu.device import AppleSiliconGPU, Figure
from torch_marlin_metal.gpu.occupancy import Occupancy
from torch_marlin_metal.gpu.profiling.explain import ASSUMPTIONS, Explanation, explain
from torch_marlin_metal.gpu.profiling.roofline import Roofline, RooflinePoint, roofline
from torch_marlin_metal.gpu.profiling.tiles import Choice, TileRow, TileTable, occupancy, selection_guide, tile_table
from torch_marlin_metal.gpu.profiling.trace import trace

__all__ = [
    "ASSUMPTIONS",
    "AppleSiliconGPU",
    "Choice",
    "Explanation",
    "Figure",
    "Occupancy",
    "Roofline",
    "RooflinePoint",
    "TileRow",
    "TileTable",
    "explain",
    "occupancy",
    "roofline",
    "selection_guide",
    "tile_table",
    "trace",
]
