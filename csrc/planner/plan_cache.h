// Finds the plan of a product without planning it again: choosing one costs more CPU time than launching a small
// product. Also keeps what a tuner measured, which new plans of "auto" follow instead of the model.
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

// A product with any number of rows from first_M to last_M, both included.
struct TunedRange {
  WeightFormat format;
  ElementType activations;
  uint32_t group_size;
  uint32_t K;
  uint32_t N;
  uint32_t first_M;
  uint32_t last_M;
  std::string variant;  // "gemv", "double_buffered:128x64x16"
};

// Replaces all earlier ranges. If ranges overlap, the earlier one counts. Safe to call from any thread.
// Throws std::invalid_argument for a name that does not begin with a variant's.
void set_tuned(std::vector<TunedRange> ranges);

// Calls the loader before the first question about a product, so that it can set ranges. It is not called if ranges
// were set before. Threads that ask while it runs call it too: no lock of this file is held.
void set_tuned_loader(std::function<void()> loader);

// Returns the variant that was measured to be best for a product, or an empty text. It lives as long as the process.
std::string_view tuned_variant(const GemmProblem& problem);

// Counts the calls of set_tuned: plans that were found before the last call may be out of date.
uint64_t tuned_generation();

// What of a GemmProblem decides about its plan on one GPU.
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

// Plans for one GPU, each with what a backend prepared to launch it: a Launch is made of a Plan once, when the product
// is new. Forgets the plan that was used least recently when it is full. Safe to call from any thread.
template <typename Launch>
class PlanCache {
 public:
  // Sequence lengths differ from call to call, so the number of plans has no bound of its own.
  static constexpr size_t kMaxPlans = 4096;

  PlanCache(const GpuDevice& device, Launch (*prepare)(Plan), size_t max_plans = kMaxPlans)
      : device_(device), prepare_(prepare), max_plans_(max_plans) {}

  // Throws what plan_gemm and `prepare` throw.
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
