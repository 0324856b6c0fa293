// Caches plans and compiled kernels for the operators of all families. To choose a plan takes more CPU time than to
// launch a small product.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>

namespace marlin {

// Hashes and compares all bytes of a problem, so a new field is always part of the key.
template <typename Problem>
struct AllBytes {
  static_assert(std::has_unique_object_representations_v<Problem>, "no padding and no floats, see problem.h");
  size_t operator()(const Problem& problem) const {
    return std::hash<std::string_view>{}({reinterpret_cast<const char*>(&problem), sizeof(problem)});
  }
  bool operator()(const Problem& a, const Problem& b) const { return std::memcmp(&a, &b, sizeof(a)) == 0; }
};

// A thread-safe cache of the Launches of one kind of problem. A Launch is the backend's data to run a plan. A full
// cache drops the least recently used Launch.
template <typename Problem, typename Launch>
class LaunchCache {
 public:
  // Every sequence length has its own plan, so without a limit the cache would keep growing.
  static constexpr size_t kMaxLaunches = 4096;

  explicit LaunchCache(size_t max_launches = kMaxLaunches) : max_launches_(max_launches) {}

  // Returns the cached Launch, or caches and returns make(). Throws what make() throws. If `generation` differs from
  // the last call's, the cache is cleared first.
  template <typename Make>
  std::shared_ptr<const Launch> get(const Problem& problem, const Make& make, uint64_t generation = 0) {
    {
      const std::lock_guard lock(mutex_);
      if (generation != generation_) forget_all(generation);
      if (const auto found = launches_.find(problem); found != launches_.end()) {
        latest_first_.splice(latest_first_.begin(), latest_first_, found->second);
        return found->second->second;
      }
    }
    auto launch = std::make_shared<const Launch>(make());
    const std::lock_guard lock(mutex_);
    if (generation == generation_ && !launches_.contains(problem)) keep(problem, launch);
    return launch;
  }

 private:
  using Entry = std::pair<Problem, std::shared_ptr<const Launch>>;

  void forget_all(uint64_t generation) {
    launches_.clear();
    latest_first_.clear();
    generation_ = generation;
  }

  void keep(const Problem& problem, std::shared_ptr<const Launch> launch) {
    if (latest_first_.size() == max_launches_) {
      launches_.erase(latest_first_.back().first);
      latest_first_.pop_back();
    }
    latest_first_.emplace_front(problem, std::move(launch));
    launches_.emplace(problem, latest_first_.begin());
  }

  const size_t max_launches_;
  std::mutex mutex_;
  uint64_t generation_ = 0;
  std::list<Entry> latest_first_;
  std::unordered_map<Problem, typename std::list<Entry>::iterator, AllBytes<Problem>, AllBytes<Problem>> launches_;
};

}  // namespace marlin
