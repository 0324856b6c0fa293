// Caches the plans of gemm and moe_gemm, and stores the measurements of a tuner. For "auto", a measurement has priority
// over the planner's estimates.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "csrc/planner/launch_cache.h"
#include "csrc/planner/plan.h"

namespace marlin {

// The variant that a tuner chose for a product with first_M to last_M rows, both included.
struct TunedRange {
  WeightFormat format;
  ElementType activations;
  uint32_t group_size;
  uint32_t K;
  uint32_t N;
  uint32_t first_M;
  uint32_t last_M;
  NamedVariant variant;
};

// Replaces the ranges of all earlier calls. If ranges overlap, the first one in the list is used. Thread-safe.
void set_tuned(std::vector<TunedRange> ranges);

// Sets a loader, which usually calls set_tuned(). The first call of tuned_variant() runs the loader, unless set_tuned()
// has been called before. No lock is held while the loader runs, so several threads may run it at the same time.
void set_tuned_loader(std::function<void()> loader);

// Returns the variant that a tuner measured as the fastest for a product, or "auto" if there is no measurement.
NamedVariant tuned_variant(const GemmProblem& problem);

// Returns the tuned variant for the weight of one expert, with the number of rows per expert if the router spreads the
// pairs evenly.
NamedVariant tuned_variant(const MoeProblem& problem);

// Returns the number of calls of set_tuned. Plans from before the last call may be out of date.
uint64_t tuned_generation();

// A thread-safe cache of Launches for gemm (GemmProblem) or moe_gemm (MoeProblem) on one GPU. `plan` makes a plan, and
// `prepare` converts a plan to a Launch. For "auto", plans follow the tuner's measurements.
template <typename Problem, typename Launch>
class PlanCache {
  using Launches = LaunchCache<Problem, Launch>;

 public:
  PlanCache(const GpuDevice& device, Plan (*plan)(const Problem&, const GpuDevice&), Launch (*prepare)(Plan),
            size_t max_plans = Launches::kMaxLaunches)
      : device_(device), plan_(plan), prepare_(prepare), launches_(max_plans) {}

  // Returns the cached Launch, or plans and prepares a new one. Throws what `plan` and `prepare` throw.
  std::shared_ptr<const Launch> find_plan(const Problem& problem) {
    const auto make = [&] {
      Problem tuned = problem;
      GemmProblem& product = product_of(tuned);
      if (product.variant.is_open()) product.tuned = tuned_variant(problem);
      return prepare_(plan_(tuned, device_));
    };
    return launches_.get(problem, make, tuned_generation());
  }

 private:
  static GemmProblem& product_of(GemmProblem& problem) { return problem; }
  static GemmProblem& product_of(MoeProblem& problem) { return problem.product; }

  const GpuDevice device_;
  Plan (*const plan_)(const Problem&, const GpuDevice&);
  Launch (*const prepare_)(Plan);
  Launches launches_;
};

}  // namespace marlin
