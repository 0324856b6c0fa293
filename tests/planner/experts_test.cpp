// Tests the predicted costs of products with experts.
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "csrc/experts/gpu_plan.h"
#include "csrc/planner/estimate.h"
#include "plan_checks.h"

using namespace marlin;

namespace {

// The gate and up projections of a layer of gpt-oss-20b, unless other sizes are given.
MoeProblem mixture(uint32_t tokens, uint32_t experts = 32, uint32_t top_k = 4, uint32_t N = 5760, uint32_t K = 2880) {
  return {.product = {.weight = {.format = WeightFormat::mxfp4,
                                 .K = K,
                                 .N = N,
                                 .group_size = 32,
                                 .scales = ElementType::uint8,
                                 .vector_aligned = true},
                      .M = tokens * top_k,
                      .a_row_stride = K,
                      .vector_aligned_a = true},
          .experts = experts,
          .top_k = top_k};
}

// Returns the averages over many tokens that choose different experts at random.
Routing sampled_routing(uint32_t tokens, uint32_t top_k, uint32_t experts, uint32_t block_rows) {
  constexpr int kSamples = 2000;
  std::mt19937 random(1);
  Routing sum;
  std::vector<uint32_t> rows(experts), order(experts);
  for (int sample = 0; sample < kSamples; ++sample) {
    std::fill(rows.begin(), rows.end(), 0);
    for (uint32_t i = 0; i < experts; ++i)
      order[i] = i;
    for (uint32_t token = 0; token < tokens; ++token) {
      for (uint32_t slot = 0; slot < top_k; ++slot) {
        std::swap(order[slot], order[slot + random() % (experts - slot)]);
        ++rows[order[slot]];
      }
    }
    for (const uint32_t count : rows) {
      sum.experts += count != 0;
      sum.blocks += ceil_divide(count, block_rows);
    }
  }
  sum.experts /= kSamples;
  sum.blocks /= kSamples;
  return sum;
}

void check_routing() {
  subject = "routing";
  const Routing one = expected_routing(1, 4, 32, 8);
  expect_close(one.experts, 4, 1e-9, "experts of one token");
  expect_close(one.blocks, 4, 1e-9, "blocks of one token");
  // Two tokens choose one of two experts: with probability 1/2, both choose the same expert.
  expect_close(expected_routing(2, 1, 2, 2).experts, 1.5, 1e-9, "experts of two tokens");
  expect_close(expected_routing(2, 1, 2, 2).blocks, 1.5, 1e-9, "blocks of two rows");
  expect_close(expected_routing(2, 1, 2, 1).blocks, 2, 1e-9, "blocks of one row");
  const Routing all = expected_routing(20, 3, 3, 8);
  expect(all.experts == 3 && all.blocks == 9, "each token chooses every expert");
  const Routing underflow = expected_routing(64, 199999, 200000, 8);
  expect(underflow.experts == 200000 && underflow.blocks == 1600000, "each token chooses nearly every expert");
  for (const auto& [tokens, top_k, experts, block_rows] : {std::array{64U, 8U, 128U, 8U}, {512U, 8U, 128U, 32U}}) {
    const Routing expected = expected_routing(tokens, top_k, experts, block_rows);
    const Routing sampled = sampled_routing(tokens, top_k, experts, block_rows);
    expect_close(expected.experts, sampled.experts, 0.005, "experts of " + std::to_string(tokens) + " tokens");
    expect_close(expected.blocks, sampled.blocks, 0.005, "blocks of " + std::to_string(tokens) + " tokens");
  }
  // For an expert with many rows, the last block is equally likely to have 1, 2, ... or 32 rows. On average 31/64 of it
  // is empty, so each expert adds 31/64 of a block.
  for (const uint32_t tokens : {1700U, 1800U, 100000U}) {
    const Routing many = expected_routing(tokens, 2, 8, 32);
    expect_close(many.blocks, tokens * 2 / 32.0 + 8 * 31 / 64.0, 2e-4, "blocks of many");
  }
}

// With one expert and full blocks, the products take as long as gemm's.
void check_one_expert() {
  for (const char* chip : {"M1", "M4 Max"}) {
    MoeProblem problem = mixture(256, 1, 1);
    problem.product.variant = "fused";
    const GpuDevice device = whole(*find_chip(chip));
    const Tiling tiling = moe_tiling(problem, device);
    const Estimate total = estimate(tiling, problem, device);
    subject = std::string(chip) + ": " + name(tiling);
    expect(total.seconds.size() == 2 && sorts_pairs(tiling), "rows are sorted first");
    expect_close(total.seconds[1], estimate(tiling, problem.product, device).total(), 0.02, "the time of the products");
  }
}

void check_estimates() {
  for (const Chip& chip : kChips) {
    for (const bool reduce : {false, true}) {
      double before = 0;
      for (uint32_t tokens = 1; tokens <= 1024; tokens += 1 + tokens / 4) {
        MoeProblem problem = mixture(tokens);
        problem.reduce = reduce;
        const GpuDevice device = whole(chip);
        const Tiling tiling = moe_tiling(problem, device);
        const Estimate total = estimate(tiling, problem, device);
        const Plan plan = plan_moe(problem, device);
        subject = std::string(chip.name) + ", " + std::to_string(tokens) + " tokens: " + name(tiling);
        expect(total.total() == seconds(plan) && total.seconds.size() == plan.dispatches.size(),
               "a time for each dispatch");
        const double experts = expected_routing(tokens, 4, 32, 8).experts;
        const double bytes = experts * weight_bytes(problem.product.weight);
        const double rate = dram_bytes_per_second(chip, chip.cores) * chip.dram_fraction.value;
        expect(total.total() > bytes / rate, "no faster than memory");
        expect(total.total() >= before / 1.02, "more tokens cost no less");
        for (const char* variant : {"gemv", "fused"}) {
          problem.product.variant = variant;
          expect(seconds(plan_moe(problem, device)) >= seconds(plan), std::string("no slower than ") + variant);
          const Tiling named = moe_tiling(problem, device);
          expect(named.splits == 1 && named.k_per_slice * named.simdgroups >= problem.product.weight.K,
                 "one threadgroup multiplies all of K");
        }
        before = total.total();
      }
    }
  }
}

// The more rows an expert has, the larger the blocks of its rows.
void check_blocks() {
  const GpuDevice device = whole(*find_chip("M1"));
  subject = "blocks";
  for (const auto& [tokens, kernel] :
       {std::pair(1U, Kernel::moe_gemv), std::pair(32U, Kernel::moe_gemv_blocks), std::pair(512U, Kernel::moe_fused)}) {
    const Tiling tiling = moe_tiling(mixture(tokens), device);
    expect(tiling.kernel == kernel, std::to_string(tokens) + " tokens: got " + name(tiling));
  }
}

// A down projection: each slot has its own row, and the slots of a token are added.
MoeProblem summed(uint32_t tokens, uint32_t top_k, uint32_t N, uint32_t K) {
  MoeProblem problem = mixture(tokens, 128, top_k, N, K);
  problem.product.a_row_stride = int64_t{top_k} * K;
  problem.a_slot_stride = K;
  problem.has_row_weights = problem.reduce = true;
  return problem;
}

// Checks the plan with a single dispatch.
void check_sum(const MoeProblem& problem, const Tiling& tiling, const GpuDevice& device) {
  const Plan plan = plan_moe(problem, device);
  const WeightProblem& weight = problem.product.weight;
  const uint32_t slices = tiling.simdgroups / problem.top_k;
  expect(tiling.simdgroups == slices * problem.top_k && tiling.simdgroups <= kMoeReduceMaxSimdgroups,
         "each slot has as many simdgroups");
  expect_tiling(slices, tiling.k_per_slice, weight.K, "slices");
  expect(plan.dispatches.size() == 1 && plan.partials.z == 0 && plan.block_words == 0, "one dispatch, no workspace");
  const Dispatch& dispatch = plan.dispatches[0];
  check_dispatch(dispatch);
  expect(dispatch.instance.kernel == Kernel::moe_gemv_reduce, "the kernel");
  expect(dispatch.threads.x == tiling.simdgroups * kSimdWidth, "threads");
  expect(dispatch.threadgroup_bytes == gemv_threadgroup_bytes(weight.format, 1, tiling.simdgroups), "memory");
  expect(dispatch.grid.x == problem.product.M / problem.top_k, "a threadgroup has a token");
  expect_tiling(dispatch.grid.y, kGemvColumns, weight.N, "columns");
  expect(dispatch.constants[kConstantWritesPartials] == 0, "no partial sums");
  expect(dispatch.constants[kConstantHasBias] == int32_t{problem.product.has_bias}, "the kernel adds the bias");
  const auto& params = std::get<MoeParams>(dispatch.params);
  expect(params.row_weights_type == (problem.has_row_weights ? static_cast<int32_t>(problem.row_weights) : -1),
         "row weights");
}

// With few tokens, a single dispatch also adds the slots, unless two dispatches have a shorter estimate.
void check_sums() {
  for (const Chip& chip : kChips) {
    const GpuDevice device = whole(chip);
    for (const auto& [top_k, N, K] :
         {std::array{4U, 2880U, 2880U}, {8U, 2048U, 768U}, {10U, 2048U, 512U}, {16U, 128U, 4096U}}) {
      for (const uint32_t tokens : {1U, 2U, 16U, 64U}) {
        MoeProblem problem = summed(tokens, top_k, N, K);
        problem.product.has_bias = tokens == 2;
        problem.has_row_weights = tokens != 16;
        problem.row_weights = ElementType::bfloat16;
        problem.product.variant = "gemv";
        const Tiling tiling = moe_tiling(problem, device);
        subject = std::string(chip.name) + ", " + std::to_string(tokens) + " tokens with " + std::to_string(top_k) +
                  " experts: " + std::string(info(tiling.kernel).name);
        if (tiling.kernel == Kernel::moe_gemv_blocks) continue;
        const bool one = tiling.kernel == Kernel::moe_gemv_reduce;
        Tiling other = tiling;
        other.kernel = one ? Kernel::moe_gemv : Kernel::moe_gemv_reduce;
        other.simdgroups = one ? tiling.simdgroups / top_k : tiling.simdgroups * top_k;
        if (other.simdgroups <= kMoeReduceMaxSimdgroups) {
          expect(estimate(tiling, problem, device).total() <= estimate(other, problem, device).total(),
                 "the faster of the two ways");
        }
        if (one) check_sum(problem, tiling, device);
        if (tokens == 1 && N != 128) expect(one, "one token of a real layer");
      }
    }
    subject = std::string(chip.name) + ": sums in two dispatches";
    const auto kernel = [&](const MoeProblem& problem) { return moe_tiling(problem, device).kernel; };
    expect(kernel(summed(1, kMoeReduceMaxSimdgroups, 8192, 768)) == Kernel::moe_gemv_reduce, "the most slots");
    expect(kernel(summed(1, kMoeReduceMaxSimdgroups + 1, 8192, 768)) == Kernel::moe_gemv, "too many slots");
    expect(device.cores < 16 || kernel(summed(1, 16, 128, 4096)) == Kernel::moe_gemv, "one threadgroup for all slots");
    MoeProblem weighted = summed(1, 4, 2880, 2880);
    weighted.reduce = false;
    const Plan plan = plan_moe(weighted, device);
    expect(plan.dispatches.size() == 2 && plan.dispatches[1].instance.kernel == Kernel::moe_reduce,
           "row weights without a sum");
  }
}

// A single dispatch also applies a gated activation if a threadgroup has one row and N has no remainder. Otherwise, the
// plan is that of the product alone.
void check_gates() {
  for (const Chip& chip : kChips) {
    const GpuDevice device = whole(chip);
    for (const auto& [tokens, N] : {std::pair{1U, 5760U}, {1U, 192U}, {512U, 5760U}}) {
      MoeProblem problem = mixture(tokens, 32, 4, N);
      const Plan alone = plan_moe(problem, device);
      problem.gate = MoeGate{
          .activation = static_cast<int32_t>(Activation::clamped_silu), .interleaved = 1, .limit = 7, .alpha = 1.5};
      const Plan plan = plan_moe(problem, device);
      subject = std::string(chip.name) + ", " + std::to_string(tokens) + " tokens, N=" + std::to_string(N);
      expect(!alone.applies_gate, "no activation without a gate");
      expect(plan.applies_gate == (tokens == 1 && N % kGemvColumns == 0), "the activation");
      const Dispatch& dispatch = plan.dispatches.back();
      check_dispatch(dispatch);
      expect(plan.dispatches.size() == alone.dispatches.size() && seconds(plan) == seconds(alone),
             "the product's plan");
      const Dispatch& product = alone.dispatches.back();
      expect(dispatch.constants == product.constants && dispatch.grid.x == product.grid.x &&
                 dispatch.grid.y == product.grid.y && dispatch.threads.x == product.threads.x,
             "the product's dispatch");
      const auto& params = std::get<MoeParams>(dispatch.params);
      expect(params.gate.interleaved == 1 && params.gate.limit == 7 && params.gate.alpha == 1.5f, "the gate");
    }
  }
}

// moe_fused addresses activations with 32 bits.
void check_far_rows() {
  MoeProblem problem = mixture(600);
  const GpuDevice device = whole(*find_chip("M1"));
  subject = "far rows";
  problem.product.a_row_stride = ((int64_t{1} << 32) - 2880) / 600;
  expect(moe_tiling(problem, device).variant == GemmVariant::fused, "rows within 32 bits");
  problem.product.a_row_stride = (int64_t{1} << 32) / 598;
  expect(moe_tiling(problem, device).variant == GemmVariant::gemv, "rows beyond 32 bits");
  problem.product.variant = "fused";
  expect_refused("rows beyond 32 bits for fused", [&] { moe_tiling(problem, device); });
  problem.product.a_row_stride = 2880;
  problem.a_slot_stride = int64_t{1} << 31;
  expect_refused("slots beyond 32 bits for fused", [&] { moe_tiling(problem, device); });
}

}  // namespace

int main(int argc, char** argv) {
  return test::run_cases({{"routing", check_routing},
                          {"one expert", check_one_expert},
                          {"estimates", check_estimates},
                          {"sums", check_sums},
                          {"gates", check_gates},
                          {"blocks", check_blocks},
                          {"far rows", check_far_rows}},
                         argc, argv);
}
