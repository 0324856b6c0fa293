// Caches plans, because choosing one takes more CPU time than launching a small product. Also keeps the measurements of
// a tuner: plans of "auto" follow them instead of the cost model.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

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
  std::string variant;  // e.g. "gemv" or "double_buffered:128x64x16"
};

// Replaces all ranges of earlier calls. If ranges overlap, the one earlier in the list counts. Safe to call from any
// thread. Throws std::invalid_argument if a name does not begin with a variant.
void set_tuned(std::vector<TunedRange> ranges);

// Sets a loader, which the first call of tuned_variant() runs so that it can call set_tuned(). If set_tuned() was
// called before, the loader is not run. No lock is held while it runs, so several threads may run it at the same time.
void set_tuned_loader(std::function<void()> loader);

// Returns the variant that was measured to be best for a product, or an empty text. The text is never freed.
std::string_view tuned_variant(const GemmProblem& problem);

// Returns the number of calls of set_tuned. Plans that were made before the last call may be out of date.
uint64_t tuned_generation();

// The fields of a GemmProblem that decide its plan on one GPU.
struct PlanKey {
  int64_t a_row_stride;
  uint32_t M, N, K, group_size;
  uint64_t options;  // types, flags and variant

  bool operator==(const PlanKey&) const = default;
};

PlanKey plan_key(const GemmProblem& problem);

struct PlanKeyHash {
  size_t operator()(const PlanKey& key) const;
};

// A cache of Launches for one GPU, which drops the least recently used when it is full. A Launch is what a backend
// needs to run a plan; `prepare` makes it when the product is new. Safe to use from any thread.
template <typename Launch>
class PlanCache {
 public:
  // Every sequence length has a plan, so without a limit the number of plans would keep growing.
  static constexpr size_t kMaxPlans = 4096;

  PlanCache(const GpuDevice& device, Launch (*prepare)(Plan), size_t max_plans = kMaxPlans)
      : device_(device), prepare_(prepare), max_plans_(max_plans) {}

  // Returns the cached Launch, or plans and prepares one. Throws what plan_gemm and `prepare` throw.
  std::shared_ptr<const Launch> find_plan(GemmProblem problem) {
    const PlanKey key = plan_key(problem);
    const uint64_t generation = tuned_generation();
    {
      const std::lock_guard lock(mutex_);
      if (generation != generation_) forget_all(generation);
      if (const auto found = by_key_.find(key); found != by_key_.end()) {
        latest_first_.splice(latest_first_.begin(), latest_first_, found->second);
        return found->second->second;
      }
    }
    if (problem.variant == "auto") problem.tuned = tuned_variant(problem);
    auto launch = std::make_shared<const Launch>(prepare_(plan_gemm(problem, device_)));
    const std::lock_guard lock(mutex_);
    if (generation == generation_ && !by_key_.contains(key)) keep(key, launch);
    return launch;
  }

 private:
  using Entry = std::pair<PlanKey, std::shared_ptr<const Launch>>;

  void forget_all(uint64_t generation) {
    by_key_.clear();
    latest_first_.clear();
    generation_ = generation;
  }

  void keep(const PlanKey& key, std::shared_ptr<const Launch> launch) {
    if (latest_first_.size() == max_plans_) {
      by_key_.erase(latest_first_.back().first);
      latest_first_.pop_back();
    }
    latest_first_.emplace_front(key, std::move(launch));
    by_key_.emplace(key, latest_first_.begin());
  }

  const GpuDevice device_;
  Launch (*const prepare_)(Plan);
  const size_t max_plans_;
  std::mutex mutex_;
  uint64_t generation_ = 0;
  std::list<Entry> latest_first_;
  std::unordered_map<PlanKey, typename std::list<Entry>::iterator, PlanKeyHash> by_key_;
};

}  // namespace marlin
