// Tests the GPU planner with expected choices: named variants, tiles, stripes, experts, elementwise kernels, refusals.
#include <set>

#include "csrc/experts/gpu_plan.h"
#include "csrc/weights/gpu_plan.h"
#include "plan_checks.h"

using namespace marlin;

namespace {

// Checks that a call selects a variant, or a variant and a tile, by its name. For "auto", a tuner's table selects it.
void check_names() {
  GemmProblem problem = square(3, 500, 704, 64);
  subject = "names";
  const std::vector<Tiling> all = gemm_tilings(problem, {});
  std::set<std::string> names;
  std::set<std::string_view> variants;
  for (const Tiling& tiling : all) {
    variants.insert(name(tiling.variant));
    const std::string wanted = name(tiling);
    const std::string plan = text(build_plan(tiling, problem, {}));
    expect(names.insert(wanted).second, "no two tilings have the same name: " + wanted);
    GemmProblem named = problem;
    named.variant = wanted;
    expect(is_gemm_variant(wanted, problem.activations), "a call may name it: " + wanted);
    expect(text(plan_gemm(named, {})) == plan, "a call gets the tiling that it names: " + wanted);
    GemmProblem tuned = problem;
    tuned.tuned = wanted;
    expect(text(plan_gemm(tuned, {})) == plan, "auto gets the tiling that a table names: " + wanted);
  }
  for (std::string_view wanted :
       {"", "fastest", "rounded:64x64x32", "gemv:", "striped:128x128x16", "two_pass:64x64x32"})
    expect(!is_gemm_variant(wanted, problem.activations), "no call may name it: " + std::string(wanted));
  for (std::string_view variant : kGemmVariants) {
    expect(is_gemm_variant(variant, problem.activations), "a call may name it: " + std::string(variant));
    if (variant == "tensor") continue;  // this GPU has no tensor units; see tensor_test.cpp
    expect(variants.contains(variant), "each variant has tilings: " + std::string(variant));
    problem.variant = variant;
    for (const Tiling& tiling : gemm_tilings(problem, {}))
      expect(name(tiling.variant) == variant, "a named variant has only its own tilings");
  }
  problem.variant = "double_buffered";
  problem.tuned = "gemv";
  expect(host_name(plan_gemm(problem, {}).dispatches[0].instance).starts_with("gemm_double_buffered_"),
         "a table leaves named variants alone");
  problem.variant = "auto";
  problem.tuned = "auto";
}

// Decoding rounds the weight, so "auto" decodes only if the option allows it, and "rounded" decodes at most 256 MiB
// without the option. Both decode only if this is faster.
void check_decoding() {
  subject = "decoding";
  const GemmProblem many = square(4608, 12288, 3072, 32);
  const uint64_t needed = uint64_t{2} * 12288 * 3072;
  GpuDevice device;  // an M1
  const auto decodes = [&](const GemmProblem& problem) { return plan_gemm(problem, device).dense_product; };
  expect(!decodes(many), "not without the option");
  device.decodes.automatic = needed - 1;
  expect(!decodes(many), "not more than the option allows");
  device.decodes.automatic = needed;
  expect(decodes(many), "many rows");
  expect(!decodes(square(8, 12288, 3072, 32)), "few rows take less time without");
  device.decodes = {};
  const GemmProblem rounded = square(4608, 12288, 3072, 32, "rounded");
  expect(decodes(rounded), "rounded needs no option");
  expect(!decodes(square(8, 12288, 3072, 32, "rounded")), "rounded takes what takes less time");
  expect(!decodes(square(4608, 44000, 3072, 32, "rounded")), "258 MiB are more than rounded decodes");
  const auto tilings = gemm_tilings(rounded, device);
  expect(
      reason(choose(tilings, rounded), rounded, device).find("variant 'rounded' or TORCH_MARLIN_METAL_DECODE_MB") == 0,
      "the reason");
  GemmProblem tuned = rounded;
  tuned.tuned = "fused";
  expect(!decodes(tuned), "a table's measurement counts for rounded, too");
  device.decodes.rounded = needed - 1;
  expect(!decodes(rounded), "rounded decodes no more than the option allows");
}

void check_tile_refusals() {
  subject = "refused tiles";
  expect(tile_refusal({64, 64, 32}, ElementType::float32, 2).empty(), "64x64x32 fits");
  expect(tile_refusal({128, 128, 32}, ElementType::float16, 1).empty(), "128x128x32 fits in one stage");
  expect(tile_refusal({128, 128, 32}, ElementType::float32, 2) ==
             "128x128x32 in 2 stages with float32 activations needs 53328 bytes of threadgroup memory, a threadgroup "
             "has at most 32768",
         "the reason: " + tile_refusal({128, 128, 32}, ElementType::float32, 2));
}

// Checks the stripes on an M1, whose 8 cores have registers for 2 threadgroups each, and on an M1 Max.
void check_stripe_choices() {
  const struct {
    uint32_t M, N, K, cores, stripes, k_per_slice;
    bool shares;
    const char* why;
  } rows[] = {
      {64, 64, 512, 8, 2, 256, true, "one tile has no more stripes than slices"},
      {64, 64, 200, 8, 1, 256, false, "K is shorter than a slice"},
      {64, 64, 600, 8, 2, 256, true, "the second slice takes the remainder of K"},
      {64, 1024, 4096, 8, 16, 4096, false, "there are as many tiles as stripes"},
      {64, 896, 4096, 8, 14, 4096, false, "whole tiles leave an eighth of the stripes idle, which is acceptable"},
      {64, 832, 4096, 8, 16, 256, true, "whole tiles would leave three sixteenths of the stripes idle"},
      {64, 1088, 4096, 8, 16, 256, true, "whole tiles would need a second round for one tile"},
      {4096, 4096, 4096, 8, 16, 4096, false, "whole tiles fill 256 rounds"},
      {64, 1024, 4096, 32, 64, 256, true, "a chip with four times the cores has four times the stripes"},
      {64, 384, 1024, 8, 16, 256, true, "some stripes have one unit and some two"},
      {128, 128, 1536, 8, 16, 256, true, "four stripes share a tile"},
  };
  for (const auto& row : rows) {
    const Plan plan = plan_gemm(square(row.M, row.N, row.K, 128, "striped:64x64x32"), {.cores = row.cores});
    subject = text(plan);
    const Dispatch& product = plan.dispatches[0];
    expect(product.grid.x == row.stripes, std::string("stripes: ") + row.why);
    expect(std::get<GemmParams>(product.params).k_per_slice == row.k_per_slice, std::string("slices: ") + row.why);
    expect((plan.dispatches.size() == 2) == row.shares, std::string("reduction: ") + row.why);
  }
}

// One token needs one dispatch, because each threadgroup reads its own expert's id. 512 tokens need two, because the
// rows are sorted first. For 512 tokens, a weighted sum needs one more dispatch.
void check_experts() {
  for (const auto& chip : kChips) {
    for (const uint32_t tokens : {1U, 4U, 16U, 64U, 512U}) {
      const MoeProblem problem{.product = {.weight = {.format = WeightFormat::mxfp4,
                                                      .K = 2880,
                                                      .N = 5760,
                                                      .group_size = 32,
                                                      .scales = ElementType::uint8,
                                                      .vector_aligned = true},
                                           .M = 4 * tokens,
                                           .a_row_stride = 2880,
                                           .vector_aligned_a = true},
                               .experts = 32,
                               .top_k = 4};
      GpuDevice device{.cores = 10};
      device.chip = &chip;
      const Plan plan = plan_moe(problem, device);
      subject = text(plan);
      for (const Dispatch& dispatch : plan.dispatches)
        check_dispatch(dispatch);
      MoeProblem summed = problem;
      summed.reduce = true;
      const Plan sum = plan_moe(summed, device);
      for (const Dispatch& dispatch : sum.dispatches)
        check_dispatch(dispatch);
      const bool adds = sum.dispatches.back().instance.kernel == Kernel::moe_reduce;
      expect(sum.dispatches.size() <= plan.dispatches.size() + (adds ? 1 : 0),
             "a weighted sum adds at most one dispatch");
      expect(adds || tokens < 512, "a sum of 512 tokens adds one");
      if (tokens == 1) expect(plan.dispatches.size() == 1 && plan.block_words == 0, "one token is not sorted");
      if (tokens != 512) continue;
      expect(plan.dispatches.size() == 2 && plan.dispatches[0].instance.kernel == Kernel::moe_sort,
             "512 tokens are sorted");
      const auto& params = std::get<MoeParams>(plan.dispatches[1].params);
      expect(plan.dispatches[1].grid.y == ceil_divide(4 * tokens, params.block_rows) + 33,
             "the grid has room for the largest number of row blocks");
      expect(plan.block_words == 3 * plan.dispatches[1].grid.y + 4 * tokens,
             "the workspace has room for the table and the rows");
    }
  }
}

void check_elementwise() {
  for (uint32_t K : {8U, 24U, 4096U}) {
    for (uint32_t N : {1U, 64U, 65U, 4096U}) {
      const DequantizeProblem problem{.weight = {.K = K, .N = N, .group_size = 32}, .out = ElementType::bfloat16};
      const Plan dequantize = plan_dequantize(problem, {});
      subject = text(dequantize);
      check_dispatch(dequantize.dispatches.at(0));
      expect(host_name(dequantize.dispatches[0].instance) == "dequantize_uint4b8_bfloat16", "function");
      const Plan embedding = plan_embedding({.weight = problem.weight, .count = 3, .out = ElementType::float32}, {});
      subject = text(embedding);
      check_dispatch(embedding.dispatches.at(0));
      expect(host_name(embedding.dispatches[0].instance) == "embedding_uint4b8_float32", "function");
      expect_tiling(embedding.dispatches[0].grid.x, embedding.dispatches[0].threads.x, K / 8, "words");
      expect_tiling(embedding.dispatches[0].grid.y, embedding.dispatches[0].threads.y, 3, "ids");
      const Plan repack =
          plan_repack({.kernel = Kernel::awq_repack, .rows = K / 8, .columns = N, .thread_bytes = 64}, {});
      // The time of a launch, plus that of the bytes that are read and written, at 0.88 of an M1's 68.25 GB/s.
      const auto time_of = [](double bytes) { return 6e-6 + bytes / (0.88 * 68.25e9); };
      const double weight = 0.5 * K * N + 2.0 * ceil_divide(K, 32U) * N;
      expect_close(seconds(dequantize), time_of(weight + 2.0 * K * N), 1e-6, "the time of dequantize");
      expect_close(seconds(embedding), time_of(3 * (weight / N + 4.0 * K)), 1e-6, "the time of embedding");
      expect_close(seconds(repack), time_of(2 * 4.0 * K * N), 1e-6, "the time of a repack");
      for (const Plan* plan : {&dequantize, &repack}) {
        subject = text(*plan);
        const Dispatch& dispatch = plan->dispatches.at(0);
        check_dispatch(dispatch);
        expect(plan->dispatches.size() == 1 && plan->partials.z == 0, "one dispatch without a workspace");
        expect_tiling(dispatch.grid.x, dispatch.threads.x, N, "columns");
        expect_tiling(dispatch.grid.y, dispatch.threads.y, K / 8, "rows");
      }
    }
  }
}

void check_refusals() {
  subject = "refusals";
  expect(!plan_gemm(square(1U << 31, 1U << 16, 4096, 64), {}).dispatches.empty(),
         "auto plans a problem that striped cannot compute");
  try {
    plan_gemm(square(0, 8, 8, 8), {});
  } catch (const std::invalid_argument& error) {
    expect(std::string(error.what()) == "torch_marlin_metal::gemm: M: expected at least 1, got 0", error.what());
  }
  expect_refused("M = 0", [] { plan_gemm(square(0, 8, 8, 8), {}); });
  expect_refused("N = 0", [] { plan_gemm(square(1, 0, 8, 8), {}); });
  expect_refused("K = 12", [] { plan_gemm(square(1, 8, 12, 8), {}); });
  expect_refused("group of 12", [] { plan_gemm(square(1, 8, 24, 12), {}); });
  expect_refused("2^32 scales", [] { plan_gemm(square(1, 1U << 28, 256, 16), {}); });
  expect_refused("more rows than M", [] { plan_gemm(square(5, 8, 8, 8, "fused:32x32x64"), {}); });
  expect_refused("too many tiles to stripe", [] { plan_gemm(square(1U << 31, 1U << 16, 4096, 64, "striped"), {}); });
  expect_refused("unknown variant", [] { plan_gemm(square(1, 8, 8, 8, "fastest"), {}); });
  expect_refused("unknown tile", [] { plan_gemm(square(1, 8, 8, 8, "double_buffered:96x64x32"), {}); });
  expect_refused("no tile", [] { plan_gemm(square(1, 8, 8, 8, "double_buffered:"), {}); });
  expect_refused("no rows", [] { plan_repack({.rows = 0, .columns = 8}, {}); });
  expect_refused("not a repack", [] { plan_repack({.kernel = Kernel::gemv, .rows = 1, .columns = 8}, {}); });
}

}  // namespace

int main(int argc, char** argv) {
  return test::run_cases({{"names", check_names},
                          {"decoding", check_decoding},
                          {"tile refusals", check_tile_refusals},
                          {"stripe choices", check_stripe_choices},
                          {"experts", check_experts},
                          {"elementwise", check_elementwise},
                          {"refusals", check_refusals}},
                         argc, argv);
}
