// Compiles kernels at first use: one Metal library per function, and one pipeline per function and set of constants.
// Several threads can compile at the same time. The cache stores failures, too, so a kernel with an error is compiled
// only once. Nothing is ever freed, because Metal may already be unloaded when the process exits.
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
  std::string name;  // the kernel's host name, for profiles and errors
};

struct CompiledPlan {
  Plan plan;
  std::vector<CompiledKernel> kernels;  // one for each dispatch
};

// Thrown if a kernel for tensor units does not compile, cannot run its plan's threads, or assumes a layout of operands
// that this GPU does not use. Another attempt would fail, too, but a plan without tensor units may work.
struct NoTensorKernel : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Raises an error with the function's name and Metal's message if a function does not compile. Raises an error if a
// pipeline cannot run as many threads per threadgroup as its dispatch needs. For a kernel for tensor units, either
// error is a NoTensorKernel. If Metal's compiler process does not answer, compile() asks it a second time and then
// raises a std::runtime_error; the next call tries again.
CompiledPlan compile(Plan plan);

// Returns this machine's GPU. Its fields system, tensor_units and half_subnormals are not set: csrc/gemm/find_plan.mm
// sets them. Raises an error if an environment variable of the planner or of the commit policy is invalid.
const GpuDevice& gpu();

// Returns the compiled plan of a problem from a cache. Use it if the plan depends on the problem and the GPU alone, as
// for a repack.
template <typename Problem>
std::shared_ptr<const CompiledPlan> find_plan(const Problem& problem, Plan (*plan)(const Problem&, const GpuDevice&)) {
  static auto* plans = new LaunchCache<Problem, CompiledPlan>;
  return plans->get(problem, [&] { return compile(plan(problem, gpu())); });
}

}  // namespace marlin::mps
