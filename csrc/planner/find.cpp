#include "tuned.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <tuple>

#include "plan_parts.h"

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
  std::atomic<bool> any{false};  // products of machines without a table ask nothing more
  std::mutex mutex;
  Table table;
  std::set<std::string> names;  // of this and all earlier tables: remembered plans keep views of them
};

Tuned& tuned() {
  static auto* instance = new Tuned;
  return *instance;
}

bool is_variant(std::string_view text) {
  const auto names = gemm_variants();
  return std::ranges::find(names, text.substr(0, text.find(':'))) != names.end();
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
  tuned().any = !table.empty();
  tuned().table = std::move(table);
}

std::string_view tuned_variant(const GemmProblem& problem) {
  if (!tuned().any) return {};
  const std::lock_guard lock(tuned().mutex);
  const WeightProblem& weight = problem.weight;
  const auto found = tuned().table.find({weight.format, problem.activations, group_size(weight), weight.K, weight.N});
  if (found == tuned().table.end()) return {};
  for (const Rows& rows : found->second) {
    if (rows.first <= problem.M && problem.M <= rows.last) return rows.variant;
  }
  return {};
}

}  // namespace marlin
