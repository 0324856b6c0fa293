// double_buffered, single_stage: a grid of output tiles, K split where the tiles are few.
#include "plan_parts.h"

namespace marlin {

namespace {

struct StagedKernels {
  TileShape tile;
  Kernel double_buffered, single_stage;
};

#define MARLIN_STAGED_KERNELS_ROW(M, N, K, ...) \
  StagedKernels{{M, N, K}, Kernel::gemm_double_buffered_##M##x##N##x##K, Kernel::gemm_single_stage_##M##x##N##x##K},
constexpr std::array kStagedKernels{MARLIN_TILES(MARLIN_STAGED_KERNELS_ROW)};
#undef MARLIN_STAGED_KERNELS_ROW

// Slices shorter than this spend more on the reduction than they win.
constexpr uint32_t kShortestSlice = 256;

Plan plan_tiles(const GemmProblem& problem, const GpuDevice& device, Kernel kernel, TileShape tile, uint32_t stages) {
  const Extent tiles{ceil_divide(problem.weight.N, tile.N), ceil_divide(problem.M, tile.M), 1};
  const uint32_t threads = tile_threads(tile);
  const uint32_t bytes = tile_threadgroup_bytes(tile, problem.activations, stages);
  const uint64_t resident =
      uint64_t{device.cores} * resident_threadgroups(kernel, problem.weight.format, tile, bytes, device);
  const uint64_t count = uint64_t{tiles.x} * tiles.y;
  const uint64_t wanted = (resident + count - 1) / count;
  const uint32_t longest_split = std::clamp<uint32_t>(problem.weight.K / kShortestSlice, 1, kMostSlices);
  const uint32_t k_per_slice =
      slice_length(problem, static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, longest_split)), tile.K);
  const uint32_t slices = ceil_divide(problem.weight.K, k_per_slice);

  Plan plan{.dispatches = {{.kernel = kernel,
                            .function = host_name(kernel, problem.weight.format, problem.activations),
                            .constants = gemm_constants(problem, slices > 1),
                            .grid = {tiles.x, tiles.y, slices},
                            .threads = {threads, 1, 1},
                            .threadgroup_bytes = bytes,
                            .params = gemm_params(problem, k_per_slice)}}};
  add_reduction(plan, problem, slices);
  return plan;
}

}  // namespace

void add_double_buffered(std::vector<Candidate>& candidates, const GemmProblem& problem, const GpuDevice& device) {
  for (const auto& [tile, kernel, _] : kStagedKernels) {
    if (!tile_refusal(tile, problem.activations, 2).empty()) continue;
    candidates.push_back({"double_buffered", tile, plan_tiles(problem, device, kernel, tile, 2)});
  }
}

void add_single_stage(std::vector<Candidate>& candidates, const GemmProblem& problem, const GpuDevice& device) {
  for (const auto& [tile, _, kernel] : kStagedKernels) {
    if (!tile_refusal(tile, problem.activations, 1).empty()) continue;
    candidates.push_back({"single_stage", tile, plan_tiles(problem, device, kernel, tile, 1)});
  }
}

}  // namespace marlin
