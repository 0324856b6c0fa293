// Reports how much of a core's memory and registers each variant and tile shape uses, for torch_marlin_metal.profiling.
#pragma once

#include <pybind11/pybind11.h>

#include "kernels/shared/types.h"

namespace marlin {

// Returns a dict for each tile in gemm_tiles(), then one for each common shape that does not fit in threadgroup memory.
// profiling.TileRow says what the entries mean.
pybind11::list tile_budgets(ElementType activations);

}  // namespace marlin
