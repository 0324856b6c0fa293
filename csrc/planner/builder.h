// What the planner's source files share: helpers that build plans, and the functions of each variant.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "csrc/planner/plan.h"

namespace marlin {

// Throws std::invalid_argument with a text like "torch_marlin_metal::gemm: M: expected at least 1, got 0".
[[noreturn]] void refuse(std::string_view op, std::string_view argument, std::string_view expected,
                         const std::string& got);

// Throws std::invalid_argument if no kernel can compute with this weight.
void check_weight(std::string_view op, const WeightProblem& weight);

// Throws std::invalid_argument if the problem names the variant for tensor units, and the device may not use these or
// there is no such kernel for its operands.
void check_variant(std::string_view op, const GemmProblem& problem, const GpuDevice& device);

// Returns true if the device has a kernel for tensor units for this problem.
inline bool has_tensor_kernel(const GemmProblem& problem, const GpuDevice& device) {
  return device.tensor_units && has_tensor_kernel(problem.weight.format, problem.activations);
}

inline constexpr Extent kElementwiseThreads{kElementwiseWidth, kElementwiseHeight, 1};

FunctionConstants weight_constants(const WeightProblem& weight);
FunctionConstants bias_constants(const GemmProblem& problem);

// Sets the constants of the kernels without staged tiles: gemv, fused, tensor, and those of experts with their bodies.
void set_direct_constants(FunctionConstants& constants, const Tiling& tiling, const WeightProblem& weight,
                          uint32_t rows, const GpuDevice& device);

// Returns a launch of the product kernel. The caller sets the function constants that only its own variant uses.
Dispatch product_dispatch(const Tiling& tiling, const GemmProblem& problem, const RowBlocks& blocks, Extent grid);

// If K is split, adds a launch of the reduce kernel, and the workspace for the partial sums.
void add_reduction(Plan& plan, const Tiling& tiling, const GemmProblem& problem);

// Returns the number of threadgroups of a staged kernel with this tile that all cores of the GPU hold at once.
uint64_t resident_threadgroups(const GemmTile& row, const GemmProblem& problem, const GpuDevice& device);

// Returns the cheapest tiling with one row of kGemmTiles, or nothing if that row cannot compute the problem.
using MakeTiling = std::optional<Tiling>(const GemmTile& row, const GemmProblem& problem, const GpuDevice& device);
MakeTiling gemv_tiling, fused_tiling, staged_tiling, striped_tiling, tensor_tiling;

// Returns the tiling that splits K into about `slices` slices.
Tiling gemv_split(const GemmTile& row, const WeightProblem& weight, uint32_t slices);
Tiling fused_split(const GemmTile& row, const WeightProblem& weight, uint32_t rest_rows, uint32_t slices);
Tiling tensor_split(const GemmTile& row, const WeightProblem& weight, uint32_t slices);

using BuildPlan = Plan(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device);
BuildPlan build_gemv, build_fused, build_staged, build_striped, build_tensor;

}  // namespace marlin
