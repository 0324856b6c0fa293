// How many slices of K a product is cut into: as many as the model finds cheapest.
#pragma once

#include <optional>

#include "cost.h"

namespace marlin {

// The cheapest of the candidates that make(slices) gives for fewest, ... 1, 2, 3, 4, 6, 8, 12, 16 ... to `most` slices.
// The same numbers are tried for any M, so that more rows never become cheaper by another cut.
template <typename Make>
Candidate cheapest_split(const GemmProblem& problem, const GpuDevice& device, uint32_t fewest, uint32_t most,
                         const Make& make) {
  std::optional<Candidate> best;
  double least = 0;
  for (uint32_t slices = fewest; slices <= most;) {
    Candidate candidate = make(slices);
    const double seconds = cost(candidate, problem, device).seconds;
    if (!best || seconds < least) {
      best = std::move(candidate);
      least = seconds;
    }
    const bool is_power = (slices & (slices - 1)) == 0;
    slices += slices < 4 ? 1 : is_power ? slices / 2 : slices / 3;
  }
  return *best;
}

}  // namespace marlin
