// The rules of each kernel variant of a product: its tiles, and how they divide K. variants.cpp defines the rules of
// each variant.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "csrc/planner/plan.h"

namespace marlin {

struct VariantRules {
  std::span<const GemmTile> tiles;
  std::span<const GemmTile> expert_tiles{};  // the tiles of moe_gemm; empty if the variant has none

  // No slice of K is shorter than min_slice, because shorter slices cost more to add up than the split gains. K is
  // divided into at least fewest_slices slices if it is long enough.
  uint32_t min_slice = 256;
  uint32_t fewest_slices = 1;
  bool slices_hold_groups = true;  // true if a slice contains whole groups, or a group whole slices, where the step
                                   // allows it
  // The largest number of simdgroups of a threadgroup that share K; 0 if the simdgroups divide the tile instead.
  uint32_t most_simdgroups = 0;
  uint32_t (*threads)(TileShape) = nullptr;  // returns the threads of a threadgroup whose simdgroups divide the tile
  // Returns the threadgroup memory of a kernel without staged tiles; null if the kernel uses none.
  uint32_t (*sums_bytes)(WeightFormat format, uint32_t rows, uint32_t simdgroups) = nullptr;
  // Returns an empty text if the variant supports these operands on this device. Otherwise returns the "expected" part
  // of the error message. Null if the variant supports all operands on all devices.
  std::string (*refusal)(const GemmProblem& problem, const GpuDevice& device) = nullptr;

  uint32_t row_multiple = 0;  // if not 0, a tile has at most as many rows as M rounded up to a multiple of this
  uint32_t most_automatic_rows = UINT32_MAX;  // "auto" does not use the variant for more rows
  bool has_rest_blocks = false;               // true if a second launch may compute the last rows in a smaller block
  bool has_stripes = false;
  bool rounds_weight = false;       // true if it rounds the weight to the activations' type
  bool has_rows_along_x = false;    // true if x of the grid counts row blocks, false if it counts columns
  bool has_32_bit_offsets = false;  // true if moe_gemm's offsets between activations must fit in 32 bits
  uint32_t simdgroup_columns = 0;   // columns of a simdgroup in kernels without staged tiles
  // The rows in one unit of decision_rows.h; 0 if decision_rows.h has no rows for the variant.
  uint32_t row_unit = 0;
  // Returns true if "auto" or "rounded" may choose the variant without a measurement. If this function is null, they
  // may choose the variant if decision_rows.h has rows for it.
  bool (*is_automatic)(const GemmProblem& problem, const GpuDevice& device) = nullptr;
  std::string_view reason{};  // why the planner chooses the variant; empty if decision_rows.h has a reason
};

#define MARLIN_DECLARE_VARIANT(name) extern const VariantRules name##_variant;
MARLIN_GEMM_VARIANTS(MARLIN_DECLARE_VARIANT)
#undef MARLIN_DECLARE_VARIANT

const VariantRules& rules_of(GemmVariant variant);

// Returns true if "auto" or "rounded" may choose the variant without a measurement, provided that it supports the
// operands.
bool is_automatic(GemmVariant variant, const GemmProblem& problem, const GpuDevice& device);

// Throws std::invalid_argument with a text such as "torch_marlin_metal::gemm: M: expected at least 1, got 0".
[[noreturn]] void refuse(std::string_view op, std::string_view argument, std::string_view expected,
                         const std::string& got);

// Throws std::invalid_argument if no kernel can compute with this weight.
void check_weight(std::string_view op, const WeightProblem& weight);

// Throws std::invalid_argument if the problem names a variant that does not support its operands on this device.
void check_variant(std::string_view op, const GemmProblem& problem, const GpuDevice& device);

inline constexpr Extent kElementwiseThreads{kElementwiseWidth, kElementwiseHeight, 1};

FunctionConstants weight_constants(const WeightProblem& weight);
FunctionConstants bias_constants(const GemmProblem& problem);

// Returns the dispatch of the product kernel that computes these row blocks.
Dispatch product_dispatch(const Tiling& tiling, const GemmProblem& problem, const RowBlocks& blocks,
                          const GpuDevice& device);

}  // namespace marlin
