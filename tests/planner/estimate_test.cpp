// Tests the estimates with which the planner compares tilings: against results computed by hand, and with rules that
// hold for every plan on every chip. lab/choices.py compares the choices with the model of lab/.
#include <cmath>
#include <limits>
#include <string>

#include "csrc/planner/decisions.h"
#include "csrc/planner/estimate.h"
#include "csrc/planner/plan.h"
#include "csrc/planner/split_k.h"
#include "plan_checks.h"

using namespace marlin;

namespace {

GemmProblem product(uint32_t M, uint32_t N, uint32_t K, uint32_t group_size,
                    WeightFormat format = WeightFormat::uint4b8, ElementType activations = ElementType::float16) {
  GemmProblem problem{.M = M, .a_row_stride = K, .activations = activations, .vector_aligned_a = true};
  problem.weight = {.format = format, .K = K, .N = N, .group_size = group_size, .vector_aligned = true};
  if (format == WeightFormat::nvfp4) problem.weight.group_size = 16;
  if (format == WeightFormat::mxfp4) problem.weight.group_size = 32;
  return problem;
}

void check_occupancy() {
  subject = "occupancy";
  const GpuFamily& family = kGpuFamilies.front();
  const auto is = [&](uint32_t threads, uint32_t registers, uint32_t bytes, uint32_t groups) {
    const Occupancy held = occupancy(threads, registers, bytes, family);
    expect(held.threadgroups == groups && held.simdgroups == groups * threads / 32,
           std::to_string(threads) + " threads, " + std::to_string(registers) + " half-registers, " +
               std::to_string(bytes) + " bytes: " + std::to_string(held.threadgroups));
  };
  is(1024, 104, 0, 1);        // registers: 106496 / (1024 * 104) = 1 exactly
  is(1024, 16, 0, 3);         // threads: 3072 / 1024
  is(256, 64, 20 * 1024, 3);  // threadgroup memory: 60 KB / 20 KB
  is(128, 207, 4096, 4);      // registers: 106496 / (128 * 207) = 4.02
  is(512, 255, 32768, 1);     // 0.8, but one threadgroup can always run
}

double distinct_bytes(const GemmProblem& problem) {
  const WeightProblem& weight = problem.weight;
  const double groups = std::ceil(double(weight.K) / std::min(weight.group_size, weight.K));
  const bool coded = weight.format == WeightFormat::nvfp4 || weight.format == WeightFormat::mxfp4;
  const double zeros = weight.format == WeightFormat::uint4 || weight.format == WeightFormat::uint4_bias ? 2 : 0;
  const double activation = element_bytes(problem.activations);
  return 0.5 * weight.K * weight.N + groups * weight.N * ((coded ? 1 : 2) + zeros) +
         activation * problem.M * (double(weight.K) + weight.N);
}

double memory_rate(const GpuDevice& device) {
  return dram_bytes_per_second(*device.chip, device.cores) * device.chip->dram_fraction.value;
}

// Checks rules that hold for the estimate of any tiling.
void check_tiling(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device) {
  subject = std::string(device.chip->name) + ", " + std::to_string(problem.M) + "x" + std::to_string(problem.weight.N) +
            "x" + std::to_string(problem.weight.K) + " " + std::string(name(problem.weight.format)) + ": " +
            name(tiling);
  const Estimate found = estimate(tiling, problem, device);
  const Plan plan = build_plan(tiling, problem, device);
  expect(found.seconds.size() == plan.dispatches.size() + (plan.dense_product ? 1 : 0), "a time for each dispatch");
  for (size_t i = 0; i < plan.dispatches.size(); ++i)
    expect(plan.dispatches[i].seconds == found.seconds[i], "the plan has the times");
  for (const double seconds : found.seconds)
    expect(std::isfinite(seconds) && seconds > kDispatchSeconds, "a dispatch takes more than its launch");
  expect(found.total() > distinct_bytes(problem) / memory_rate(device), "every byte is read or written at least once");
}

// Compares estimates with times that were computed by hand from the chip's figures.
void check_by_hand() {
  subject = "by hand";
  const GpuDevice m1 = whole(*find_chip("M1"));
  const auto seconds = [&](const GemmProblem& problem, std::string_view variant) {
    GemmProblem named = problem;
    named.variant = variant;
    const auto tilings = gemm_tilings(named, m1);
    return estimate(choose(tilings, named), named, m1).total();
  };
  // One row: 64.0 MB of a weight at 0.88 of 68.25 GB/s, plus a twentieth of the cores' time, which is not longer.
  const GemmProblem one = product(1, 8192, 14336, 64);
  const double read = distinct_bytes(one) / (0.88 * 68.25e9);
  expect(seconds(one, "gemv") > 6e-6 + read && seconds(one, "gemv") < 6e-6 + 1.05 * read, "one row waits for memory");
  // Many rows: 4096^3 / 512 products of 18 clocks on 4 schedulers of 8 cores at 1.278 GHz. Instructions partly overlap
  // with the products, so the total is between 1 and 1.3 times the products' clocks.
  const GemmProblem many = product(4096, 4096, 4096, 64);
  const double products = std::pow(4096.0, 3) / 512 * 18 / (4 * 8 * 1.278e9);
  expect(seconds(many, "fused") > products && seconds(many, "fused") < 1.3 * products, "many rows are matrix products");
  // Eight rows of gemv on one core: 32 threadgroups of one simdgroup. With 4 KB each, 15 of them fit into the core's 60
  // KB. 15 are too few to hide all waits on four schedulers, so each of the rounds of 15, 15 and 2 takes as long as one
  // threadgroup alone: its instructions, its waits, and the 311 ns of its first load at 1.278 GHz.
  const GemmProblem eight = product(8, 4096, 4096, 128);
  const Decision& row = *find_decision(GemmVariant::gemv, Arithmetic::half, WeightFormat::uint4b8);
  const double clocks = 256 * (row.decode + 8 * row.unit) + 32 * (row.group_end + 8 * row.unit_end) + 200;
  const double alone = clocks + 256 * row.wait[7] + 311 * 1.278;
  const double core = 3 * alone / 1.278e9;
  expect(15 / 4.0 * clocks < alone, "15 threadgroups wait");
  const GpuDevice one_core{1, true, find_chip("M1")};
  const double memory = distinct_bytes(eight) / memory_rate(one_core);
  const Tiling tiling = split_k(rules_of(GemmVariant::gemv).tiles[7], eight.weight, 1);
  expect_close(estimate(tiling, eight, one_core).total(), 6e-6 + core + 0.05 * memory, 1e-6, "eight rows");
}

// Checks the numbers of decision_rows.h for typing errors.
void check_decisions() {
  subject = "decisions";
  for (const Decision& row : kDecisions) {
    expect(find_decision(row.kernel, row.arithmetic, WeightFormat::uint4b8) != nullptr, "integer codes have rows");
    expect(row.decode > 0 && row.unit > 0 && !row.reason.empty(), "clocks and a reason");
    const size_t units = row.kernel == GemmVariant::gemv ? 8 : row.kernel == GemmVariant::fused ? 4 : 2;
    for (size_t i = 0; i < units; ++i)
      expect(row.wait.at(i) > 0, "waits of each block");
  }
  for (const Registers& row : kRegisters) {
    const size_t units = row.kernel == GemmVariant::gemv ? 8 : row.kernel == GemmVariant::fused ? 4 : 2;
    for (size_t i = 0; i < units; ++i)
      expect(row.product.at(i) > 0, "registers of each block");
    if (row.kernel == GemmVariant::tensor) continue;  // moe_tensor needs as many registers
    for (size_t i = 0; i < rules_of(row.kernel).expert_tiles.size(); ++i)
      expect(row.experts.at(i) > 0, "registers of the kernels for experts");
  }
  const auto unit = [](Arithmetic type) { return find_decision(GemmVariant::gemv, type, WeightFormat{})->unit; };
  expect(unit(Arithmetic::emulated_bfloat) > 1.3 * unit(Arithmetic::half),
         "an M2 computes bfloat by more instructions");
  const auto decode = [](Arithmetic type, WeightFormat format) {
    return find_decision(GemmVariant::gemv, type, format)->decode;
  };
  for (Arithmetic type : {Arithmetic::half, Arithmetic::emulated_bfloat, Arithmetic::single})
    expect(decode(type, WeightFormat::float8_e4m3) > 2 * decode(type, WeightFormat::uint8b128), "E4M3 tests for NaN");
  // lab/notes/kernel-costs.md has the registers of Q4_K.
  const GemmTile eight_rows = rules_of(GemmVariant::fused).tiles[0];
  GemmProblem levels = product(8, 64, 64, 32, WeightFormat::uint4_bias);
  levels.weight.scales = levels.weight.zeros = ElementType::uint8;
  expect(half_registers(eight_rows, levels, 8, whole(*find_chip("M1"))) == 123, "registers of two levels");
  levels.weight.scales = levels.weight.zeros = ElementType::float16;
  expect(half_registers(eight_rows, levels, 8, whole(*find_chip("M1"))) == 103, "registers of one level");
  const GpuFamily& m2 = family_of(*find_chip("M2"));
  const GpuFamily& m3 = family_of(*find_chip("M3"));
  expect(arithmetic(GemmVariant::fused, ElementType::bfloat16, m2) == Arithmetic::emulated_bfloat,
         "an M2 has no bfloat");
  expect(arithmetic(GemmVariant::fused, ElementType::bfloat16, m3) == Arithmetic::half, "an M3 has bfloat in hardware");
  expect(arithmetic(GemmVariant::fused, ElementType::float32, m3) == Arithmetic::single, "fp32");
  for (const GemmTile& tile : gemm_tiles()) {
    if (tile.tile == TileShape{}) continue;
    const uint32_t registers = half_registers(tile, product(8, 64, 64, 64), tile.tile.M, {});
    expect(registers >= 80 && registers <= 255, "registers of " + name(tile) + ": " + std::to_string(registers));
  }
}

void check_all_tilings() {
  const std::pair<uint32_t, uint32_t> weights[] = {{4096, 4096}, {40, 64}, {151936, 896}, {1024, 8}};
  for (const Chip& chip : kChips) {
    for (int format = 0; format < kWeightFormatCount; ++format) {
      for (const auto& [N, K] : weights) {
        for (uint32_t M : {1U, 5U, 33U, 130U}) {
          for (ElementType type : {ElementType::float16, ElementType::float32}) {
            const GemmProblem problem = product(M, N, K, 64, static_cast<WeightFormat>(format), type);
            const GpuDevice device = whole(chip);
            for (const Tiling& tiling : gemm_tilings(problem, device))
              check_tiling(tiling, problem, device);
          }
        }
      }
    }
  }
}

Estimate least(const GemmProblem& problem, const GpuDevice& device) {
  const auto tilings = gemm_tilings(problem, device);
  return estimate(choose(tilings, problem), problem, device);
}

double least_seconds(const GemmProblem& problem, const GpuDevice& device) {
  return least(problem, device).total();
}

// Returns the largest factor by which one more row may raise the cost, without a second launch. The factor depends on
// whether row M + 1 starts the second block of 8 rows, the third, the fourth, or no block. 25 rows are computed as 32,
// and a core holds only three threadgroups of 32 rows, but four of 24.
double largest_step(uint32_t M) {
  return M == 8 ? 1.9 : M == 16 ? 1.5 : M == 24 ? 1.37 : 1.35;
}

void check_ladder() {
  const std::pair<uint32_t, uint32_t> weights[] = {{4096, 4096}, {14336, 4096}, {4096, 14336}, {1024, 4096}};
  for (const Chip& chip : kChips) {
    for (WeightFormat format : {WeightFormat::uint4b8, WeightFormat::float4_e2m1}) {
      for (const auto& [N, K] : weights) {
        double before = 0;
        double launches_before = 0;
        for (uint32_t M = 1; M <= 140; ++M) {
          const Estimate found = least(product(M, N, K, 64, format), whole(chip));
          const double now = found.total();
          const double launches = kDispatchSeconds * double(found.seconds.size());
          subject = std::string(chip.name) + ", N " + std::to_string(N) + ", K " + std::to_string(K) + ", " +
                    std::string(name(format)) + ", M " + std::to_string(M);
          if (M > 1) {
            expect(now >= before / kEqual, "more rows cost no less");
            const double step = largest_step(M - 1);
            // One more row may also need a second dispatch.
            const double second_launch = std::max(0.0, launches - launches_before);
            if (N >= 4096)
              expect(now - second_launch <= before * step,
                     "one more row costs " + std::to_string(now / before) + " times as much");
          }
          before = now;
          launches_before = launches;
        }
      }
    }
  }
}

// Returns the smallest estimate of all row blocks and splits of K of gemv and fused.
double least_of_all(const GemmProblem& problem, const GpuDevice& device) {
  double least = std::numeric_limits<double>::infinity();
  const auto consider = [&](const Tiling& tiling) {
    least = std::min(least, estimate(tiling, problem, device).total());
  };
  for (const GemmTile& row : gemm_tiles()) {
    for (uint32_t slices = 1; slices <= kMaxSlices; ++slices) {
      if (row.variant == GemmVariant::gemv) consider(split_k(row, problem.weight, slices));
      if (row.variant != GemmVariant::fused) continue;
      consider(split_k(row, problem.weight, slices));
      if (const uint32_t rest = round_up(problem.M % row.tile.M, 8U); rest != 0 && row.tile.M <= problem.M)
        consider(split_k(row, problem.weight, slices, rest));
    }
  }
  return least;
}

// Checks that no other row block or split of K is clearly better than the plan.
void check_no_better_plan() {
  const std::pair<uint32_t, uint32_t> weights[] = {{6144, 4096}, {4096, 14336}, {1024, 2048}};
  for (const char* chip : {"M1", "M1 Max", "M2 Ultra", "M4 Max", "M5 Pro"}) {
    const GpuDevice device = whole(*find_chip(chip));
    for (int format = 0; format < kWeightFormatCount; ++format) {
      for (ElementType type : {ElementType::float16, ElementType::bfloat16, ElementType::float32}) {
        for (const auto& [N, K] : weights) {
          for (const uint32_t M : {3U, 4U, 5U, 6U, 8U, 9U, 10U, 12U, 17U}) {
            const GemmProblem problem = product(M, N, K, 64, static_cast<WeightFormat>(format), type);
            subject = std::string(chip) + ", " + std::to_string(M) + "x" + std::to_string(N) + "x" + std::to_string(K) +
                      " " + std::string(name(problem.weight.format)) + " " + std::string(name(type));
            const double ratio = least_seconds(problem, device) / least_of_all(problem, device);
            expect(ratio <= 1.02, "another plan is " + std::to_string(ratio) + " times as fast");
          }
        }
      }
    }
  }
}

void check_choices() {
  const struct {
    const char* chip;
    uint32_t M, N, K;
    const char* taken;
    size_t dispatches;
  } rows[] = {
      {"M1", 1, 4096, 4096, "gemv:1x128x16", 1},     {"M1", 4, 4096, 4096, "gemv:4x128x16", 1},
      {"M1", 5, 4096, 4096, "gemv:5x128x16", 1},     {"M1", 16, 4096, 14336, "fused:16x32x64", 1},
      {"M1", 33, 4096, 4096, "fused:24x32x64", 2},   {"M1", 4096, 4096, 4096, "fused:32x32x64", 1},
      {"M1", 1, 1, 8, "gemv:1x128x16", 1},           {"M1 Max", 4, 4096, 4096, "gemv:2x128x16", 1},
      {"M1 Max", 8, 4096, 4096, "fused:8x32x64", 1}, {"M1 Max", 9, 4096, 14336, "gemv:3x128x16", 1},
      {"M1 Max", 1, 512, 4096, "gemv:1x128x16", 2},  {"M2 Ultra", 1, 151936, 896, "gemv:1x128x16", 1},
      {"M3", 33, 4096, 4096, "fused:24x32x64", 3},   {"M4 Max", 16, 4096, 14336, "fused:16x32x64", 2},
      {"M5", 8, 4096, 4096, "fused:8x32x64", 1},
  };
  for (const auto& row : rows) {
    const GemmProblem problem = product(row.M, row.N, row.K, 128);
    const GpuDevice device = whole(*find_chip(row.chip));
    const auto tilings = gemm_tilings(problem, device);
    const Tiling& taken = choose(tilings, problem);
    subject = std::string(row.chip) + ": " + std::to_string(row.M) + "x" + std::to_string(row.N) + "x" +
              std::to_string(row.K) + ": " + name(taken);
    expect(name(taken) == row.taken, std::string("expected ") + row.taken);
    expect(build_plan(taken, problem, device).dispatches.size() == row.dispatches,
           "expected " + std::to_string(row.dispatches) + " dispatches");
  }
}

// Checks the number of slices of K on an M1, and on a GPU with the cores of an M1 Max and the memory of an M1.
void check_splits() {
  const struct {
    uint32_t M, N, K, cores;
    const char* function;
    Extent grid, threads;
    uint32_t k_per_slice;
    std::string_view variant = "auto";
  } rows[] = {
      {1, 4096, 4096, 8, "gemv_uint4b8_float16", {1, 32, 1}, {256, 1, 1}, 512},
      {1, 512, 4096, 8, "gemv_uint4b8_float16", {1, 4, 1}, {512, 1, 1}, 256},
      {1, 512, 4096, 32, "gemv_uint4b8_float16", {1, 4, 1}, {512, 1, 1}, 256},
      {1, 1, 8, 8, "gemv_uint4b8_float16", {1, 1, 1}, {32, 1, 1}, 16},
      {6, 4096, 4096, 8, "gemv_uint4b8_float16", {1, 32, 1}, {128, 1, 1}, 1024},
      {17, 4096, 4096, 8, "gemv_uint4b8_float16", {3, 32, 1}, {96, 1, 1}, 1408, "gemv"},
      {5, 4096, 4096, 8, "gemm_fused_uint4b8_float16", {128, 1, 1}, {256, 1, 1}, 512, "fused"},
      {33, 4096, 4096, 8, "gemm_fused_uint4b8_float16", {128, 1, 1}, {128, 1, 1}, 1024},
      {8, 512, 4096, 32, "gemm_fused_uint4b8_float16", {16, 1, 1}, {256, 1, 1}, 512, "fused"},
      {32, 64, 4096, 8, "gemm_fused_uint4b8_float16", {2, 4, 1}, {256, 1, 1}, 512, "fused"},
      {33,
       512,
       4096,
       8,
       "gemm_double_buffered_64x64x32_uint4b8_float16",
       {8, 1, 2},
       {256, 1, 1},
       2048,
       "double_buffered"},
  };
  for (const auto& row : rows) {
    GemmProblem problem = product(row.M, row.N, row.K, 128);
    problem.variant = row.variant;
    const Plan plan = plan_gemm(problem, {.cores = row.cores});
    subject = host_name(plan.dispatches.front().instance);
    const Dispatch& first = plan.dispatches.front();
    const auto same = [](const Extent& a, const Extent& b) { return a.x == b.x && a.y == b.y && a.z == b.z; };
    expect(host_name(first.instance) == row.function, std::string("expected ") + row.function);
    expect(same(first.grid, row.grid) && same(first.threads, row.threads),
           "expected grid and threads, got " + text(first));
    expect(std::get<GemmParams>(first.params).k_per_slice == row.k_per_slice,
           "expected slices of K of " + std::to_string(row.k_per_slice));
  }
}

// Checks that the estimates of a few rows and of one row are about equal.
void check_few_rows() {
  const auto over_one_row = [](const Chip& chip, uint32_t M) {
    return least_seconds(product(M, 4096, 14336, 64), whole(chip)) /
           least_seconds(product(1, 4096, 14336, 64), whole(chip));
  };
  for (const Chip& chip : kChips) {
    subject = chip.name;
    // An M5 Max has 40 cores and the fastest memory. With one dispatch of 32 threadgroups, gemv would leave eight cores
    // idle, so four rows need a second dispatch.
    expect(over_one_row(chip, 4) <= (chip.name == "M5 Max" ? 1.13 : 1.1),
           "4 rows cost " + std::to_string(over_one_row(chip, 4)) + " times as much as one");
  }
  for (std::string_view name : {"M1", "M2", "M3", "M4", "M1 Pro", "M1 Max"}) {
    subject = name;
    const double limit = name.size() > 2 ? 1.7 : 1.5;
    expect(over_one_row(*find_chip(name), 8) <= limit,
           "8 rows cost " + std::to_string(over_one_row(*find_chip(name), 8)) + " times as much as one");
  }
}

}  // namespace

int main(int argc, char** argv) {
  return test::run_cases({{"occupancy", check_occupancy},
                          {"by hand", check_by_hand},
                          {"decisions", check_decisions},
                          {"all tilings", check_all_tilings},
                          {"ladder", check_ladder},
                          {"no better plan", check_no_better_plan},
                          {"choices", check_choices},
                          {"splits", check_splits},
                          {"few rows", check_few_rows}},
                         argc, argv);
}
