// Tests which plans the cache keeps, and which products share a plan.
#include "csrc/gemm/plan_cache.h"

#include <array>
#include <bit>
#include <cstddef>

#include "csrc/decoder/gpu_plan.h"
#include "csrc/mlstm/gpu_plan.h"

#include "csrc/experts/gpu_plan.h"
#include "csrc/weights/gpu_plan.h"
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
  PlanCache<GemmProblem, std::string> cache({}, plan_gemm, prepare, 3);
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

// The cache of products with experts plans them with plan_moe, and also uses a tuner's table.
void check_moe_cache() {
  subject = "plan cache of experts";
  set_tuned({});
  GpuDevice device = gpu_device("M5", 10);
  set_system(device, supposed_system(*device.chip));
  const MoeProblem problem{.product = square(512, 512, 704, 64), .experts = 8, .top_k = 4};
  PlanCache<MoeProblem, std::string> cache(device, plan_moe, prepare);
  const uint32_t before = plans_prepared;
  expect(*cache.find_plan(problem) == text(plan_moe(problem, device)), "the cache gives the plan of plan_moe");
  expect(cache.find_plan(problem) == cache.find_plan(problem) && plans_prepared == before + 1, "one plan is built");
  set_tuned({{WeightFormat::uint4b8, ElementType::float16, 64, 704, 512, 1, 64, "tensor"}});
  expect(cache.find_plan(problem)->find("moe_tensor_") != std::string::npos, "a tuner's table replaces cached plans");
  set_tuned({});
}

// Checks that a problem has its own launch, and so does each problem that differs from it in one byte. A problem has no
// padding, so each of its bytes belongs to a field.
template <typename Problem>
void check_keys_of(const char* kind) {
  subject = kind;
  LaunchCache<Problem, size_t> cache;
  size_t made = 0;
  const auto launch = [&](const std::array<std::byte, sizeof(Problem)>& bytes) {
    return *cache.get(std::bit_cast<Problem>(bytes), [&] { return ++made; });
  };
  std::array<std::byte, sizeof(Problem)> bytes{};
  expect(launch(bytes) == 1 && launch(bytes) == 1, "equal problems share a launch");
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes.at(i) = std::byte{1};
    expect(launch(bytes) == i + 2 && launch(bytes) == i + 2, "byte " + std::to_string(i) + " is part of the key");
    bytes.at(i) = std::byte{0};
  }
}

void check_keys() {
  check_keys_of<GemmProblem>("keys of products");
  check_keys_of<MoeProblem>("keys of products with experts");
  check_keys_of<DequantizeProblem>("keys of dequantize");
  check_keys_of<EmbeddingProblem>("keys of embedding");
  check_keys_of<RepackProblem>("keys of repacks");
  check_keys_of<NormProblem>("keys of norms");
  check_keys_of<RotaryProblem>("keys of rotary");
  check_keys_of<ActivationProblem>("keys of gated activations");
  check_keys_of<CacheProblem>("keys of writes to caches");
  check_keys_of<MlstmLaunch>("keys of the mLSTM");
}

}  // namespace

int main(int argc, char** argv) {
  return test::run_cases({{"cache", check_cache}, {"cache of experts", check_moe_cache}, {"keys", check_keys}}, argc,
                         argv);
}
