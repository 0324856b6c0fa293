// What the planner's own files share: the pieces that plans are made of. No part of the planner's interface.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "kernel_counts.h"
#include "plan.h"

namespace marlin {

inline uint32_t round_up(uint32_t value, uint32_t multiple) {
  return ceil_divide(value, multiple) * multiple;
}

inline void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

inline uint32_t group_size(const WeightProblem& weight) {
  return std::min(weight.group_size, weight.K);
}

inline constexpr Extent kElementwiseThreads{kElementwiseWidth, kElementwiseHeight, 1};

inline constexpr uint32_t kMostSlices = 64;

Extent elementwise_grid(uint32_t columns, uint32_t rows);
FunctionConstants weight_constants(const WeightProblem& weight);
FunctionConstants bias_constants(const GemmProblem& problem);
FunctionConstants gemm_constants(const GemmProblem& problem, bool writes_partials);
GemmParams gemm_params(const GemmProblem& problem, uint32_t k_per_slice);

// About `wanted` slices of K, none empty, that start where a group or an even part of one starts if `unit` allows.
uint32_t slice_length(const GemmProblem& problem, uint32_t wanted, uint32_t unit);

std::string name(TileShape tile);  // "64x64x32"

// The workspace of `slices` partial sums and the kernel that adds them up, with bias and rounding; none for one slice.
void add_reduction(Plan& plan, const GemmProblem& problem, uint32_t slices);

// Metal's limit for a threadgroup.
inline constexpr uint32_t kMostThreadgroupBytes = 32 * 1024;
// Three threadgroups of this size share a core.
inline constexpr uint32_t kPreferredThreadgroupBytes = 20 * 1024;

// Throws std::logic_error for a kernel that kKernelCounts does not have.
const KernelCounts& counts_of(Kernel kernel, WeightFormat format, const TileShape& tile);

// Threadgroups of a kernel that stages tiles that a core holds at once, at least one.
uint32_t resident_threadgroups(Kernel kernel, WeightFormat format, TileShape tile, uint32_t threadgroup_bytes,
                               const GpuDevice& device);

// Each adds the ways in which its kernels can compute the problem, best-known first.
using AddCandidates = void(std::vector<Candidate>& candidates, const GemmProblem& problem, const GpuDevice& device);
AddCandidates add_gemv, add_fused, add_double_buffered, add_single_stage, add_striped, add_two_pass;

}  // namespace marlin
