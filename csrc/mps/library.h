// Compiles kernels at first use: one Metal library per function, and one pipeline per function and set of constants.
// Several threads can compile at the same time. Failures are kept, too: a kernel with an error is compiled only once.
// Nothing is ever freed, because Metal may be gone already when the process exits.
#pragma once

#import <Metal/Metal.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "csrc/planner/launch_cache.h"
#include "csrc/planner/plan.h"

namespace marlin::mps {

struct CompiledKernel {
  id<MTLComputePipelineState> pipeline;
  std::string name;  // its host name, for profiles and errors
};

struct CompiledPlan {
  Plan plan;
  std::vector<CompiledKernel> kernels;  // one for each dispatch
};

// Raised if a kernel for tensor units does not compile, cannot run its plan's threads, or assumes another layout of
// operands than this GPU's. A second try would fail, too, but a plan without such kernels may work.
struct NoTensorKernel : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Raises an error with the function's name and Metal's message if a function does not compile. Also raises an error
// if a pipeline cannot run as many threads per threadgroup as its dispatch needs. Both errors are NoTensorKernel if
// the kernel is for tensor units. If Metal's compiler process does not answer, compile() asks it a second time and
// then raises an ordinary error. A later call tries again.
CompiledPlan compile(Plan plan);

// The GPU for the planner, without the answer of the probe (half_subnormals) and without tensor units. Raises an error
// if an environment variable of the planner or of the commit policy is wrong.
const GpuDevice& gpu();

// Finds or makes the plan of a problem that decides its plan alone, such as a repack.
template <typename Problem>
std::shared_ptr<const CompiledPlan> find_plan(const Problem& problem, Plan (*plan)(const Problem&, const GpuDevice&)) {
  static auto* plans = new LaunchCache<Problem, CompiledPlan>;
  return plans->get(problem, [&] { return compile(plan(problem, gpu())); });
}

}  // namespace marlin::mps
