// Splits K into the number of slices whose estimated time is the least.
#pragma once

#include <algorithm>
#include <vector>

#include "csrc/planner/builder.h"
#include "csrc/planner/estimate.h"

namespace marlin {

inline constexpr uint32_t kMaxSlices = 64;
// The shortest slices of K. Adding up shorter slices would cost more than splitting K gains.
inline constexpr uint32_t kGemvMinSlice = 64;
inline constexpr uint32_t kFusedMinSlice = 2 * kFusedK;
// The fewest slices in fused, each of which has a simdgroup. In published measurements on an M1 (the mlx-omarchy
// project), threadgroups of two simdgroups reached two thirds of the matrix rate of larger threadgroups.
inline constexpr uint32_t kFusedMinSlices = 4;

// Returns the largest number of slices of K of which each has at least `min_slice` elements: 1 if K is shorter.
inline uint32_t max_slices(const WeightProblem& weight, uint32_t min_slice) {
  return std::clamp<uint32_t>(weight.K / min_slice, 1, kMaxSlices);
}

// Returns the length of a slice if K is split into about `slices` slices. The length is a multiple of `unit`, and no
// slice is empty. If `unit` allows it, a slice contains whole groups, or a group contains whole slices.
inline uint32_t slice_length(const WeightProblem& weight, uint32_t slices, uint32_t unit) {
  const uint32_t group = group_size(weight);
  const uint32_t even = round_up(ceil_divide(weight.K, slices), unit);
  if (even < group) return round_up(group / (group / even), unit);
  return group % unit == 0 ? round_up(even, group) : even;
}

// Slices consist of whole steps or groups, so several numbers of slices may give the same tiling.
inline bool divides_k_alike(const Tiling& a, const Tiling& b) {
  return a.k_per_slice == b.k_per_slice && a.splits == b.splits && a.simdgroups == b.simdgroups;
}

// Estimates that differ by less than this factor count as equal.
inline constexpr double kEqual = 1.01;
// A core gains nothing from more simdgroups in flight than this, three per scheduler.
inline constexpr double kEnoughInFlight = 12;

// Calls make(slices) with all numbers from min_slices to max_slices. Returns the tiling with the least estimated time.
// If it has few simdgroups in flight, an equal one with more of them is returned instead, because more simdgroups also
// hide latencies that the estimate does not count.
template <typename Problem, typename Make>
Tiling best_split(const Problem& problem, const GpuDevice& device, uint32_t min_slices, uint32_t max_slices,
                  const Make& make) {
  struct Candidate {
    Tiling tiling;
    double seconds, in_flight;
  };
  std::vector<Candidate> candidates;
  for (uint32_t slices = min_slices; slices <= max_slices; ++slices) {
    const Tiling tiling = make(slices);
    if (!candidates.empty() && divides_k_alike(candidates.back().tiling, tiling)) continue;
    const Estimate found = estimate(tiling, problem, device);
    candidates.push_back({tiling, found.total(), found.in_flight});
  }
  auto best = std::ranges::min_element(candidates, {}, &Candidate::seconds);
  const double most = best->seconds * kEqual;
  for (auto other = candidates.begin(); other != candidates.end(); ++other) {
    if (best->in_flight >= kEnoughInFlight) break;
    if (other->seconds <= most && other->in_flight > best->in_flight) best = other;
  }
  return best->tiling;
}

}  // namespace marlin
