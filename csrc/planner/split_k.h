// How K is cut into slices: into as many as the model finds cheapest.
#pragma once

#include <optional>

#include "csrc/planner/builder.h"
#include "csrc/planner/cost.h"

namespace marlin {

inline constexpr uint32_t kMaxSlices = 64;

// Returns the k of a slice, a multiple of `unit`, for about `slices` slices of K, none of them empty. Slices start
// where a group starts, or an even part of one, if `unit` allows.
inline uint32_t slice_length(const WeightProblem& weight, uint32_t slices, uint32_t unit) {
  const uint32_t group = group_size(weight);
  const uint32_t even = round_up(ceil_divide(weight.K, slices), unit);
  if (even < group) return round_up(group / (group / even), unit);
  return group % unit == 0 ? round_up(even, group) : even;
}

// Returns the cheapest of the tilings that make(slices) gives for min_slices, ... 1, 2, 3, 4, 6, 8, 12, 16 ... to
// max_slices. The same numbers are tried for any M, so that more rows never become cheaper by another cut.
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
