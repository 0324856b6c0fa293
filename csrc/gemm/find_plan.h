// Finds the plans of products with packed weights.
#pragma once

#include <memory>

#include "csrc/core/tensor_checks.h"
#include "csrc/mps/encoder.h"
#include "csrc/planner/problem.h"

namespace marlin::mps {

// Sets the problem's fields of a bias.
void set_bias(GemmProblem& problem, const OptionalTensor& bias);

// Returns true if this GPU keeps subnormal halves when it widens them to fp32, which the fastest integer decode needs.
// The first call runs the probe kernel.
bool half_subnormals(const Tensor& like);

template <typename Problem>
using Planner = Plan (*)(const Problem&, const GpuDevice&);

// Finds or makes the plan of a product on this GPU. If a kernel for tensor units fails on this Mac, a warning names the
// reason once, and from then on "auto" gets the plan for a GPU without these units. A product that asks for such a
// kernel by name gets the error.
std::shared_ptr<const CompiledPlan> find_plan(const GemmProblem& problem, const Tensor& like);
std::shared_ptr<const CompiledPlan> find_plan(const MoeProblem& problem, Planner<MoeProblem> plan, const Tensor& like);

// A product that would keep the GPU from other work for too long is computed in parts, each with some of the rows.
// Returns the number of rows of the first part, which is M if the product need not be divided.
int64_t first_part(const Plan& plan, int64_t M);

}  // namespace marlin::mps
