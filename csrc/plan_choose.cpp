// Which of the candidates for a problem is taken. two_pass, which rounds the weights, is so on request only: by its
// name, or by a tuner's table.
#include "plan_parts.h"

namespace marlin {

namespace {

// Instructions for a weight and lane by the count for the M1 (6.5 of gemv at 4 rows and as much again for reading the
// weights another time; 83 of a 64-row tile): six row blocks of gemv cost what one row of tiles costs.
constexpr uint32_t kGemvMostRowBlocks = 6;

std::string_view preferred_variant(const GemmProblem& problem) {
  return ceil_divide(problem.M, kGemvMaxRows) <= kGemvMostRowBlocks ? "gemv" : "double_buffered";
}

}  // namespace

const Candidate& choose(std::span<const Candidate> candidates, const GemmProblem& problem, const GpuDevice&) {
  require(!candidates.empty(), "plan: no candidate to choose from");
  if (!problem.tuned.empty()) {
    const auto tuned = std::ranges::find_if(candidates, [&](const Candidate& candidate) {
      return candidate.variant == problem.tuned || name(candidate) == problem.tuned;
    });
    if (tuned != candidates.end()) return *tuned;
  }
  const std::string_view preferred = preferred_variant(problem);
  const auto found =
      std::ranges::find_if(candidates, [&](const Candidate& candidate) { return candidate.variant == preferred; });
  return found == candidates.end() ? candidates.front() : *found;
}

}  // namespace marlin
