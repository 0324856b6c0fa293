// Splits K into the number of slices with the least estimated time.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "csrc/planner/estimate.h"
#include "csrc/planner/variants.h"

namespace marlin {

inline constexpr uint32_t kMaxSlices = 64;

// Returns the largest number of slices whose lengths are whole steps of K and at least the variant's min_slice.
inline uint32_t max_slices(const GemmTile& row, const WeightProblem& weight, uint32_t most = kMaxSlices) {
  return std::clamp<uint32_t>(round_up(weight.K, row.tile.K) / rules_of(row.variant).min_slice, 1, most);
}

// Returns the largest number of simdgroups that can share K while their sums fit in kPreferredThreadgroupBytes.
inline uint32_t most_simdgroups(const GemmTile& row, WeightFormat format) {
  const VariantRules& rules = rules_of(row.variant);
  uint32_t most = rules.most_simdgroups;
  while (rules.sums_bytes(format, row.tile.M, most) > kPreferredThreadgroupBytes)
    --most;
  return most;
}

// Returns the length of a slice if K is split into about `slices` slices. The length is a multiple of `unit`, and no
// slice is empty. If `unit` permits, a slice contains whole groups, or a group contains whole slices.
inline uint32_t slice_length(const WeightProblem& weight, uint32_t slices, uint32_t unit) {
  const uint32_t group = group_size(weight);
  const uint32_t even = round_up(ceil_divide(weight.K, slices), unit);
  if (even < group) return round_up(group / (group / even), unit);
  return group % unit == 0 ? round_up(even, group) : even;
}

// Returns the tiling with about `slices` slices of K. The slices are divided over simdgroups first, if the variant
// allows it, then over threadgroups.
inline Tiling split_k(const GemmTile& row, const WeightProblem& weight, uint32_t slices, uint32_t rest_rows = 0) {
  const VariantRules& rules = rules_of(row.variant);
  Tiling tiling{row};
  tiling.rest_rows = rest_rows;
  tiling.k_per_slice = rules.slices_hold_groups ? slice_length(weight, slices, row.tile.K)
                                                : round_up(ceil_divide(weight.K, slices), row.tile.K);
  const uint32_t filled = ceil_divide(weight.K, tiling.k_per_slice);
  tiling.splits = ceil_divide(filled, rules.most_simdgroups == 0 ? 1 : most_simdgroups(row, weight.format));
  tiling.simdgroups =
      rules.most_simdgroups == 0 ? rules.threads(row.tile) / kSimdWidth : ceil_divide(filled, tiling.splits);
  return tiling;
}

// Estimates that differ by less than this factor count as equal.
inline constexpr double kEqual = 1.01;
// More simdgroups in flight on a core (three per scheduler) bring no gain.
inline constexpr double kEnoughInFlight = 12;

// Calls make(slices) for each number from min_slices to max_slices. Returns the tiling with the least estimated time.
// If that tiling has few simdgroups in flight, returns an equally fast tiling with more of them: more simdgroups hide
// latencies that the estimate does not include.
template <typename Problem, typename Make>
Tiling best_split(const Problem& problem, const GpuDevice& device, uint32_t min_slices, uint32_t max_slices,
                  const Make& make) {
  std::vector<std::pair<Tiling, double>> candidates;  // with their simdgroups in flight
  for (uint32_t slices = min_slices; slices <= max_slices; ++slices) {
    Tiling tiling = make(slices);
    // Slices consist of whole steps or groups, so different numbers of slices can give the same tiling.
    if (!candidates.empty() && candidates.back().first.k_per_slice == tiling.k_per_slice) continue;
    const Estimate found = estimate(tiling, problem, device);
    tiling.seconds = found.total();
    candidates.emplace_back(tiling, found.in_flight);
  }
  auto best = std::ranges::min_element(candidates, {}, [](const auto& candidate) { return candidate.first.seconds; });
  const double most = best->first.seconds * kEqual;
  for (auto other = candidates.begin(); other != candidates.end(); ++other) {
    if (best->second >= kEnoughInFlight) break;
    if (other->first.seconds <= most && other->second > best->second) best = other;
  }
  return best->first;
}

}  // namespace marlin
