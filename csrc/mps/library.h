// Compiled kernels: one Metal library per .metal file, compiled at first use, and one pipeline per function and
// constants. Both live as long as the process: nothing is freed at exit, when Metal may be gone already.
#pragma once

#import <Metal/Metal.h>

#include "../plan.h"

namespace marlin::mps {

// Raises with the function's name and Metal's message when it does not compile, and when the pipeline cannot run as
// many threads as the dispatch asks for.
id<MTLComputePipelineState> pipeline_for(const Dispatch& dispatch);

}  // namespace marlin::mps
