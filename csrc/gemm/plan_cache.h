// Caches the plans of products, and keeps the measurements of a tuner: plans of "auto" follow them instead of the table
// of decisions.
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

// Replaces all ranges of earlier calls. If ranges overlap, the one earlier in the list counts. Safe to call from any
// thread.
void set_tuned(std::vector<TunedRange> ranges);

// Sets a loader. The first call of tuned_variant() runs it, so that it can call set_tuned(). If set_tuned() has been
// called already, the loader is not run. No lock is held while the loader runs, so several threads may run it at the
// same time.
void set_tuned_loader(std::function<void()> loader);

// Returns the variant that was measured to be best for a product, or "auto".
NamedVariant tuned_variant(const GemmProblem& problem);

// Returns the same for the weight of one expert and the rows that it has if the router spreads the pairs evenly.
NamedVariant tuned_variant(const MoeProblem& problem);

// Returns the number of calls of set_tuned. Plans that were made before the last call may be out of date.
uint64_t tuned_generation();

// A cache of Launches of gemm (GemmProblem) or moe_gemm (MoeProblem) for one GPU; `plan` makes a plan, and `prepare` a
// Launch of it. Plans of "auto" follow the tuner's measurements. Safe to use from any thread.
template <typename Problem, typename Launch>
class PlanCache {
  using Launches = LaunchCache<Problem, Launch>;

 public:
  PlanCache(const GpuDevice& device, Plan (*plan)(const Problem&, const GpuDevice&), Launch (*prepare)(Plan),
            size_t max_plans = Launches::kMaxLaunches)
      : device_(device), plan_(plan), prepare_(prepare), launches_(max_plans) {}

  // Returns the cached Launch, or plans and prepares one. Throws what `plan` and `prepare` throw.
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
