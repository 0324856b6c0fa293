// Tests which plans the cache keeps, and which products share a plan.
#include "csrc/planner/plan_cache.h"

#include "plan_checks.h"

using namespace marlin;

namespace {

uint32_t plans_prepared = 0;

std::string prepare(Plan plan) {
  ++plans_prepared;
  return text(plan);
}

// Checks three things: a new M builds one plan and a known M builds none; the least recently used plan is dropped; and
// a tuner's table replaces plans.
void check_cache() {
  subject = "plan cache";
  set_tuned({});
  PlanCache<GemmProblem, std::string> cache({}, prepare, 3);
  const auto find = [&](uint32_t M, std::string_view variant = "auto") {
    return *cache.find_plan(square(M, 512, 704, 64, variant));
  };
  const auto prepared_by = [&](uint32_t M) {
    const uint32_t before = plans_prepared;
    expect(find(M) == text(plan_gemm(square(M, 512, 704, 64), {})), "the cache gives the plan of plan_gemm");
    return plans_prepared - before;
  };
  for (uint32_t M : {1U, 2U, 3U})
    expect(prepared_by(M) == 1, "one plan is built for a new M");
  for (uint32_t M : {2U, 3U, 1U})
    expect(prepared_by(M) == 0, "no plan is built for a known M");
  expect(prepared_by(4) == 1 && prepared_by(2) == 1, "the plan used least recently is dropped");
  expect(prepared_by(1) == 0 && prepared_by(4) == 0, "plans used more recently are kept");
  set_tuned({{WeightFormat::uint4b8, ElementType::float16, 64, 704, 512, 1, 4, "single_stage"}});
  expect(find(4).starts_with("gemm_single_stage_"), "a tuner's table replaces cached plans");
  expect(find(4, "gemv").starts_with("gemv_"), "a tuner's table leaves named variants alone");
  set_tuned({});
  expect(prepared_by(4) == 1, "removing the table replaces cached plans too");
}

// The cache of products with experts plans them with plan_moe, and follows a tuner's table too.
void check_moe_cache() {
  subject = "plan cache of experts";
  set_tuned({});
  GpuDevice device = gpu_device("M5", 10);
  set_system(device, supposed_system(*device.chip));
  const MoeProblem problem{.product = square(512, 512, 704, 64), .experts = 8, .top_k = 4};
  PlanCache<MoeProblem, std::string> cache(device, prepare);
  const uint32_t before = plans_prepared;
  expect(*cache.find_plan(problem) == text(plan_moe(problem, device)), "the cache gives the plan of plan_moe");
  expect(cache.find_plan(problem) == cache.find_plan(problem) && plans_prepared == before + 1, "one plan is built");
  set_tuned({{WeightFormat::uint4b8, ElementType::float16, 64, 704, 512, 1, 64, "tensor"}});
  expect(cache.find_plan(problem)->find("moe_tensor_") != std::string::npos, "a tuner's table replaces cached plans");
  set_tuned({});
}

// Checks that changing any field of a problem on which its plan can depend changes the key.
void check_keys() {
  subject = "plan keys";
  const auto problem = [] { return square(3, 512, 704, 64); };
  std::vector<GemmProblem> problems{problem()};
  const auto vary = [&](auto&& change) { change(problems.emplace_back(problem())); };
  vary([](GemmProblem& p) { p.M = 4; });
  vary([](GemmProblem& p) { p.a_row_stride = 708; });
  vary([](GemmProblem& p) { p.activations = ElementType::bfloat16; });
  vary([](GemmProblem& p) { p.bias = ElementType::bfloat16; });
  vary([](GemmProblem& p) { p.has_bias = true; });
  vary([](GemmProblem& p) { p.vector_aligned_a = false; });
  vary([](GemmProblem& p) { p.weight.format = WeightFormat::lut4; });
  vary([](GemmProblem& p) { p.weight.K = 768; });
  vary([](GemmProblem& p) { p.weight.N = 516; });
  vary([](GemmProblem& p) { p.weight.group_size = 32; });
  vary([](GemmProblem& p) { p.weight.scales = ElementType::float32; });
  vary([](GemmProblem& p) { p.weight.zeros = ElementType::uint8; });
  vary([](GemmProblem& p) { p.weight.has_perm = true; });
  vary([](GemmProblem& p) { p.weight.has_global_scale = true; });
  vary([](GemmProblem& p) { p.weight.global_scale_per_column = true; });
  vary([](GemmProblem& p) { p.weight.vector_aligned = false; });
  std::vector<std::string> names(kGemmVariants.begin(), kGemmVariants.end());
  for (const GemmTile& row : kGemmTiles) {
    if (row.variant != GemmVariant::two_pass) names.push_back(name(row));
  }
  for (const std::string& variant : names)
    vary([&](GemmProblem& p) { p.variant = variant; });
  for (size_t i = 0; i < problems.size(); ++i) {
    for (size_t j = 0; j < problems.size(); ++j)
      expect((plan_key(problems[i]) == plan_key(problems[j])) == (i == j),
             "two problems have the same key only if they are equal");
  }
}

// Checks that the problem, and the problem after each single change, all have different keys.
template <typename Problem, typename... Changes>
void check_keys_of(Problem problem, const Changes&... changes) {
  std::vector<Problem> problems{problem};
  (changes(problems.emplace_back(problem)), ...);
  for (size_t i = 0; i < problems.size(); ++i) {
    for (size_t j = 0; j < problems.size(); ++j)
      expect((plan_key(problems[i]) == plan_key(problems[j])) == (i == j),
             "two problems have the same key only if they are equal");
  }
}

void check_elementwise_keys() {
  subject = "keys of elementwise kernels";
  const WeightProblem weight = square(1, 512, 704, 64).weight;
  const auto format = [](auto& p) { p.weight.format = WeightFormat::nvfp4; };
  const auto N = [](auto& p) { p.weight.N += 8; };
  const auto K = [](auto& p) { p.weight.K += 64; };
  const auto group = [](auto& p) { p.weight.group_size = 32; };
  const auto scales = [](auto& p) { p.weight.scales = ElementType::float32; };
  const auto zeros = [](auto& p) { p.weight.zeros = ElementType::uint8; };
  const auto perm = [](auto& p) { p.weight.has_perm = true; };
  const auto aligned = [](auto& p) { p.weight.vector_aligned = false; };
  const auto out = [](auto& p) { p.out = ElementType::float32; };
  check_keys_of(DequantizeProblem{weight}, format, N, K, group, scales, zeros, perm, aligned, out);
  check_keys_of(
      EmbeddingProblem{weight, 5}, format, N, K, group, scales, zeros, perm, aligned, out, [](auto& p) { p.count = 6; },
      [](auto& p) { p.wide_ids = false; });
  check_keys_of(
      RepackProblem{Kernel::gptq_repack, 4, 8}, [](auto& p) { p.kernel = Kernel::awq_repack; },
      [](auto& p) { p.rows = 5; }, [](auto& p) { p.columns = 5; }, [](auto& p) { p.has_perm = true; },
      [](auto& p) { p.stored_zeros = StoredZeros::masked; });
}

void check_moe_keys() {
  subject = "keys of products with experts";
  check_keys_of(
      MoeProblem{.product = square(12, 512, 704, 64), .experts = 8, .top_k = 4}, [](auto& p) { p.product.M = 16; },
      [](auto& p) { p.product.a_row_stride = 708; }, [](auto& p) { p.product.variant = "gemv"; },
      [](auto& p) { p.product.weight.format = WeightFormat::nvfp4; }, [](auto& p) { p.a_slot_stride = 704; },
      [](auto& p) { p.experts = 16; }, [](auto& p) { p.top_k = 2; }, [](auto& p) { p.wide_ids = false; },
      [](auto& p) { p.row_weights = ElementType::bfloat16; }, [](auto& p) { p.has_row_weights = true; },
      [](auto& p) { p.reduce = true; }, [](auto& p) { p.gate = MoeGate{}; },
      [](auto& p) { p.gate = MoeGate{1, 0, 0, 0}; }, [](auto& p) { p.gate = MoeGate{2, 0, 0, 0}; },
      [](auto& p) { p.gate = MoeGate{3, 0, 0, 0}; }, [](auto& p) { p.gate = MoeGate{4, 0, 0, 0}; },
      [](auto& p) { p.gate = MoeGate{0, 1, 0, 0}; }, [](auto& p) { p.gate = MoeGate{0, 0, 7, 0}; },
      [](auto& p) { p.gate = MoeGate{0, 0, 0, 7}; });
}

}  // namespace

int main(int argc, char** argv) {
  return test::run_cases({{"cache", check_cache},
                          {"cache of experts", check_moe_cache},
                          {"keys", check_keys},
                          {"elementwise keys", check_elementwise_keys},
                          {"keys of experts", check_moe_keys}},
                         argc, argv);
}
