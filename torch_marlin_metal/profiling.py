"""Shows the package's figures of Apple GPUs: occupancy, tiles, the choice for each M, rooflines, traces.

All numbers come from the planner's tables: `chips.h` and `decision_rows.h` in `csrc/planner`.
"""

from torch_marlin_metal.gpu.device import AppleSiliconGPU
from torch_marlin_metal.gpu.planning import plan
from torch_marlin_metal.gpu.profiling.roofline import roofline
from torch_marlin_metal.gpu.profiling.tiles import occupancy, selection_guide, tile_table
from torch_marlin_metal.gpu.profiling.trace import trace

__all__ = ["AppleSiliconGPU", "occupancy", "plan", "roofline", "selection_guide", "tile_table", "trace"]
