// Compiles kernels at first use: one Metal library per .metal file, and one pipeline per function and set of constants.
// Neither is ever freed, because Metal may be gone already when the process exits.
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

// Raises if a function does not compile, with its name and Metal's message, or if its pipeline cannot run as many
// threads per threadgroup as the dispatch needs.
CompiledPlan compile(Plan plan);

}  // namespace marlin::mps
