// The rules of each variant of the product's kernels: its tiles, and how they divide K. variants.cpp has a row for
// each.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/planner/plan.h"

namespace marlin {

struct VariantRules {
  std::span<const GemmTile> tiles;
  std::span<const GemmTile> expert_tiles{};  // those that multiply with the weights of experts; empty if there are none

  // The shortest slice of K: adding up shorter ones costs more than splitting K gains. And the fewest slices, if K has
  // as many.
  uint32_t min_slice = 256;
  uint32_t fewest_slices = 1;
  bool slices_hold_groups = true;  // a slice has whole groups, or a group has whole slices, where the step allows it
  // The simdgroups of a threadgroup divide its K between them, at most this many. 0 if they divide the tile.
  uint32_t most_simdgroups = 0;
  uint32_t (*threads)(TileShape) = nullptr;  // of a threadgroup whose simdgroups divide the tile
  // Threadgroup memory of a kernel without staged tiles. Null if it has none.
  uint32_t (*sums_bytes)(WeightFormat format, uint32_t rows, uint32_t simdgroups) = nullptr;
  // Returns what a variant must be for these operands and this device, if this one is not; else an empty text. Null if
  // the variant multiplies all operands on all devices.
  std::string (*refusal)(const GemmProblem& problem, const GpuDevice& device) = nullptr;

  uint32_t row_multiple = 0;  // a tile has at most M rows, rounded up to a multiple of this; 0 if it may have more
  uint32_t most_automatic_rows = UINT32_MAX;  // with more rows, only a call that names the variant gets it
  bool has_rest_blocks = false;               // a second launch may compute the last rows in a smaller block
  bool has_stripes = false;
  bool rounds_weight = false;       // to the activations' type
  bool has_rows_along_x = false;    // x of the grid counts blocks of rows, otherwise columns
  bool has_32_bit_offsets = false;  // between the activations of products with experts
  uint32_t simdgroup_columns = 0;   // in kernels without staged tiles
  // A block's rows in the costs of decision_rows.h; 0 if it has no costs for the variant.
  uint32_t row_unit = 0;
  // Whether "auto", or "rounded", may take the variant without a measurement. If null, it may if decision_rows.h has
  // rows for it.
  bool (*is_automatic)(const GemmProblem& problem, const GpuDevice& device) = nullptr;
  std::string_view reason{};  // why it is taken, if decision_rows.h does not say it
};

#define MARLIN_DECLARE_VARIANT(name) extern const VariantRules name##_variant;
MARLIN_GEMM_VARIANTS(MARLIN_DECLARE_VARIANT)
#undef MARLIN_DECLARE_VARIANT

const VariantRules& rules_of(GemmVariant variant);

// Returns true if "auto", or "rounded", may take the variant, where it can multiply the operands, without a
// measurement.
bool is_automatic(GemmVariant variant, const GemmProblem& problem, const GpuDevice& device);

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

// Returns the launch of the product kernel that computes these blocks of rows.
Dispatch product_dispatch(const Tiling& tiling, const GemmProblem& problem, const RowBlocks& blocks,
                          const GpuDevice& device);

}  // namespace marlin
