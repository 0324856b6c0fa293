// Tests the variant for tensor units: which machines may run it, its plans, and their estimates.
#include <algorithm>
#include <random>
#include <set>

#include "csrc/experts/gpu_plan.h"
#include "csrc/gemm/probe_plan.h"
#include "csrc/planner/device.h"
#include "csrc/planner/estimate.h"
#include "plan_checks.h"

using namespace marlin;

namespace {

// The formats that tensor units support. lut4 would need float operands.
constexpr std::array kFormats{WeightFormat::uint4b8,     WeightFormat::uint4, WeightFormat::uint4_bias,
                              WeightFormat::float4_e2m1, WeightFormat::nvfp4, WeightFormat::mxfp4};

// Returns a device with all cores of the chip, on a system that allows all kernels that the chip can run.
GpuDevice whole(std::string_view chip) {
  const Chip& row = *find_chip(chip);
  GpuDevice device{.cores = row.cores, .chip = &row};
  set_system(device, supposed_system(row));
  return device;
}

bool is_tensor(const Tiling& tiling) {
  return tiling.variant == GemmVariant::tensor;
}

GemmProblem with_variant(GemmProblem problem, std::string_view variant) {
  problem.variant = variant;
  return problem;
}

// The GPU families are Apple7 for the M1, Apple8 for the M2, Apple9 for the M3 and M4, and Apple10 for the M5 (Apple's
// Metal feature set tables). Metal's language is 3.1 on macOS 14, 3.2 on 15, 4.0 on 26 and 4.1 on 27. A build with an
// older SDK has the language of that SDK.
void check_gate() {
  subject = "gate";
  const struct {
    const char* what;
    MetalSystem system;
    const char* refusal;  // a part of the reason; "" if the kernel may run
  } rows[] = {
      {"M1, macOS 14", {7, {14, 6}, {3, 1}}, "family Apple7"},
      {"M1, macOS 15", {7, {15, 7}, {3, 2}}, "family Apple7"},
      {"M1, macOS 26.2", {7, {26, 2}, {4, 0}}, "family Apple7"},
      {"M2, macOS 26.4", {8, {26, 4}, {4, 0}}, "family Apple8"},
      {"M3, macOS 26.4", {9, {26, 4}, {4, 0}}, "family Apple9"},
      {"M4, macOS 15", {9, {15, 5}, {3, 2}}, "family Apple9"},
      {"M4, macOS 27", {9, {27, 0}, {4, 1}}, "family Apple9"},
      {"no family", {0, {26, 4}, {4, 0}}, "no Apple family"},
      {"M5, macOS 26.0", {10, {26, 0}, {4, 0}}, "this is macOS 26.0"},
      {"M5, macOS 26.1", {10, {26, 1}, {4, 0}}, "needs macOS 26.2"},
      {"M5, macOS 26.2", {10, {26, 2}, {4, 0}}, ""},
      {"M5, macOS 26.4", {10, {26, 4}, {4, 0}}, ""},
      {"M5, macOS 27", {10, {27, 0}, {4, 1}}, ""},
      {"M5, macOS 26.2, a build with an older SDK", {10, {26, 2}, {3, 2}}, "this build of the package has 3.2"},
      {"M5, macOS 26.1 to a program linked with an older SDK", {10, {16, 1}, {4, 0}}, "this is macOS 26.1"},
      {"M5, macOS 26.2 to a program linked with an older SDK", {10, {16, 2}, {4, 0}}, ""},
      {"a family after the M5's", {11, {27, 0}, {4, 1}}, ""},
      {"M5, macOS 15, which no M5 has", {10, {15, 9}, {3, 2}}, "this is macOS 15.9"},
      {"nothing known", {}, "no Apple family"},
  };
  for (const auto& row : rows) {
    const std::string reason = tensor_refusal(row.system);
    const bool runs = *row.refusal == '\0';
    expect(reason.empty() == runs,
           std::string(row.what) + (runs ? " must run it, but is refused: " : " must be refused") + reason);
    if (!runs) expect(reason.find(row.refusal) != std::string::npos, std::string(row.what) + ": " + reason);
  }
}

MetalSystem an_m5() {
  return {10, {26, 4}, {4, 0}};
}

void check_systems() {
  subject = "systems";
  expect(this_system() == MetalSystem{}, "without a backend, nothing is known");
  set_system_reader(an_m5);
  expect(this_system() == an_m5(), "this_system gives the backend's answer");
  set_system_reader(nullptr);
  for (const Chip& chip : kChips) {
    subject = chip.name;
    const GpuFamily& family = family_of(chip);
    const bool has_units = chip.name.starts_with("M5");
    GpuDevice device{.chip = &chip};
    expect(!device.tensor_units, "no tensor units before the system is known");
    set_system(device, supposed_system(chip));
    expect(device.tensor_units == has_units, "the M5 chips have tensor units, and no other chip has");
    expect((family.tensor_clocks_fp16.value > 0) == has_units, "a family has a rate for fp16 if it has tensor units");
  }
}

// Checks that a chip without tensor units never gets the variant `tensor`, whether a call names it, a tuner's table
// names it, or neither does.
void check_refusals() {
  for (const Chip& chip : kChips) {
    subject = chip.name;
    const bool has_units = chip.family >= kTensorSystem.family;
    const GemmProblem problem = square(512, 4096, 4096, 128);
    const GpuDevice device = whole(chip.name);
    expect(std::ranges::any_of(gemm_tilings(problem, device), is_tensor) == has_units, "tensor is a candidate");
    GemmProblem tuned = problem;
    tuned.tuned = "tensor";
    const Plan plan = plan_gemm(tuned, device);
    expect((plan.dispatches[0].instance.kernel == Kernel::gemm_tensor) == has_units, "a table can select tensor");
    for (std::string_view variant : {"tensor", "tensor:64x128x32"}) {
      if (has_units) {
        expect(plan_gemm(with_variant(problem, variant), device).dispatches[0].instance.kernel == Kernel::gemm_tensor,
               "a call can select tensor");
      } else {
        expect_refused("tensor", [&] { plan_gemm(with_variant(problem, variant), device); });
      }
    }
  }
  subject = "the text of a refusal";
  const auto refusal = [](const GpuDevice& device) -> std::string {
    try {
      plan_gemm(square(64, 64, 64, 64, "tensor:32x64x32"), device);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  GpuDevice device = whole("M4");
  expect(
      refusal(device) ==
          "torch_marlin_metal::gemm: variant: expected one that this GPU can run (tensor units came with the M5 (GPU "
          "family Apple10), and this GPU is of family Apple9), got 'tensor:32x64x32'",
      refusal(device));
  device = whole("M5");
  set_system(device, {10, {26, 1}, {4, 0}});
  expect(refusal(device).find("it needs macOS 26.2, and this is macOS 26.1") != std::string::npos, refusal(device));
  device = whole("M5");
  expect_refused("an unknown tile", [&] { plan_gemm(square(64, 64, 64, 64, "tensor:96x64x32"), device); });
  expect_refused("more rows than M", [&] { plan_gemm(square(32, 64, 64, 64, "tensor:64x64x32"), device); });
}

// Floats, and lut4 with any activations, have no kernel for tensor units on any chip.
void check_operands() {
  const GpuDevice m5 = whole("M5 Max");
  for (int32_t format = 0; format < kWeightFormatCount; ++format) {
    for (const ElementType activations : {ElementType::float16, ElementType::bfloat16, ElementType::float32}) {
      GemmProblem problem = square(512, 4096, 4096, 32);
      problem.weight.format = static_cast<WeightFormat>(format);
      problem.activations = activations;
      subject = std::string(name(problem.weight.format)) + ", " + std::string(name(activations));
      const bool has_kernel = problem.weight.format != WeightFormat::lut4 && activations != ElementType::float32;
      expect(has_tensor_kernel(problem.weight.format, activations) == has_kernel, "there is an instance");
      expect(std::ranges::any_of(gemm_tilings(problem, m5), is_tensor) == has_kernel, "tensor is a candidate");
      problem.tuned = "tensor";
      MoeProblem experts{.product = problem, .experts = 8, .top_k = 2};
      expect((plan_gemm(problem, m5).dispatches[0].instance.kernel == Kernel::gemm_tensor) == has_kernel,
             "a table selects it");
      expect((plan_moe(experts, m5).dispatches[1].instance.kernel == Kernel::moe_tensor) == has_kernel,
             "a table selects it for experts");
      if (has_kernel) continue;
      experts.product = problem = with_variant(problem, "tensor");
      expect_refused("float16 and bfloat16 activations by weights without a lut", [&] { plan_gemm(problem, m5); });
      expect_refused("float16 and bfloat16 activations by weights without a lut", [&] { plan_moe(experts, m5); });
    }
  }
}

// geometry.h defines the words.
void check_layout() {
  subject = "layout";
  std::array<int32_t, kTensorProbed> words;
  words.fill(kTensorMatches);
  expect(tensor_layout_refusal(words.data()).empty(), "every matrix lies where the kernels assume");
  const struct {
    int32_t index;
    uint32_t word;
    const char* refusal;
  } rows[] = {
      {0, kTensorElement | 31U << 24 | 7U << 16 | 15U << 8 | 14U,
       "left operand of float16 in an unknown layout: element 7 of lane 31 is in row 15, column 14"},
      {4, kTensorElement | 15U << 16 | 31U << 8,
       "right operand of bfloat16 in an unknown layout: element 15 of lane 0 is in row 31, column 0"},
      {2, kTensorCapacity | 32U, "sums of float16 in an unknown layout: a lane has 32 elements"},
      {5, 0, "sums of bfloat16 in an unknown layout: the probe stored 0"},
  };
  for (const auto& row : rows) {
    words.fill(kTensorMatches);
    words[row.index] = static_cast<int32_t>(row.word);
    const std::string text = tensor_layout_refusal(words.data());
    expect(text == std::string("the tensor units of this GPU hold the ") + row.refusal, text);
  }
}

void check_plan(const GemmProblem& problem, const Tiling& tiling, const GpuDevice& device) {
  const Plan plan = build_plan(tiling, problem, device);
  const WeightProblem& weight = problem.weight;
  const TileShape& tile = tiling.tile;
  subject = name(tiling) + ": " + text(plan);
  const Dispatch& product = plan.dispatches.front();
  const auto& params = std::get<GemmParams>(product.params);
  const uint32_t group = std::min(weight.group_size, weight.K);
  expect(product.instance == KernelInstance{Kernel::gemm_tensor, weight.format, problem.activations},
         "the kernel's instance");
  expect(product.threads.x == tile.M / 32 * (tile.N / 32) * 32 && product.threads.y == 1 && product.threads.z == 1,
         "a simdgroup for each 32 rows and 32 columns");
  expect(product.threadgroup_bytes == 0, "no threadgroup memory");
  expect_tiling(product.grid.x, tile.N, weight.N, "columns");
  expect_tiling(product.grid.y, tile.M, problem.M, "rows");
  expect_tiling(product.grid.z, params.k_per_slice, weight.K, "k");
  expect(params.k_per_slice % kTensorK == 0, "slices consist of whole steps");
  expect(params.m_begin == 0 && params.M == problem.M && params.N == weight.N && params.K == weight.K, "sizes");
  expect(params.group_size == group && params.a_row_stride == problem.a_row_stride, "group size and row stride");
  const FunctionConstants& constants = product.constants;
  expect(constants[kConstantRows] == static_cast<int32_t>(tile.M), "rows of a threadgroup");
  expect(constants[kConstantShortGroupSize] == (group == 16 && weight.K > 16 ? 16 : 0),
         "the constant for short groups is set if a group is half a step");
  expect((constants[kConstantSubnormalCodes] != 0) == device.half_subnormals,
         "codes are subnormals where the GPU keeps these");
  expect((constants[kConstantRaggedK] != 0) == (weight.K % 32 != 0), "K is ragged if it is not a multiple of a step");
  expect((constants[kConstantRaggedN] != 0) == (weight.N % 32 != 0), "N is ragged if it is not a multiple of a strip");
  if (weight.has_perm) expect(constants[kConstantVectorActivations] == 0, "no vector loads through perm");
  if (weight.N % 4 != 0) expect(constants[kConstantVectorColumns] == 0, "no vector loads if N is no multiple of 4");

  const bool splits = product.grid.z > 1;
  const Dispatch& last = plan.dispatches.back();
  expect((constants[kConstantWritesPartials] != 0) == splits, "partial sums are written if K is split");
  expect(plan.dispatches.size() == (splits ? 2 : 1) && (plan.partials.z != 0) == splits,
         "there is a reduction if K is split");
  expect((last.constants[kConstantHasBias] != 0) == problem.has_bias, "the last kernel adds the bias");
  if (!splits) return;
  expect(constants[kConstantHasBias] == 0, "the bias is added once");
  expect(last.instance.kernel == Kernel::reduce && std::get<ReduceParams>(last.params).splits == product.grid.z,
         "the second kernel reduces all splits");
  expect(plan.partials.x == weight.N && plan.partials.y == problem.M && plan.partials.z == product.grid.z,
         "the workspace's sizes");
}

void check_random_plans() {
  std::mt19937 random(0);
  const auto pick = [&](uint32_t from, uint32_t to) { return std::uniform_int_distribution(from, to)(random); };
  const uint32_t groups[] = {16, 32, 64, 128, 256};
  std::set<std::string> tiles;
  uint32_t split = 0;
  for (int i = 0; i < 1500; ++i) {
    const uint32_t K = 8 * pick(1, i % 4 == 0 ? 2048 : 40);
    const uint32_t group = pick(0, 5);
    GemmProblem problem = square(pick(1, i % 3 == 0 ? 3000 : 100), pick(1, i % 5 == 0 ? 20000 : 300), K,
                                 group == 5 ? K : groups[group], "tensor");
    problem.weight.format = kFormats[pick(0, kFormats.size() - 1)];
    problem.activations = pick(0, 1) != 0 ? ElementType::float16 : ElementType::bfloat16;
    problem.has_bias = pick(0, 1);
    problem.weight.has_perm = pick(0, 1);
    problem.weight.vector_aligned = pick(0, 1);
    GpuDevice device = whole("M5 Max");
    device.cores = pick(1, 40);
    device.half_subnormals = pick(0, 1);
    for (const Tiling& tiling : gemm_tilings(problem, device)) {
      expect(is_tensor(tiling), "a named variant has only its own tilings");
      check_plan(problem, tiling, device);
      tiles.insert(name(tiling));
      split += tiling.splits > 1 ? 1 : 0;
    }
  }
  subject = "random plans";
  expect(tiles.size() == 4 && split > 100, "the problems cover all four tiles, and more than 100 plans split K");
}

double seconds(const GemmProblem& problem, std::string_view variant, const GpuDevice& device) {
  const GemmProblem named = with_variant(problem, variant);
  const std::vector<Tiling> tilings = gemm_tilings(named, device);
  return estimate(choose(tilings, named), named, device).total();
}

// Compares the estimate with a count by hand: 512 * 4096 * 4096 / 512 times 512 multiply-adds, of 4.26 clocks each.
// Decoding partly overlaps with the multiply-adds.
void check_estimate() {
  const GpuDevice m5 = whole("M5");
  const GemmProblem problem = square(512, 4096, 4096, 128, "tensor:64x128x32");
  const auto close = [](double value, double wanted) { return value > wanted && value < 2 * wanted; };
  subject = "estimate";
  const double products = 4096.0 * 4096.0 * 4.26;
  expect(close(seconds(problem, "tensor:64x128x32", m5), products / (4 * 10 * 1.6e9)), "the rate of the tensor units");
  GpuDevice as_m1{.cores = 10, .chip = find_chip("M1")};  // an M5 that the user plans as an M1
  set_system(as_m1, m5.system);
  expect(close(seconds(problem, "tensor:64x128x32", as_m1), products / (4 * 10 * 1.278e9)),
         "tensor units at an M1's clock");
  for (const auto& [N, K] : {std::pair(4096U, 4096U), std::pair(14336U, 4096U), std::pair(4096U, 14336U)}) {
    double before = 0;
    for (uint32_t M = 1; M <= 160; ++M) {
      const double now = seconds(square(M, N, K, 64), "tensor", m5);
      expect(now >= before / 1.02, "more rows take no less time, M " + std::to_string(M));
      before = now;
    }
  }
}

// The model of lab/ finds tensor faster than fused from nine rows on, and 1.4 to 3.5 times as fast with 32 rows.
void check_automatic_choice() {
  for (const std::string_view chip : {"M5", "M5 Pro", "M5 Max", "M4 Max"}) {
    const GpuDevice device = whole(chip);
    for (const uint32_t M : {1U, 8U, 9U, 32U, 33U, 64U, 128U, 512U, 4096U}) {
      const GemmProblem problem = square(M, 4096, 4096, 128);
      const Plan plan = plan_gemm(problem, device);
      subject = text(plan);
      const bool wanted = device.tensor_units && M > 8;
      expect((plan.dispatches[0].instance.kernel == Kernel::gemm_tensor) == wanted, "tensor for nine rows or more");
      if (!wanted) continue;
      const auto tilings = gemm_tilings(problem, device);
      if (M >= 32) expect(1.4 * seconds(problem, "tensor", device) < seconds(problem, "fused", device), "the gain");
      expect(reason(choose(tilings, problem), problem, device).find("tensor units") != std::string::npos, "the reason");
    }
  }
  // Sums of groups of 16 cost so much that fused is faster with few rows.
  GemmProblem problem = square(16, 11008, 4096, 16);
  problem.weight.format = WeightFormat::uint4_bias;
  const GpuDevice m5 = whole("M5");
  subject = "groups of 16";
  expect(plan_gemm(problem, m5).dispatches[0].instance.kernel == Kernel::gemm_fused, "fused for 16 rows");
  problem.M = 32;
  expect(plan_gemm(problem, m5).dispatches[0].instance.kernel == Kernel::gemm_tensor, "tensor for 32 rows");
}

MoeProblem mixture(std::string_view variant, uint32_t tokens = 512) {
  MoeProblem problem{.product = square(4 * tokens, 5760, 2880, 32, variant), .experts = 32, .top_k = 4};
  problem.product.weight.format = WeightFormat::mxfp4;
  return problem;
}

// Mixtures use the kernel as products do: if the gate allows it, and a call or a tuner's table names it. If neither
// names a kernel, its estimate must be the smallest.
void check_experts() {
  for (const Chip& chip : kChips) {
    const GpuDevice device = whole(chip.name);
    MoeProblem tuned = mixture("auto");
    tuned.product.tuned = "tensor:64x64x32";
    const Plan by_table = plan_moe(tuned, device);
    subject = std::string(chip.name) + ": " + text(by_table);
    const auto has_kernel = [](const Plan& plan) { return plan.dispatches[1].instance.kernel == Kernel::moe_tensor; };
    expect(has_kernel(by_table) == device.tensor_units, "a table can select tensor");
    expect(has_kernel(plan_moe(mixture("auto"), device)) == device.tensor_units, "auto takes tensor for many rows");
    expect(plan_moe(mixture("auto", 2), device).dispatches[0].instance.kernel == Kernel::moe_gemv, "and gemv for few");
    for (const std::string_view other : {"fused", "gemv"}) {
      tuned.product.tuned = other;
      expect(!has_kernel(plan_moe(tuned, device)), "a table that names another variant excludes tensor");
    }
    tuned.product.tuned = "striped";  // experts have no such kernel
    expect(has_kernel(plan_moe(tuned, device)) == device.tensor_units, "a table that names none of theirs is ignored");
    if (!device.tensor_units) expect_refused("tensor", [&] { plan_moe(mixture("tensor"), device); });
  }
  const GpuDevice m5 = whole("M5 Max");
  expect_refused("a tile", [&] { plan_moe(mixture("tensor:64x64x32"), m5); });
  std::mt19937 random(0);
  const auto pick = [&](uint32_t from, uint32_t to) { return std::uniform_int_distribution(from, to)(random); };
  std::set<uint32_t> tiles;
  for (int i = 0; i < 500; ++i) {
    MoeProblem problem = mixture("tensor", pick(1, i % 2 == 0 ? 20 : 2000));
    WeightProblem& weight = problem.product.weight;
    weight = {.format = kFormats[pick(0, kFormats.size() - 1)],
              .K = 8 * pick(1, 100),
              .N = pick(1, 600),
              .group_size = 16U << pick(0, 3)};
    problem.product.activations = pick(0, 1) != 0 ? ElementType::float16 : ElementType::bfloat16;
    problem.product.has_bias = pick(0, 1);
    problem.reduce = pick(0, 1);
    problem.experts = pick(1, 300);
    const Plan plan = plan_moe(problem, m5);
    subject = text(plan);
    expect(plan.dispatches.size() == (problem.reduce ? 3 : 2), "a sort, the products, and a sum if one is wanted");
    const Dispatch& product = plan.dispatches.at(1);
    const auto& params = std::get<MoeParams>(product.params);
    const uint32_t rows = params.block_rows;
    const uint32_t columns = product.threads.x * kTensorColumns / (rows / kTensorRows * kSimdWidth);
    tiles.insert(rows * 1000 + columns);
    expect(plan.dispatches[0].instance.kernel == Kernel::moe_sort && product.instance.kernel == Kernel::moe_tensor,
           "the kernels");
    expect(std::get<MoeParams>(plan.dispatches[0].params).block_rows == rows, "sort and product have the same blocks");
    expect(product.instance == KernelInstance{Kernel::moe_tensor, weight.format, problem.product.activations},
           "instance");
    expect(product.threadgroup_bytes == 0, "no threadgroup memory");
    expect_tiling(product.grid.x, columns, weight.N, "columns");
    expect(product.grid.y == params.blocks && product.grid.z == 1, "a threadgroup for each block, and K is not split");
    expect(params.blocks == moe_blocks(problem.product.M, problem.experts, rows), "the largest number of blocks");
    expect(params.product.k_per_slice >= weight.K && params.product.k_per_slice % kTensorK == 0, "one slice");
    const FunctionConstants& constants = product.constants;
    expect(constants[kConstantRows] == static_cast<int32_t>(rows), "rows of a block");
    const bool halves = weight.group_size == 16 && weight.K > 16;
    expect(constants[kConstantShortGroupSize] == (halves ? 16 : 0), "a group that is half a step");
    expect((constants[kConstantRaggedK] != 0) == (weight.K % 32 != 0), "ragged K");
    expect((constants[kConstantRaggedN] != 0) == (weight.N % 32 != 0), "ragged N");
    expect((constants[kConstantWritesPartials] != 0) == problem.reduce,
           "sums go to the workspace if they are combined");
    expect((constants[kConstantHasBias] != 0) == (problem.product.has_bias && !problem.reduce), "bias is added once");
  }
  expect(tiles.size() >= 2, "more than one tile is used");
}

}  // namespace

int main(int argc, char** argv) {
  return test::run_cases({{"gate", check_gate},
                          {"systems", check_systems},
                          {"refusals", check_refusals},
                          {"operands", check_operands},
                          {"layout", check_layout},
                          {"random plans", check_random_plans},
                          {"estimate", check_estimate},
                          {"automatic choice", check_automatic_choice},
                          {"experts", check_experts}},
                         argc, argv);
}
