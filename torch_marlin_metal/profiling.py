"""Shows what is known of an Apple GPU: its figures, occupancy, tiles, the choice for each M, rooflines, traces.

Every number comes from the planner's own tables: `chips.h` and `decision_rows.h` of `csrc/planner`.
"""

from torch_marlin_metal.gpu.device import AppleSiliconGPU, Figure
from torch_marlin_metal.gpu.occupancy import Occupancy
from torch_marlin_metal.gpu.profiling.roofline import Roofline, RooflinePoint, roofline
from torch_marlin_metal.gpu.profiling.tiles import Choice, TileRow, TileTable, occupancy, selection_guide, tile_table
from torch_marlin_metal.gpu.profiling.trace import trace

__all__ = [
    "AppleSiliconGPU",
    "Choice",
    "Figure",
    "Occupancy",
    "Roofline",
    "RooflinePoint",
    "TileRow",
    "TileTable",
    "occupancy",
    "roofline",
    "selection_guide",
    "tile_table",
    "trace",
]
