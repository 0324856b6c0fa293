#include "csrc/planner/plan_cache.h"

#include <atomic>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>

namespace marlin {

namespace {

using Product = std::tuple<WeightFormat, ElementType, uint32_t, uint32_t, uint32_t>;  // group_size, K, N

struct Rows {
  uint32_t first;
  uint32_t last;
  NamedVariant variant;
};

using Table = std::map<Product, std::vector<Rows>>;

struct Tuned {
  std::atomic<bool> unread{false};  // the loader has not run yet
  std::function<void()> loader;
  std::atomic<uint64_t> generation{0};
  std::mutex mutex;
  Table table;
};

Tuned& tuned() {
  static auto* instance = new Tuned;
  return *instance;
}

}  // namespace

void set_tuned(const std::vector<TunedRange>& ranges) {
  for (const TunedRange& range : ranges) {
    if (!variant_of(range.variant)) throw std::invalid_argument("tuned: no kernel variant '" + range.variant + "'");
  }
  Table table;
  for (const TunedRange& range : ranges) {
    // A table of an earlier version may have a tile that no longer exists. It counts as not measured.
    table[{range.format, range.activations, range.group_size, range.K, range.N}].push_back(
        {range.first_M, range.last_M, NamedVariant::find(range.variant).value_or(NamedVariant{})});
  }
  const std::lock_guard lock(tuned().mutex);
  tuned().table = std::move(table);
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
  const auto found = tuned().table.find({weight.format, problem.activations, group_size(weight), weight.K, weight.N});
  if (found == tuned().table.end()) return {};
  for (const Rows& rows : found->second) {
    if (rows.first <= problem.M && problem.M <= rows.last) return rows.variant;
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
