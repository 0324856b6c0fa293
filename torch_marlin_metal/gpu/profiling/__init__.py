"""What a product costs on an Apple GPU and why: chips, occupancy, tiles, rooflines, explanations, traces.

Every number comes from the planner's own tables and model (`csrc/chips.h`, `csrc/kernel_counts.h`, `csrc/cost.h`).
"""

from torch_marlin_metal.gpu import AppleSiliconGPU, Figure
from torch_marlin_metal.planning import Occupancy
from torch_marlin_metal.profiling.explain import ASSUMPTIONS, Explanation, explain
from torch_marlin_metal.profiling.roofline import Roofline, RooflinePoint, roofline
from torch_marlin_metal.profiling.tiles import Choice, TileRow, TileTable, occupancy, selection_guide, tile_table
from torch_marlin_metal.profiling.trace import trace

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
