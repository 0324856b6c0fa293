#include "csrc/planner/plan_cache.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <stdexcept>
#include <tuple>

namespace marlin {

namespace {

using Product = std::tuple<WeightFormat, ElementType, uint32_t, uint32_t, uint32_t>;  // group_size, K, N

struct Rows {
  uint32_t first;
  uint32_t last;
  std::string_view variant;
};

using Table = std::map<Product, std::vector<Rows>>;

struct Tuned {
  std::atomic<bool> unread{false};  // the loader has not run yet
  std::function<void()> loader;
  std::atomic<uint64_t> generation{0};
  std::mutex mutex;
  Table table;
  std::set<std::string> names;  // never shrinks, because problems that are being planned hold views of the names
};

Tuned& tuned() {
  static auto* instance = new Tuned;
  return *instance;
}

bool is_variant(std::string_view text) {
  return std::ranges::find(kGemmVariants, text.substr(0, text.find(':'))) != kGemmVariants.end();
}

// Returns a number for the text: 0 for "auto", then the variants, then the variants with a tile.
uint64_t variant_index(std::string_view text) {
  if (text == "auto") return 0;
  const auto variant = std::ranges::find(kGemmVariants, text);
  if (variant != kGemmVariants.end()) return 1 + static_cast<uint64_t>(variant - kGemmVariants.begin());
  const auto row = std::ranges::find_if(kGemmTiles, [&](const GemmTile& tile) { return name(tile) == text; });
  return 1 + kGemmVariants.size() + static_cast<uint64_t>(row - kGemmTiles.begin());
}

}  // namespace

void set_tuned(std::vector<TunedRange> ranges) {
  for (const TunedRange& range : ranges) {
    if (!is_variant(range.variant)) throw std::invalid_argument("tuned: no kernel variant '" + range.variant + "'");
  }
  Table table;
  const std::lock_guard lock(tuned().mutex);
  for (TunedRange& range : ranges) {
    const std::string& name = *tuned().names.insert(std::move(range.variant)).first;
    table[{range.format, range.activations, range.group_size, range.K, range.N}].push_back(
        {range.first_M, range.last_M, name});
  }
  tuned().table = std::move(table);
  tuned().unread = false;
  ++tuned().generation;
}

void set_tuned_loader(std::function<void()> loader) {
  tuned().loader = std::move(loader);
  tuned().unread = true;
}

std::string_view tuned_variant(const GemmProblem& problem) {
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

uint64_t tuned_generation() {
  return tuned().generation;
}

PlanKey plan_key(const GemmProblem& problem) {
  const WeightProblem& weight = problem.weight;
  uint64_t options = 0;
  const auto append = [&](uint64_t value, uint32_t bits) { options = options << bits | value; };
  append(variant_index(problem.variant), 8);
  append(static_cast<uint64_t>(weight.format), 4);
  for (ElementType type : {problem.activations, weight.scales, weight.zeros, problem.bias})
    append(static_cast<uint64_t>(type), 2);
  for (bool flag : {weight.has_perm, weight.has_global_scale, weight.global_scale_per_column, weight.vector_aligned,
                    problem.has_bias, problem.vector_aligned_a})
    append(flag, 1);
  return {problem.a_row_stride, problem.M, weight.N, weight.K, group_size(weight), options};
}

size_t PlanKeyHash::operator()(const PlanKey& key) const {
  static_assert(std::has_unique_object_representations_v<PlanKey>);
  return std::hash<std::string_view>{}({reinterpret_cast<const char*>(&key), sizeof(key)});
}

}  // namespace marlin
