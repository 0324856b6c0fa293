// Plans of products that were planned before: choosing one costs more than the CPU time of a small product's launch.
#pragma once

#include <memory>

#include "plan.h"

namespace marlin {

// What plan_gemm gives, from memory where the same product was asked for on the same GPU. Safe to call from any thread.
std::shared_ptr<const Plan> remembered_plan(const GemmProblem& problem, const GpuDevice& device);

}  // namespace marlin
