// What the planner's source files share: helpers that build plans, and the functions of each variant.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/planner/plan.h"

namespace marlin {

// Throws std::invalid_argument with a text like "torch_marlin_metal::gemm: M: expected at least 1, got 0".
[[noreturn]] void refuse(std::string_view op, std::string_view argument, std::string_view expected,
                         const std::string& got);

// Throws std::invalid_argument if no kernel can compute with this weight.
void check_weight(std::string_view op, const WeightProblem& weight);

// Throws std::invalid_argument if the problem names a variant that cannot multiply its operands on this device.
void check_variant(std::string_view op, const GemmProblem& problem, const GpuDevice& device);

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

// What the planner knows of a variant. Each is defined in a file of csrc/planner/variants/.
struct VariantRules {
  std::span<const GemmTile> tiles;

  // Returns the cheapest tiling with one of `tiles`, or nothing if that tile cannot compute the problem.
  std::optional<Tiling> (*tiling)(const GemmTile& row, const GemmProblem& problem, const GpuDevice& device);
  Plan (*build)(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device);
  // Returns the bytes of threadgroup memory if a threadgroup computes `rows` rows.
  uint32_t (*threadgroup_bytes)(const Tiling& tiling, const GemmProblem& problem, uint32_t rows);

  // Adds the tilings of a product with experts that have one of `tiles`. Null if there is no such kernel.
  void (*add_expert_tilings)(std::vector<Tiling>& tilings, const GemmTile& row, const MoeProblem& problem,
                             const GpuDevice& device) = nullptr;
  // Returns what a variant must be for these operands and this device, if this one is not; else an empty text. Null if
  // the variant multiplies all operands on all devices.
  std::string (*refusal)(const GemmProblem& problem, const GpuDevice& device) = nullptr;

  bool rounds_weight = false;       // to the activations' type
  bool has_rows_along_x = false;    // in products with experts, the grid's x counts rows, otherwise columns
  bool has_32_bit_offsets = false;  // between the activations of products with experts
  uint32_t simdgroup_columns = 0;   // in kernels without staged tiles
  // The rows in which decision_rows.h counts what a block costs. 0 if it has no rows for the variant: "auto" then takes
  // it only if a tuner measured it as the fastest.
  uint32_t row_unit = 0;
  uint32_t most_simdgroups = 0;  // of a threadgroup, which divide K between them; 0 if the tile fixes the number
  bool has_tensor_products = false;
};

#define MARLIN_DECLARE_VARIANT(name) extern const VariantRules name##_variant;
MARLIN_GEMM_VARIANTS(MARLIN_DECLARE_VARIANT)
#undef MARLIN_DECLARE_VARIANT

const VariantRules& rules_of(GemmVariant variant);

// Returns the tiling that splits K into about `slices` slices.
Tiling gemv_split(const GemmTile& row, const WeightProblem& weight, uint32_t slices);
Tiling fused_split(const GemmTile& row, const WeightProblem& weight, uint32_t rest_rows, uint32_t slices);
Tiling tensor_split(const GemmTile& row, const WeightProblem& weight, uint32_t slices);

}  // namespace marlin
