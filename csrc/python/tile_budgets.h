// What each variant and tile shape takes of a core's memory and registers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan.h"

namespace marlin {

// simdgroups: of a threadgroup; where they split K, the most that keep to the preferred threadgroup memory.
// staging_bytes: scales, zero points, tables and sums. refused: why no plan can have this tile; empty where one can.
// accumulators: fp32 sums of outputs a lane. half_registers: 0 where nothing was compiled. matrix_operations: 8x8x8
// products of a simdgroup a step. flop_per_byte: of a step, for each byte of device memory that it loads.
#define MARLIN_TILE_BUDGET(X)    \
  X(uint32_t, simdgroups)        \
  X(uint32_t, activation_bytes)  \
  X(uint32_t, code_bytes)        \
  X(uint32_t, staging_bytes)     \
  X(uint32_t, threadgroup_bytes) \
  X(std::string, refused)        \
  X(uint32_t, accumulators)      \
  X(uint32_t, half_registers)    \
  X(uint32_t, matrix_operations) \
  X(double, flop_per_byte)

struct TileBudget {
  std::string variant;
  TileShape tile{};
#define MARLIN_BUDGET_FIELD(type, field) type field{};
  MARLIN_TILE_BUDGET(MARLIN_BUDGET_FIELD)
#undef MARLIN_BUDGET_FIELD
};

// Tiles that exist, in the order of the instruction counts, then shapes of the usual sizes that do not fit.
std::vector<TileBudget> tile_budgets(ElementType activations);

}  // namespace marlin
