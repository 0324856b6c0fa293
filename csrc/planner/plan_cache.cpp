#include "csrc/planner/plan_cache.h"

#include <algorithm>
#include <atomic>
#include <bit>
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

// Numbers the texts that gemm(variant=) accepts: 0 is "auto", then the variants, then each variant with a tile.
uint64_t variant_index(std::string_view text) {
  if (text == "auto") return 0;
  const std::optional<GemmVariant> variant = variant_of(text);
  if (variant && text == name(*variant)) return 1 + static_cast<uint64_t>(*variant);
  const auto row = std::ranges::find_if(kGemmTiles, [&](const GemmTile& tile) { return names(text, tile); });
  return 1 + kGemmVariants.size() + static_cast<uint64_t>(row - kGemmTiles.begin());
}

}  // namespace

void set_tuned(std::vector<TunedRange> ranges) {
  for (const TunedRange& range : ranges) {
    if (!variant_of(range.variant)) throw std::invalid_argument("tuned: no kernel variant '" + range.variant + "'");
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

std::string_view tuned_variant(const MoeProblem& problem) {
  GemmProblem product = problem.product;
  product.M = rows_of_expert(problem);
  return tuned_variant(product);
}

uint64_t tuned_generation() {
  return tuned().generation;
}

namespace {

// Packs small fields into one number, which is cheaper to compare than the fields.
struct Options {
  uint64_t bits = 0;

  template <typename Value>
  Options& add(Value value, uint32_t width) {
    bits = bits << width | static_cast<uint64_t>(value);
    return *this;
  }
  Options& add(const WeightProblem& weight) {
    add(weight.format, 4).add(weight.scales, 2).add(weight.zeros, 2).add(weight.has_perm, 1);
    return add(weight.has_global_scale, 1).add(weight.global_scale_per_column, 1).add(weight.vector_aligned, 1);
  }
};

PlanKey weight_key(const WeightProblem& weight, uint32_t M, int64_t a_row_stride, const Options& options) {
  return {a_row_stride, M, weight.N, weight.K, group_size(weight), options.bits};
}

}  // namespace

PlanKey plan_key(const GemmProblem& problem) {
  Options options;
  options.add(variant_index(problem.variant), 8).add(problem.weight).add(problem.activations, 2);
  options.add(problem.bias, 2).add(problem.has_bias, 1).add(problem.vector_aligned_a, 1);
  return weight_key(problem.weight, problem.M, problem.a_row_stride, options);
}

PlanKey plan_key(const DequantizeProblem& problem) {
  return weight_key(problem.weight, 0, 0, Options().add(problem.weight).add(problem.out, 2));
}

PlanKey plan_key(const EmbeddingProblem& problem) {
  const Options options = Options().add(problem.weight).add(problem.out, 2).add(problem.wide_ids, 1);
  return weight_key(problem.weight, problem.count, 0, options);
}

PlanKey plan_key(const RepackProblem& problem) {
  const Options options = Options().add(problem.kernel, 8).add(problem.has_perm, 1).add(problem.stored_zeros, 2);
  return {0, problem.rows, problem.columns, 0, 0, options.bits};
}

MoeKey plan_key(const MoeProblem& problem) {
  Options options;
  options.add(problem.wide_ids, 1).add(problem.row_weights, 2).add(problem.has_row_weights, 1).add(problem.reduce, 1);
  const MoeGate gate = problem.gate.value_or(MoeGate{});
  options.add(problem.gate.has_value(), 1).add(gate.activation, 3).add(gate.interleaved, 1);
  return {plan_key(problem.product),
          problem.a_slot_stride,
          problem.experts,
          problem.top_k,
          std::bit_cast<uint32_t>(gate.limit),
          std::bit_cast<uint32_t>(gate.alpha),
          options.bits};
}

}  // namespace marlin
