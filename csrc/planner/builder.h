// What the planner's own files share: the pieces of plans, and the functions of each variant.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "csrc/planner/plan.h"

namespace marlin {

// Throws std::invalid_argument with the operators' text: "torch_marlin_metal::gemm: M: expected at least 1, got 0".
[[noreturn]] void refuse(std::string_view op, std::string_view argument, std::string_view expected,
                         const std::string& got);

// Throws if no kernel can take the weight.
void check_weight(std::string_view op, const WeightProblem& weight);

inline constexpr Extent kElementwiseThreads{kElementwiseWidth, kElementwiseHeight, 1};

FunctionConstants weight_constants(const WeightProblem& weight);
FunctionConstants bias_constants(const GemmProblem& problem);

// Returns a launch of the product kernel. Its constants are complete but for those of one variant.
Dispatch product_dispatch(const Tiling& tiling, const GemmProblem& problem, const RowBlocks& blocks, Extent grid);

// Adds the kernel that sums the partial sums of the K slices, adds the bias and rounds, and its workspace. Does nothing
// if K is not split.
void add_reduction(Plan& plan, const Tiling& tiling, const GemmProblem& problem);

// Three threadgroups of this size share a core.
inline constexpr uint32_t kPreferredThreadgroupBytes = 20 * 1024;

// Returns how many threadgroups of a kernel that stages tiles the whole GPU holds at once: at least one a core.
uint64_t resident_threadgroups(const GemmTile& row, const GemmProblem& problem, const GpuDevice& device);

// Returns the best use of one row of kGemmTiles for the problem, or nothing if the row cannot compute it.
using MakeTiling = std::optional<Tiling>(const GemmTile& row, const GemmProblem& problem, const GpuDevice& device);
MakeTiling gemv_tiling, fused_tiling, staged_tiling, striped_tiling;

using BuildPlan = Plan(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device);
BuildPlan build_gemv, build_fused, build_staged, build_striped;

}  // namespace marlin
