// Compiles kernels at first use: one Metal library per function, and one pipeline per function and set of constants.
// Threads compile side by side. A failure is kept too, so that a kernel that does not compile takes its time once.
// Nothing is ever freed, because Metal may be gone already when the process exits.
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
// threads per threadgroup as the dispatch needs. A compile that Metal's compiler process did not answer is asked for
// twice, and by the next call again.
CompiledPlan compile(Plan plan);

}  // namespace marlin::mps
