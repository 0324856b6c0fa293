#include "tile_budget.h"

#include <algorithm>

#include "kernel_counts.h"
#include "plan_parts.h"

namespace marlin {

namespace {

// "gemm_double_buffered_64x64x32": double_buffered
std::string variant_of(std::string_view kernel) {
  constexpr std::string_view prefix = "gemm_";
  if (kernel.starts_with(prefix)) kernel.remove_prefix(prefix.size());
  for (std::string_view variant : gemm_variants()) {
    if (kernel.starts_with(variant)) return std::string(variant);
  }
  return std::string(kernel);
}

double flop_per_byte(TileShape tile, ElementType activations) {
  return 2.0 * tile.M * tile.N / (0.5 * tile.N + double(tile.M) * element_bytes(activations));
}

// gemv and fused keep nothing in threadgroup memory but the sums of their simdgroups.
TileBudget splitting_budget(const KernelCounts& counts, ElementType activations) {
  const TileShape& tile = counts.tile;
  const bool is_gemv = counts.kernel == "gemv";
  const auto bytes = [&](uint32_t simdgroups) {
    return is_gemv ? gemv_threadgroup_bytes(counts.format, tile.M, simdgroups)
                   : fused_threadgroup_bytes(counts.format, tile.M, simdgroups);
  };
  uint32_t simdgroups = is_gemv ? uint32_t{kGemvMaxSimdgroups} : uint32_t{kFusedMaxSimdgroups};
  while (bytes(simdgroups) > kPreferredThreadgroupBytes)
    --simdgroups;
  return {.variant = variant_of(counts.kernel),
          .tile = tile,
          .simdgroups = simdgroups,
          .staging_bytes = bytes(simdgroups),
          .threadgroup_bytes = bytes(simdgroups),
          .accumulators = tile.M * tile.N / kSimdWidth,
          .half_registers = counts.half_registers,
          .matrix_operations = counts.step.matrix,
          .flop_per_byte = flop_per_byte(tile, activations)};
}

TileBudget staged_budget(std::string variant, TileShape tile, ElementType activations, uint32_t half_registers) {
  const uint32_t stages = variant == "single_stage" ? 1 : 2;
  const uint32_t threads = tile_threads(tile);
  const uint32_t a = stages * tile.M * tile.K * element_bytes(activations);
  const uint32_t codes = stages * tile_code_bytes(tile);
  const uint32_t all = tile_threadgroup_bytes(tile, activations, stages);
  return {.variant = std::move(variant),
          .tile = tile,
          .simdgroups = threads / kSimdWidth,
          .activation_bytes = a,
          .code_bytes = codes,
          .staging_bytes = all - a - codes,
          .threadgroup_bytes = all,
          .refused = tile_refusal(tile, activations, stages),
          .accumulators = tile.M * tile.N / threads,
          .half_registers = half_registers,
          .matrix_operations = tile.M * tile.N * tile.K / (8 * 8 * 8) / (threads / kSimdWidth),
          .flop_per_byte = flop_per_byte(tile, activations)};
}

}  // namespace

std::vector<TileBudget> tile_budgets(ElementType activations) {
  std::vector<TileBudget> rows;
  for (const KernelCounts& counts : kKernelCounts) {
    if (counts.format != WeightFormat::uint4b8) continue;
    const bool splits = counts.kernel == "gemv" || counts.kernel == "gemm_fused";
    rows.push_back(splits ? splitting_budget(counts, activations)
                          : staged_budget(variant_of(counts.kernel), counts.tile, activations, counts.half_registers));
  }
  for (uint32_t M : {64, 128}) {
    for (uint32_t N : {64, 128}) {
      for (uint32_t K : {32, 64}) {
        for (const char* variant : {"double_buffered", "single_stage"}) {
          TileBudget budget = staged_budget(variant, {M, N, K}, activations, 0);
          const bool listed = std::ranges::any_of(
              rows, [&](const TileBudget& row) { return row.variant == budget.variant && row.tile == budget.tile; });
          if (!listed && !budget.refused.empty()) rows.push_back(std::move(budget));
        }
      }
    }
  }
  return rows;
}

}  // namespace marlin
