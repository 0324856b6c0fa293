// Splits K into the number of slices that the cost model finds cheapest.
#pragma once

#include <optional>

#include "csrc/planner/builder.h"
#include "csrc/planner/cost.h"

namespace marlin {

inline constexpr uint32_t kMaxSlices = 64;

// Returns the length of a slice if K is split into about `slices` slices. It is a multiple of `unit`, and no slice is
// empty. If `unit` allows it, a slice contains whole groups, or a group contains whole slices.
inline uint32_t slice_length(const WeightProblem& weight, uint32_t slices, uint32_t unit) {
  const uint32_t group = group_size(weight);
  const uint32_t even = round_up(ceil_divide(weight.K, slices), unit);
  if (even < group) return round_up(group / (group / even), unit);
  return group % unit == 0 ? round_up(even, group) : even;
}

// Calls make(slices) with 1, 2, 3, 4, 6, 8, 12, 16 ... from min_slices to max_slices and returns the cheapest tiling.
// The same numbers are tried for any M. Otherwise a problem with more rows could get a better split and be cheaper.
template <typename Make>
Tiling cheapest_split(const GemmProblem& problem, const GpuDevice& device, uint32_t min_slices, uint32_t max_slices,
                      const Make& make) {
  std::optional<Tiling> best;
  double least = 0;
  for (uint32_t slices = min_slices; slices <= max_slices;) {
    const Tiling tiling = make(slices);
    const double seconds = cost(tiling, problem, device).seconds;
    if (!best || seconds < least) {
      best = tiling;
      least = seconds;
    }
    const bool is_power = (slices & (slices - 1)) == 0;
    slices += slices < 4 ? 1 : is_power ? slices / 2 : slices / 3;
  }
  return *best;
}

}  // namespace marlin
