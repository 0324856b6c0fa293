// striped: as many threadgroups as the GPU holds, each with an equal stripe of the work. docs/striping.md.
#include "plan_parts.h"

namespace marlin {

namespace {

struct StripedKernel {
  TileShape tile;
  Kernel kernel;
};

#define MARLIN_STRIPED_KERNEL_ROW(M, N, K, ...) StripedKernel{{M, N, K}, Kernel::gemm_striped_##M##x##N##x##K},
constexpr std::array kStripedKernels{MARLIN_STRIPED_TILES(MARLIN_STRIPED_KERNEL_ROW)};
#undef MARLIN_STRIPED_KERNEL_ROW

// A multiple of every tile's K and of every group size: stripes end where groups do. Shorter slices would spend more on
// partial sums than a more even end of the stripes wins.
constexpr uint32_t kSlice = 256;
// K is split where stripes of whole tiles would leave more than an eighth of the threadgroups' time idle.
constexpr uint32_t kIdleShare = 8;

bool whole_tiles_fill(uint64_t tiles, uint64_t stripes) {
  const uint64_t rounds = (tiles + stripes - 1) / stripes;
  return (rounds * stripes - tiles) * kIdleShare <= rounds * stripes;
}

bool stripes_share_tiles(uint32_t units, uint32_t stripes, uint32_t slices) {
  for (uint32_t stripe = 1; stripe < stripes; ++stripe) {
    if (stripe_begin(units, stripes, stripe) % slices != 0) return true;
  }
  return false;
}

void add_striped_reduction(Plan& plan, const GemmProblem& problem, TileShape tile, uint32_t slices, uint32_t stripes) {
  plan.partials = {tile.N, tile.M, 2 * stripes};
  Dispatch dispatch{.kernel = Kernel::reduce_striped,
                    .function = host_name(Kernel::reduce_striped, problem.weight.format, problem.activations),
                    .constants = bias_constants(problem),
                    .grid = elementwise_grid(tile.N, tile.M),
                    .threads = kElementwiseThreads,
                    .params = StripedReduceParams{problem.M, problem.weight.N, tile.M, tile.N, slices, stripes}};
  dispatch.grid.z = stripes - 1;
  plan.dispatches.push_back(std::move(dispatch));
}

Plan plan_stripes(const GemmProblem& problem, const GpuDevice& device, Kernel kernel, TileShape tile) {
  const uint32_t K = problem.weight.K;
  const uint32_t threads = tile_threads(tile);
  const uint32_t bytes = tile_threadgroup_bytes(tile, problem.activations, 2);
  const uint64_t resident =
      uint64_t{device.cores} * resident_threadgroups(kernel, problem.weight.format, tile, bytes, device);
  const uint64_t tiles = uint64_t{ceil_divide(problem.M, tile.M)} * ceil_divide(problem.weight.N, tile.N);
  const uint32_t k_per_slice = whole_tiles_fill(tiles, resident) ? round_up(K, tile.K) : kSlice;
  const uint32_t slices = stripe_slices(K, k_per_slice);
  require(tiles * slices <= UINT32_MAX, "plan: M, N: too many tiles for striped");
  const auto units = static_cast<uint32_t>(tiles * slices);
  const auto stripes = static_cast<uint32_t>(std::min<uint64_t>(resident, units));
  const bool shares = stripes_share_tiles(units, stripes, slices);

  Plan plan{.dispatches = {{.kernel = kernel,
                            .function = host_name(kernel, problem.weight.format, problem.activations),
                            .constants = gemm_constants(problem, false),
                            .grid = {stripes, 1, 1},
                            .threads = {threads, 1, 1},
                            .threadgroup_bytes = bytes,
                            .params = gemm_params(problem, k_per_slice)}}};
  // The product itself stores the tiles that no other stripe has a share of, with their bias.
  plan.dispatches[0].constants[kConstantWritesPartials] = shares;
  if (shares) add_striped_reduction(plan, problem, tile, slices, stripes);
  return plan;
}

}  // namespace

void add_striped(std::vector<Candidate>& candidates, const GemmProblem& problem, const GpuDevice& device) {
  for (const auto& [tile, kernel] : kStripedKernels) {
    if (!tile_refusal(tile, problem.activations, 2).empty()) continue;
    candidates.push_back({"striped", tile, plan_stripes(problem, device, kernel, tile)});
  }
}

}  // namespace marlin
