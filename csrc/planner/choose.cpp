// Which of the candidates for a problem is taken: the one that a tuner measured to be best, else the one that costs
// least by the model. two_pass, which rounds the weights, is taken on request only: by its name, or by a tuner's table.
#include "cost.h"
#include "plan_parts.h"

namespace marlin {

namespace {

// Of those that `eligible` admits; null where it admits none.
template <typename Eligible>
const Candidate* cheapest(std::span<const Candidate> candidates, const GemmProblem& problem, const GpuDevice& device,
                          const Eligible& eligible) {
  const Candidate* found = nullptr;
  double least = 0;
  for (const Candidate& candidate : candidates) {
    if (!eligible(candidate)) continue;
    const double seconds = cost(candidate, problem, device).seconds;
    if (found != nullptr && seconds >= least) continue;
    found = &candidate;
    least = seconds;
  }
  return found;
}

}  // namespace

const Candidate& choose(std::span<const Candidate> candidates, const GemmProblem& problem, const GpuDevice& device) {
  require(!candidates.empty(), "plan: no candidate to choose from");
  const Candidate* found = nullptr;
  if (!problem.tuned.empty()) {
    found = cheapest(candidates, problem, device, [&](const Candidate& candidate) {
      return candidate.variant == problem.tuned || name(candidate) == problem.tuned;
    });
  }
  if (found == nullptr) {
    found =
        cheapest(candidates, problem, device, [](const Candidate& candidate) { return !candidate.plan.dense_product; });
  }
  return found == nullptr ? candidates.front() : *found;
}

}  // namespace marlin
