// Compiled kernels: one Metal library per .metal file, compiled at first use, and one pipeline per function and
// constants. Both live as long as the process: nothing is freed at exit, when Metal may be gone already.
#pragma once

#import <Metal/Metal.h>

#include <vector>

#include "csrc/planner/plan.h"

namespace marlin::mps {

// A plan and the pipeline of each of its dispatches.
struct CompiledPlan {
  Plan plan;
  std::vector<id<MTLComputePipelineState>> pipelines;
};

// Raises with the function's name and Metal's message if a function does not compile, and if its pipeline cannot run as
// many threads as the dispatch asks for.
CompiledPlan compile(Plan plan);

}  // namespace marlin::mps
