// Chooses the tiling of a product: makes a tiling for each tile that can compute the product, and chooses the tiling
// with the least estimated time.
#include <ranges>

#include "csrc/core/math.h"
#include "csrc/planner/decisions.h"
#include "csrc/planner/split_k.h"

namespace marlin {

namespace {

// Returns the fastest tiling for which `eligible` is true, or null if there is none.
template <typename Eligible>
const Tiling* best_of(const std::vector<Tiling>& tilings, const Eligible& eligible) {
  auto admitted = tilings | std::views::filter(eligible);
  const auto best = std::ranges::min_element(admitted, {}, &Tiling::seconds);
  return best == admitted.end() ? nullptr : &*best;
}

// Returns how many threadgroups of a staged kernel with this tile are resident on all cores of the GPU together.
uint64_t resident_threadgroups(const GemmTile& row, const GemmProblem& problem, const GpuDevice& device) {
  const uint32_t bytes = tile_threadgroup_bytes(row.tile, problem.activations, row.stages);
  const uint32_t registers = half_registers(row, problem, row.tile.M, device);
  const Occupancy held = occupancy(tile_threads(row.tile), registers, bytes, family_of(*device.chip));
  return uint64_t{device.cores} * held.threadgroups;
}

// The length of a slice of K in the striped variant. It is a multiple of every tile's K and of every group size, so
// stripes end where groups end. Shorter slices would balance the stripes better, but the extra partial sums cost more
// than the better balance saves.
constexpr uint32_t kStripedSlice = 256;
// Tiles are divided along K if stripes of whole tiles would leave more than one eighth of the threadgroups' time idle.
constexpr uint32_t kIdleShare = 8;

bool whole_tiles_fill(uint64_t tiles, uint64_t stripes) {
  const uint64_t rounds = ceil_divide(tiles, stripes);
  return (rounds * stripes - tiles) * kIdleShare <= rounds * stripes;
}

// Returns a tiling with as many stripes as the GPU holds threadgroups at once. Each stripe has an equal part of the
// work (docs/inside/kernels.md).
std::optional<Tiling> striped_tiling(const GemmTile& row, const GemmProblem& problem, const GpuDevice& device) {
  const uint32_t K = problem.weight.K;
  const uint64_t resident = resident_threadgroups(row, problem, device);
  const uint64_t tiles = tile_count(row.tile, problem);
  Tiling tiling{row};
  tiling.simdgroups = tile_threads(row.tile) / kSimdWidth;
  tiling.k_per_slice = whole_tiles_fill(tiles, resident) ? round_up(K, row.tile.K) : kStripedSlice;
  const uint32_t slices = stripe_slices(K, tiling.k_per_slice);
  if (tiles * slices > UINT32_MAX) return std::nullopt;
  const auto units = static_cast<uint32_t>(tiles * slices);
  tiling.stripes = static_cast<uint32_t>(std::min<uint64_t>(resident, units));
  for (uint32_t stripe = 1; stripe < tiling.stripes && !tiling.stripes_share_tiles; ++stripe)
    tiling.stripes_share_tiles = stripe_begin(units, tiling.stripes, stripe) % slices != 0;
  tiling.seconds = estimate(tiling, problem, device).total();
  return tiling;
}

// Returns the fastest tiling with this tile, or nullopt if the tile cannot compute the problem.
std::optional<Tiling> tiling_of(const GemmTile& row, const GemmProblem& problem, const GpuDevice& device) {
  const VariantRules& rules = rules_of(row.variant);
  const uint32_t rows = row.tile.M;
  if (row.tile == TileShape{}) {
    Tiling tiling{row};
    tiling.seconds = estimate(tiling, problem, device).total();
    return tiling;
  }
  if (rules.row_multiple != 0 && rows > round_up(problem.M, rules.row_multiple)) return std::nullopt;
  if (problem.M > rules.most_automatic_rows && problem.variant.is_open()) return std::nullopt;
  if (rules.refusal != nullptr && !rules.refusal(problem, device).empty()) return std::nullopt;
  if (rules.has_stripes) return striped_tiling(row, problem, device);
  uint32_t most = max_slices(row, problem.weight);
  uint32_t fewest = std::min(rules.fewest_slices, most);
  if (row.stages != 0) {  // splits K if the GPU can hold more threadgroups than there are tiles
    const uint64_t wanted = ceil_divide(resident_threadgroups(row, problem, device), tile_count(row.tile, problem));
    fewest = most = static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, most));
  }
  const auto best = [&](uint32_t rest_rows) {
    return best_split(problem, device, fewest, most,
                      [&](uint32_t slices) { return split_k(row, problem.weight, slices, rest_rows); });
  };
  const Tiling padded = best(0);
  if (!rules.has_rest_blocks || round_up(problem.M, uint32_t{kBlock}) % rows == 0) return padded;
  const Tiling with_rest = best(round_up(problem.M % rows, uint32_t{kBlock}));
  return with_rest.seconds < padded.seconds ? with_rest : padded;
}

}  // namespace

std::vector<Tiling> gemm_tilings(const GemmProblem& problem, const GpuDevice& device) {
  const WeightProblem& weight = problem.weight;
  if (problem.M == 0) refuse("gemm", "M", "at least 1", "0");
  check_weight("gemm", weight);
  check_variant("gemm", problem, device);
  std::vector<Tiling> tilings;
  for (const GemmTile& row : gemm_tiles()) {
    if (!fits(row, problem.activations) || (!problem.variant.is_open() && !problem.variant.names_row(row))) continue;
    if (const auto tiling = tiling_of(row, problem, device)) {
      tilings.push_back(*tiling);
      tilings.back().automatic = is_automatic(row.variant, problem, device);
    }
  }
  if (tilings.empty()) {
    refuse("gemm", "variant",
           "one that has a kernel for M=" + std::to_string(problem.M) + " N=" + std::to_string(weight.N) +
               " K=" + std::to_string(weight.K) + " and " + std::string(name(problem.activations)) + " activations",
           "'" + problem.variant.text() + "'");
  }
  return tilings;
}

const Tiling& choose(const std::vector<Tiling>& tilings, const GemmProblem& problem) {
  const auto is_measured = [&](const Tiling& tiling) { return problem.tuned.names_row(tiling); };
  const Tiling* found = problem.tuned.is_open() ? nullptr : best_of(tilings, is_measured);
  if (found == nullptr) found = best_of(tilings, &Tiling::automatic);
  return found != nullptr ? *found : *std::ranges::min_element(tilings, {}, &Tiling::seconds);
}

std::string reason(const Tiling& chosen, const GemmProblem& problem, const GpuDevice& device) {
  if (!problem.variant.is_open()) return "the call names its variant";
  if (problem.tuned.names_row(chosen)) return "the tuner measured it as the fastest";
  const Arithmetic type = arithmetic(chosen.variant, problem.activations, family_of(*device.chip));
  const VariantRules& rules = rules_of(chosen.variant);
  return std::string(rules.row_unit == 0 ? rules.reason
                                         : find_decision(chosen.variant, type, problem.weight.format)->reason);
}

}  // namespace marlin
