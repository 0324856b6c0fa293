#include "csrc/gemm/plan_cache.h"

#include <atomic>
#include <mutex>

namespace marlin {

namespace {

struct Tuned {
  std::atomic<bool> unread{false};  // true until the loader runs or set_tuned() is called
  std::function<void()> loader;
  std::atomic<uint64_t> generation{0};
  std::mutex mutex;
  std::vector<TunedRange> ranges;
};

Tuned& tuned() {
  static auto* instance = new Tuned;
  return *instance;
}

}  // namespace

void set_tuned(std::vector<TunedRange> ranges) {
  const std::lock_guard lock(tuned().mutex);
  tuned().ranges = std::move(ranges);
  tuned().unread = false;
  ++tuned().generation;
}

void set_tuned_loader(std::function<void()> loader) {
  tuned().loader = std::move(loader);
  tuned().unread = true;
}

NamedVariant tuned_variant(const GemmProblem& problem) {
  if (tuned().unread) {
    tuned().loader();
    tuned().unread = false;
  }
  const std::lock_guard lock(tuned().mutex);
  const WeightProblem& weight = problem.weight;
  for (const TunedRange& range : tuned().ranges) {
    if (range.K == weight.K && range.N == weight.N && range.group_size == group_size(weight) &&
        range.format == weight.format && range.activations == problem.activations && range.first_M <= problem.M &&
        problem.M <= range.last_M)
      return range.variant;
  }
  return {};
}

NamedVariant tuned_variant(const MoeProblem& problem) {
  GemmProblem product = problem.product;
  product.M = rows_of_expert(problem);
  return tuned_variant(product);
}

uint64_t tuned_generation() {
  return tuned().generation;
}

}  // namespace marlin
