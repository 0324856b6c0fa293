// Finds the plans of gemm and moe_gemm.
#pragma once

#include <memory>

#include "csrc/core/tensor_checks.h"
#include "csrc/mps/encoder.h"
#include "csrc/planner/problem.h"

namespace marlin::mps {

// Sets the fields of the problem that describe the bias.
void set_bias(GemmProblem& problem, const OptionalTensor& bias);

// Returns true if this GPU converts subnormal halves to fp32 without flushing them. The fastest decode of integers
// needs this. The first call runs the probe kernel.
bool half_subnormals(const Tensor& like);

template <typename Problem>
using Planner = Plan (*)(const Problem&, const GpuDevice&);

// Returns the plan of a product on this GPU, from the cache or new. If a kernel for tensor units fails on this Mac, a
// warning gives the reason once. From then on, "auto" uses plans for a GPU without tensor units, and a product that
// requests such a kernel by name raises the error.
std::shared_ptr<const CompiledPlan> find_plan(const GemmProblem& problem, const Tensor& like);
std::shared_ptr<const CompiledPlan> find_plan(const MoeProblem& problem, Planner<MoeProblem> plan, const Tensor& like);

// Returns the number of rows of the first part of a product. A product that would block the GPU for too long is
// computed in parts, each with some of the rows. If no division is necessary, the result is M.
int64_t first_part(const Plan& plan, int64_t M);

}  // namespace marlin::mps
