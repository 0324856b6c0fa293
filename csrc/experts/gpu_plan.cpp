// Plans of moe_gemm. With few rows, each threadgroup computes one row with the body of gemv. With more rows, each
// threadgroup computes a block of one expert's rows with the body of gemv, fused or tensor. One dispatch computes all
// products. No second one adds up parts of K, because only the simdgroups of a threadgroup split K (in gemv and fused).
// With few rows, this dispatch can also add up a token's products or apply a gated activation.
#include "csrc/experts/gpu_plan.h"

#include "csrc/planner/split_k.h"

namespace marlin {

namespace {

// Returns the number of elements from the first element of the activations to the last one.
uint64_t extent_of_rows(const MoeProblem& problem) {
  const uint64_t last_token = token_count(problem) - 1;
  return last_token * problem.product.a_row_stride + uint64_t{problem.top_k - 1} * problem.a_slot_stride +
         problem.product.weight.K;
}

// Returns true if the plan may use the variant. A tuner measures gemm, not moe_gemm. So the tuned variant only decides
// whether moe_gemm uses variants that run on all GPUs or those that only some GPUs support (tensor).
bool is_wanted(GemmVariant variant, const MoeProblem& problem, const GpuDevice& device) {
  const GemmProblem& product = problem.product;
  if (!product.variant.is_open()) return product.variant == NamedVariant(variant);
  const auto runs = [&](GemmVariant one) {
    return rules_of(one).refusal == nullptr || rules_of(one).refusal(product, device).empty();
  };
  if (!runs(variant)) return false;
  const std::optional<GemmVariant> tuned = product.tuned.variant();
  if (tuned && runs(*tuned) && computes_experts(*tuned))
    return (rules_of(*tuned).refusal != nullptr) == (rules_of(variant).refusal != nullptr);
  return is_automatic(variant, product, device);
}

int32_t row_weights_type(const MoeProblem& problem) {
  return problem.has_row_weights ? static_cast<int32_t>(problem.row_weights) : -1;
}

MoeParams params_of(const Tiling& tiling, const MoeProblem& problem) {
  const WeightProblem& weight = problem.product.weight;
  const uint32_t rows = tiling.tile.M;
  return {.product = {problem.product.a_row_stride, problem.product.M, weight.N, weight.K, group_size(weight),
                      tiling.k_per_slice, 0},
          .a_slot_stride = problem.a_slot_stride,
          .experts = problem.experts,
          .top_k = problem.top_k,
          .id_bytes = problem.wide_ids ? 8U : 4U,
          .global_scale_expert_stride = weight.global_scale_per_column ? weight.N : 1,
          .block_rows = rows,
          .blocks = moe_blocks(problem.product.M, problem.experts, rows),
          .row_weights_type = row_weights_type(problem),
          .gate = problem.gate.value(),
          .unused = 0};
}

Dispatch moe_dispatch(const Tiling& tiling, const MoeProblem& problem, const GpuDevice& device) {
  const GemmProblem& product = problem.product;
  const MoeParams params = params_of(tiling, problem);
  const uint32_t blocks = sorts_pairs(tiling)      ? params.blocks
                          : adds_up_tokens(tiling) ? token_count(problem)
                                                   : product.M;
  Dispatch dispatch = product_dispatch(tiling, product, {0, tiling.tile.M, blocks}, device);
  dispatch.params = params;
  FunctionConstants& constants = dispatch.constants;
  constants[kConstantWritesPartials] = combines(tiling, problem);
  if (combines(tiling, problem)) constants[kConstantHasBias] = constants[kConstantBiasType] = 0;  // moe_reduce adds it
  if (problem.a_slot_stride % 4 != 0) constants[kConstantVectorActivations] = 0;
  return dispatch;
}

Dispatch reduce_dispatch(const MoeProblem& problem) {
  const GemmProblem& product = problem.product;
  const uint32_t terms = problem.reduce ? problem.top_k : 1;
  const uint32_t rows = problem.reduce ? token_count(problem) : product.M;
  return {.instance = {.kernel = Kernel::moe_reduce, .element = product.activations},
          .constants = bias_constants(product),
          .grid = elementwise_grid(product.weight.N, rows),
          .threads = kElementwiseThreads,
          .params = MoeReduceParams{rows, product.weight.N, terms, problem.experts, problem.wide_ids ? 8U : 4U,
                                    row_weights_type(problem)}};
}

// Returns the fastest tiling with this tile, with K split over simdgroups only. If the kernel adds up the products of a
// token, a threadgroup contains the simdgroups of all slots of the token.
Tiling tiling_of(const GemmTile& row, const MoeProblem& problem, const GpuDevice& device) {
  const VariantRules& rules = rules_of(row.variant);
  const WeightProblem& weight = problem.product.weight;
  const uint32_t slots = adds_up_tokens(row) ? problem.top_k : 1;
  uint32_t most = rules.most_simdgroups == 0 ? 1 : most_simdgroups(row, weight.format);
  if (adds_up_tokens(row)) most = std::min<uint32_t>(most, kMoeReduceMaxSimdgroups / slots);
  most = max_slices(row, weight, most);
  return best_split(problem, device, std::min(most, rules.fewest_slices), most, [&](uint32_t slices) {
    Tiling tiling = split_k(row, weight, slices);
    tiling.simdgroups *= slots;
    return tiling;
  });
}

}  // namespace

Tiling moe_tiling(const MoeProblem& problem, const GpuDevice& device) {
  const GemmProblem& product = problem.product;
  check_weight("moe_gemm", product.weight);
  if (product.M == 0) refuse("moe_gemm", "expert_ids", "at least 1", "0");
  const uint64_t extent = extent_of_rows(problem);
  const bool fits_32_bits = extent <= uint64_t{UINT32_MAX} + 1;
  const std::optional<GemmVariant> named = product.variant.variant();
  if (named && rules_of(*named).has_32_bit_offsets && !fits_32_bits) {
    refuse("moe_gemm", "a",
           "at most 2^32 elements from the first to the last with variant '" + product.variant.text() + "'",
           std::to_string(extent));
  }
  check_variant("moe_gemm", product, device);
  std::vector<Tiling> tilings;
  for (size_t i = 0; i < kGemmVariants.size(); ++i) {
    const auto variant = static_cast<GemmVariant>(i);
    const VariantRules& rules = rules_of(variant);
    if (rules.has_32_bit_offsets && !fits_32_bits) continue;
    if (!is_wanted(variant, problem, device)) continue;
    for (const GemmTile& row : rules.expert_tiles) {
      const bool can_add = problem.reduce && problem.top_k <= kMoeReduceMaxSimdgroups;
      if (can_add || !adds_up_tokens(row)) tilings.push_back(tiling_of(row, problem, device));
    }
  }
  if (tilings.empty()) {
    refuse("moe_gemm", "variant", expert_variants() + " on mps", "'" + product.variant.text() + "'");
  }
  return *std::ranges::min_element(tilings, {}, &Tiling::seconds);
}

Plan plan_moe(const MoeProblem& problem, const GpuDevice& device) {
  const GemmProblem& product = problem.product;
  const Tiling tiling = moe_tiling(problem, device);
  Plan plan;
  Dispatch products = moe_dispatch(tiling, problem, device);
  // The activation is only a little work at the end of a threadgroup, so it changes neither the tiling nor the
  // estimated time.
  plan.applies_gate = problem.gate.present && !sorts_pairs(tiling) && product.weight.N % kGemvColumns == 0;
  if (plan.applies_gate) {
    products.instance.kernel = Kernel::moe_gemv_gated;
  }
  if (sorts_pairs(tiling)) {
    const auto params = std::get<MoeParams>(products.params);
    plan.block_words = params.blocks * kMoeBlockWords + product.M;
    plan.dispatches.push_back(
        {.instance = {Kernel::moe_sort}, .grid = {1, 1, 1}, .threads = {kMoeSortThreads, 1, 1}, .params = params});
  }
  plan.dispatches.push_back(std::move(products));
  if (combines(tiling, problem)) {
    plan.partials = {product.weight.N, product.M, 1};
    plan.dispatches.push_back(reduce_dispatch(problem));
  }
  set_seconds(plan, estimate(tiling, problem, device));
  return plan;
}

}  // namespace marlin
