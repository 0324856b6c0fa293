// double_buffered, single_stage: a grid of output tiles, K split where the tiles are few.
#include "plan_parts.h"

namespace marlin {

namespace {

// Two tiles a core fit its 60 KB of threadgroup memory with the largest stage, and hide each other's barriers.
constexpr uint32_t kTilesPerCore = 2;
// Slices shorter than this spend more on the reduction than they win.
constexpr uint32_t kShortestSlice = 256;

Plan plan_tiles(const GemmProblem& problem, const GpuDevice& device, Kernel kernel) {
  const uint32_t stages = kernel == Kernel::gemm_double_buffered ? 2 : 1;
  const Extent tiles{ceil_divide(problem.weight.N, kTileN), ceil_divide(problem.M, kTileM), 1};

  const uint64_t count = uint64_t{tiles.x} * tiles.y;
  const uint64_t wanted = (uint64_t{device.cores} * kTilesPerCore + count - 1) / count;
  const uint32_t longest_split = std::clamp<uint32_t>(problem.weight.K / kShortestSlice, 1, kMostSlices);
  const uint32_t k_per_slice =
      slice_length(problem, static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, longest_split)), kTileK);
  const uint32_t slices = ceil_divide(problem.weight.K, k_per_slice);

  Plan plan{.dispatches = {{.kernel = kernel,
                            .function = host_name(kernel, problem.weight.format, problem.activations),
                            .constants = gemm_constants(problem, slices > 1),
                            .grid = {tiles.x, tiles.y, slices},
                            .threads = {kTileThreads, 1, 1},
                            .threadgroup_bytes = tile_threadgroup_bytes(problem.activations, stages),
                            .params = gemm_params(problem, k_per_slice)}}};
  add_reduction(plan, problem, slices);
  return plan;
}

}  // namespace

void add_double_buffered(std::vector<Candidate>& candidates, const GemmProblem& problem, const GpuDevice& device) {
  candidates.push_back({.variant = "double_buffered",
                        .tile = {kTileM, kTileN, kTileK},
                        .plan = plan_tiles(problem, device, Kernel::gemm_double_buffered)});
}

void add_single_stage(std::vector<Candidate>& candidates, const GemmProblem& problem, const GpuDevice& device) {
  candidates.push_back({.variant = "single_stage",
                        .tile = {kTileM, kTileN, kTileK},
                        .plan = plan_tiles(problem, device, Kernel::gemm_single_stage)});
}

}  // namespace marlin
