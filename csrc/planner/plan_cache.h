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
#include <type_traits>
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

// Sets a loader. The first call of tuned_variant() runs it, so that it can call set_tuned(). If set_tuned() has been
// called already, the loader is not run. No lock is held while the loader runs, so several threads may run it at the
// same time.
void set_tuned_loader(std::function<void()> loader);

// Returns the variant that was measured to be best for a product, or an empty text. The text is never freed.
std::string_view tuned_variant(const GemmProblem& problem);

// Returns the same for the weight of one expert and the rows that it has if the router spreads the pairs evenly.
std::string_view tuned_variant(const MoeProblem& problem);

// Returns the number of calls of set_tuned. Plans that were made before the last call may be out of date.
uint64_t tuned_generation();

// The fields of a problem that decide its plan on one GPU. A key does not contain the kind of
// problem, so each kind has a cache of its own.
struct PlanKey {
  int64_t a_row_stride;
  uint32_t M, N, K, group_size;
  uint64_t options;  // types, flags and variant

  bool operator==(const PlanKey&) const = default;
};

PlanKey plan_key(const GemmProblem& problem);
PlanKey plan_key(const DequantizeProblem& problem);
PlanKey plan_key(const EmbeddingProblem& problem);
PlanKey plan_key(const RepackProblem& problem);

// The fields of a MoeProblem that decide its plan on one GPU.
struct MoeKey {
  PlanKey product;
  int64_t a_slot_stride;
  uint32_t experts, top_k;
  uint32_t gate_limit, gate_alpha;  // the bits of the floats
  uint64_t options;

  bool operator==(const MoeKey&) const = default;
};

MoeKey plan_key(const MoeProblem& problem);

template <typename Key>
struct BytesHash {
  static_assert(std::has_unique_object_representations_v<Key>);
  size_t operator()(const Key& key) const {
    return std::hash<std::string_view>{}({reinterpret_cast<const char*>(&key), sizeof(key)});
  }
};

// A cache of Launches, which drops the least recently used when it is full. A Launch is what a backend needs to run a
// plan. Safe to use from any thread.
template <typename Key, typename Launch>
class LaunchCache {
 public:
  // Every sequence length has a plan, so without a limit the number of plans would keep growing.
  static constexpr size_t kMaxLaunches = 4096;

  explicit LaunchCache(size_t max_launches = kMaxLaunches) : max_launches_(max_launches) {}

  // Returns the cached Launch, or make()'s. Throws what make() throws. A generation that differs from the last call's
  // clears the cache.
  template <typename Make>
  std::shared_ptr<const Launch> get(const Key& key, const Make& make, uint64_t generation = 0) {
    {
      const std::lock_guard lock(mutex_);
      if (generation != generation_) forget_all(generation);
      if (const auto found = by_key_.find(key); found != by_key_.end()) {
        latest_first_.splice(latest_first_.begin(), latest_first_, found->second);
        return found->second->second;
      }
    }
    auto launch = std::make_shared<const Launch>(make());
    const std::lock_guard lock(mutex_);
    if (generation == generation_ && !by_key_.contains(key)) keep(key, launch);
    return launch;
  }

 private:
  using Entry = std::pair<Key, std::shared_ptr<const Launch>>;

  void forget_all(uint64_t generation) {
    by_key_.clear();
    latest_first_.clear();
    generation_ = generation;
  }

  void keep(const Key& key, std::shared_ptr<const Launch> launch) {
    if (latest_first_.size() == max_launches_) {
      by_key_.erase(latest_first_.back().first);
      latest_first_.pop_back();
    }
    latest_first_.emplace_front(key, std::move(launch));
    by_key_.emplace(key, latest_first_.begin());
  }

  const size_t max_launches_;
  std::mutex mutex_;
  uint64_t generation_ = 0;
  std::list<Entry> latest_first_;
  std::unordered_map<Key, typename std::list<Entry>::iterator, BytesHash<Key>> by_key_;
};

// The parts of a product that PlanCache needs, for each kind of problem.
inline GemmProblem& product_of(GemmProblem& problem) {
  return problem;
}
inline GemmProblem& product_of(MoeProblem& problem) {
  return problem.product;
}
inline Plan plan_product(const GemmProblem& problem, const GpuDevice& device) {
  return plan_gemm(problem, device);
}
inline Plan plan_product(const MoeProblem& problem, const GpuDevice& device) {
  return plan_moe(problem, device);
}

// A cache of Launches of gemm (GemmProblem) or moe_gemm (MoeProblem) for one GPU; `prepare` makes one from its plan.
// Plans of "auto" follow the tuner's measurements. Safe to use from any thread.
template <typename Problem, typename Launch>
class PlanCache {
  using Key = decltype(plan_key(Problem{}));

 public:
  PlanCache(const GpuDevice& device, Launch (*prepare)(Plan), size_t max_plans = LaunchCache<Key, Launch>::kMaxLaunches)
      : device_(device), prepare_(prepare), launches_(max_plans) {}

  // Returns the cached Launch, or plans and prepares one. Throws what the planner and `prepare` throw.
  std::shared_ptr<const Launch> find_plan(Problem problem) {
    const auto make = [&] {
      GemmProblem& product = product_of(problem);
      if (product.variant == "auto") product.tuned = tuned_variant(problem);
      return prepare_(plan_product(problem, device_));
    };
    return launches_.get(plan_key(problem), make, tuned_generation());
  }

 private:
  const GpuDevice device_;
  Launch (*const prepare_)(Plan);
  LaunchCache<Key, Launch> launches_;
};

}  // namespace marlin
