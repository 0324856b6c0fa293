#include "csrc/python/tile_budgets.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>

#include "csrc/core/gemm_variants.h"
#include "csrc/planner/builder.h"
#include "csrc/planner/cost/activation_counts.h"
#include "csrc/planner/cost/tensor_counts.h"

namespace py = pybind11;

namespace marlin {
namespace {

double flop_per_byte(const TileShape& tile, ElementType activations) {
  return 2.0 * tile.M * tile.N / (0.5 * tile.N + double(tile.M) * element_bytes(activations));
}

py::dict row_of(const GemmTile& row, ElementType activations) {
  py::dict entry;
  entry["variant"] = name(row.variant);
  entry["tile"] = py::make_tuple(row.tile.M, row.tile.N, row.tile.K);
  entry["flop_per_byte"] = flop_per_byte(row.tile, activations);
  return entry;
}

// Returns how much memory and how many registers a tile of gemv or fused uses. These kernels keep only the sums of
// their simdgroups in threadgroup memory.
py::dict budget_without_staging(const GemmTile& row, const KernelCounts& counts, ElementType activations) {
  const bool is_gemv = row.variant == GemmVariant::gemv;
  Tiling tiling{row};
  tiling.simdgroups = is_gemv ? uint32_t{kGemvMaxSimdgroups} : uint32_t{kFusedMaxSimdgroups};
  const GemmProblem problem{.weight = {.format = counts.format}, .activations = activations};
  while (threadgroup_bytes(tiling, problem, row.tile.M) > kPreferredThreadgroupBytes)
    --tiling.simdgroups;
  const uint32_t bytes = threadgroup_bytes(tiling, problem, row.tile.M);
  py::dict entry = row_of(row, activations);
  entry["simdgroups"] = tiling.simdgroups;
  entry["activation_bytes"] = 0;
  entry["code_bytes"] = 0;
  entry["staging_bytes"] = bytes;
  entry["threadgroup_bytes"] = bytes;
  entry["refused"] = "";
  entry["accumulators"] = row.tile.M * row.tile.N / kSimdWidth;
  entry["half_registers"] = counts.half_registers;
  entry["matrix_operations"] = counts.step.matrix;
  return entry;
}

// gemm_tensor uses no threadgroup memory. Its registers are those of an M1 (tensor_counts.h).
py::dict tensor_budget(const GemmTile& row, const KernelCounts& counts, ElementType activations) {
  py::dict entry = row_of(row, activations);
  entry["simdgroups"] = tensor_threads(row.tile) / kSimdWidth;
  entry["activation_bytes"] = 0;
  entry["code_bytes"] = 0;
  entry["staging_bytes"] = 0;
  entry["threadgroup_bytes"] = 0;
  entry["refused"] = "";
  entry["accumulators"] = row.tile.M * row.tile.N / tensor_threads(row.tile);
  entry["half_registers"] = counts.half_registers;
  entry["matrix_operations"] = counts.step.matrix;
  return entry;
}

py::dict staged_budget(const GemmTile& row, ElementType activations, uint32_t half_registers) {
  const TileShape& tile = row.tile;
  const uint32_t threads = tile_threads(tile);
  const uint32_t activation_bytes = row.stages * tile.M * tile.K * element_bytes(activations);
  const uint32_t code_bytes = row.stages * tile_code_bytes(tile);
  const uint32_t bytes = tile_threadgroup_bytes(tile, activations, row.stages);
  py::dict entry = row_of(row, activations);
  entry["simdgroups"] = threads / kSimdWidth;
  entry["activation_bytes"] = activation_bytes;
  entry["code_bytes"] = code_bytes;
  entry["staging_bytes"] = bytes - activation_bytes - code_bytes;
  entry["threadgroup_bytes"] = bytes;
  entry["refused"] = tile_refusal(tile, activations, row.stages);
  entry["accumulators"] = tile.M * tile.N / threads;
  entry["half_registers"] = half_registers;
  entry["matrix_operations"] = tile.M * tile.N * tile.K / (8 * 8 * 8) / (threads / kSimdWidth);
  return entry;
}

}  // namespace

py::list tile_budgets(ElementType activations) {
  py::list budgets;
  std::set<std::string> listed;
  for (const KernelCounts& counts : kKernelCounts) {
    if (code_kind(counts.format) != CodeKind::integer) continue;  // the table has one such row for each tile
    if (info(counts.kernel).name.starts_with("moe_")) continue;   // gemv's and fused's tiles
    const auto row = std::ranges::find_if(
        gemm_tiles(), [&](const GemmTile& tile) { return tile.kernel == counts.kernel && tile.tile == counts.tile; });
    if (row == gemm_tiles().end()) throw std::logic_error("tile_budgets: kKernelCounts has a tile that no variant has");
    listed.insert(name(*row));
    const KernelCounts& with =
        *find_counts(counts.kernel, counts.format, counts.tile, activations, kGpuFamilies.front());
    budgets.append(row->stages == 0 ? budget_without_staging(*row, with, activations)
                                    : staged_budget(*row, activations, with.half_registers));
  }
  for (const GemmTile& row : gemm_tiles()) {
    if (row.variant == GemmVariant::tensor && has_tensor_kernel(WeightFormat{}, activations))
      budgets.append(tensor_budget(row, tensor_counts(WeightFormat{}, activations), activations));
  }
  for (uint32_t M : {64, 128}) {
    for (uint32_t N : {64, 128}) {
      for (uint32_t K : {32, 64}) {
        for (GemmVariant variant : {GemmVariant::double_buffered, GemmVariant::single_stage}) {
          const GemmTile row{variant, Kernel{}, {M, N, K}, variant == GemmVariant::single_stage ? 1U : 2U};
          if (!listed.contains(name(row)) && !fits(row, activations))
            budgets.append(staged_budget(row, activations, 0));
        }
      }
    }
  }
  return budgets;
}

}  // namespace marlin
