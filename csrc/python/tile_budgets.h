// What each variant and tile shape takes of a core's memory and registers, for torch_marlin_metal.profiling.
#pragma once

#include <pybind11/pybind11.h>

#include "kernels/shared/types.h"

namespace marlin {

// Returns a dict for each tile that exists, then for shapes of the usual sizes that do not fit threadgroup memory.
// profiling.TileRow says what the entries mean.
pybind11::list tile_budgets(ElementType activations);

}  // namespace marlin
