#include "plan_cache.h"

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

namespace marlin {

namespace {

using Key = std::pair<GemmProblem, GpuDevice>;

// Sequence lengths differ from call to call: at some number of plans the old ones go, all at once.
constexpr size_t kMostPlans = 4096;

struct Cache {
  std::mutex mutex;
  std::set<std::string, std::less<>> names;
  std::map<Key, std::shared_ptr<const Plan>> plans;
};

Cache& cache() {
  static auto* instance = new Cache;
  return *instance;
}

// The caller's text may not live as long as the key.
std::string_view lasting(std::set<std::string, std::less<>>& texts, std::string_view text) {
  return *texts.emplace(text).first;
}

}  // namespace

std::shared_ptr<const Plan> remembered_plan(const GemmProblem& problem, const GpuDevice& device) {
  Key key{problem, device};
  {
    const std::lock_guard lock(cache().mutex);
    const auto found = cache().plans.find(key);
    if (found != cache().plans.end()) return found->second;
  }
  auto plan = std::make_shared<const Plan>(plan_gemm(problem, device));
  const std::lock_guard lock(cache().mutex);
  if (cache().plans.size() >= kMostPlans) cache().plans.clear();
  key.first.variant = lasting(cache().names, problem.variant);
  key.first.tuned = lasting(cache().names, problem.tuned);
  return cache().plans.emplace(std::move(key), std::move(plan)).first->second;
}

}  // namespace marlin
