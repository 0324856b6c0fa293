// Tests the cost model. Compares it with results computed by hand, and checks rules that hold for every plan on every
// chip.
#include <cmath>
#include <limits>
#include <string>

#include "csrc/planner/cost/cost.h"
#include "csrc/planner/plan.h"
#include "csrc/planner/variants/split_k.h"
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

GpuDevice whole(const Chip& chip) {
  return {chip.cores, true, &chip};
}

void check_occupancy() {
  subject = "occupancy";
  const GpuFamily& family = kGpuFamilies.front();
  const auto is = [&](uint32_t threads, uint32_t registers, uint32_t bytes, uint32_t groups, std::string_view limit) {
    const Occupancy held = occupancy(threads, registers, bytes, family);
    expect(held.threadgroups == groups && held.simdgroups == groups * threads / 32 && held.limit == limit,
           std::to_string(threads) + " threads, " + std::to_string(registers) + " half-registers, " +
               std::to_string(bytes) + " bytes: " + std::to_string(held.threadgroups) + " by " +
               std::string(held.limit));
  };
  is(1024, 104, 0, 1, "registers");                 // 106496 / (1024 * 104) = 1 exactly
  is(1024, 16, 0, 3, "threads");                    // 3072 / 1024
  is(256, 64, 20 * 1024, 3, "threadgroup memory");  // 60 KB / 20 KB
  is(128, 207, 4096, 4, "registers");               // 106496 / (128 * 207) = 4.02
  is(512, 255, 32768, 1, "registers");              // 0.8, but one threadgroup can always run
  expect(largest_threadgroup(104) == 1024 && largest_threadgroup(105) == 896, "the first rows of Mesa's table");
  expect(largest_threadgroup(207) == 512 && largest_threadgroup(256) == 384 && largest_threadgroup(257) == 0,
         "the last rows of Mesa's table");
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

// Checks rules that hold for the cost of any tiling.
void check_tiling(const Tiling& tiling, const GemmProblem& problem, const GpuDevice& device) {
  subject = std::string(device.chip->name) + ", " + std::to_string(problem.M) + "x" + std::to_string(problem.weight.N) +
            "x" + std::to_string(problem.weight.K) + " " + std::string(name(problem.weight.format)) + ": " +
            name(tiling);
  const PlanCost total = cost(tiling, problem, device);
  double sum = 0;
  double bytes = 0;
  for (const DispatchCost& part : total.dispatches) {
    for (double figure : {part.dram_bytes, part.l2_bytes, part.launch_seconds, part.seconds})
      expect(std::isfinite(figure) && figure > 0, "every figure is finite and positive");
    expect(part.seconds >= part.launch_seconds + part.dram_seconds * 0.999, "no faster than memory");
    expect(part.seconds >= part.launch_seconds + part.compute_seconds * 0.999, "no faster than its busiest core");
    const double overlap = family_of(*device.chip).matrix_overlap.value;
    const double together =
        part.issue_seconds + part.matrix_seconds - overlap * std::min(part.issue_seconds, part.matrix_seconds);
    expect(part.compute_seconds >= together * 0.999 && part.compute_seconds >= part.complex_seconds * 0.999,
           "no faster than with the work divided evenly over the cores");
    expect(!part.bound.empty(), "the limiting resource is named");
    sum += part.seconds;
    bytes += part.dram_bytes;
  }
  expect_close(total.seconds, sum, 1e-9, "seconds of the plan, which is the sum over its dispatches");
  expect(bytes >= distinct_bytes(problem) * 0.999, "every byte is read or written at least once");
}

template <size_t Rows>
void check_table(const std::array<KernelCounts, Rows>& table) {
  for (const KernelCounts& row : table)
    expect(find_counts(table, row.kernel, row.format, row.tile) == &row,
           "the counts have one row for " + std::string(info(row.kernel).name));
}

void check_counts() {
  subject = "counts";
  check_table(kKernelCounts);
  check_table(kBfloat16Counts);
  check_table(kFloat32Counts);
  const GemmTile four{GemmVariant::gemv, Kernel::gemv, {4, kGemvColumns, kGemvK}, 0};
  const auto issue = [&](ElementType activations, const char* chip) {
    const GemmProblem problem = product(4, 4096, 4096, 64, WeightFormat::uint4b8, activations);
    return counts_of(four, problem, family_of(*find_chip(chip))).step.issue;
  };
  expect(issue(ElementType::bfloat16, "M2") > 1.3 * issue(ElementType::float16, "M2"),
         "an M2 computes bfloat with more instructions");
  expect(issue(ElementType::bfloat16, "M3") == issue(ElementType::float16, "M3"), "an M3 has bfloat in hardware");
  expect(issue(ElementType::float32, "M3") == issue(ElementType::float32, "M2"), "fp32 costs the same everywhere");
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

PlanCost least_cost(const GemmProblem& problem, const GpuDevice& device) {
  const auto tilings = gemm_tilings(problem, device);
  return cost(choose(tilings, problem, device), problem, device);
}

double least_seconds(const GemmProblem& problem, const GpuDevice& device) {
  return least_cost(problem, device).seconds;
}

double launch_seconds(const PlanCost& total) {
  double seconds = 0;
  for (const DispatchCost& part : total.dispatches)
    seconds += part.launch_seconds;
  return seconds;
}

// Returns the largest factor by which one more row may raise the cost, not counting a second launch. The factor depends
// on whether row M + 1 starts the second block of 8 rows, the third, the fourth, or none of these. 25 rows are computed
// as 32, and a core holds only three threadgroups of 32 rows, but four of 24.
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
          const PlanCost least = least_cost(product(M, N, K, 64, format), whole(chip));
          const double now = least.seconds;
          const double launches = launch_seconds(least);
          subject = std::string(chip.name) + ", N " + std::to_string(N) + ", K " + std::to_string(K) + ", " +
                    std::string(name(format)) + ", M " + std::to_string(M);
          if (M > 1) {
            expect(now >= before / kEqualCost, "more rows cost no less");
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

// Returns the least cost of all row blocks and splits of K of gemv and fused, and of the planner's other candidates.
double least_of_all(const GemmProblem& problem, const GpuDevice& device) {
  double least = std::numeric_limits<double>::infinity();
  const auto consider = [&](const Tiling& tiling) { least = std::min(least, cost(tiling, problem, device).seconds); };
  for (const Tiling& tiling : gemm_tilings(problem, device))
    if (tiling.variant != GemmVariant::two_pass) consider(tiling);
  for (const GemmTile& row : gemm_tiles()) {
    for (uint32_t slices = 1; slices <= max_slices(problem.weight, 64); ++slices) {
      if (row.variant == GemmVariant::gemv) consider(gemv_split(row, problem.weight, slices));
      if (row.variant != GemmVariant::fused) continue;
      consider(fused_split(row, problem.weight, 0, slices));
      if (const uint32_t rest = round_up(problem.M % row.tile.M, 8U); rest != 0 && row.tile.M <= problem.M)
        consider(fused_split(row, problem.weight, rest, slices));
    }
  }
  return least;
}

// Checks that no other row block or split of K is clearly better than the plan, in the model that counts waits.
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
            expect(ratio <= 1.03, "another plan is " + std::to_string(ratio) + " times as fast");
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
    const char* bound;
  } rows[] = {
      {"M1", 1, 4096, 4096, "gemv:1x128x16", 1, "dram"},
      {"M1", 4, 4096, 4096, "gemv:4x128x16", 1, "dram"},
      {"M1", 5, 4096, 4096, "gemv:5x128x16", 1, "dram"},
      {"M1", 16, 4096, 14336, "fused:16x32x64", 1, "matrix"},
      {"M1", 33, 4096, 4096, "fused:24x32x64", 2, "matrix"},
      {"M1", 4096, 4096, 4096, "fused:32x32x64", 1, "matrix"},
      {"M1", 1, 1, 8, "gemv:1x128x16", 1, "launch"},
      {"M1 Max", 4, 4096, 4096, "gemv:2x128x16", 1, "dram"},
      {"M1 Max", 8, 4096, 4096, "fused:8x32x64", 1, "matrix"},
      {"M1 Max", 9, 4096, 14336, "gemv:3x128x16", 1, "issue"},
      {"M1 Max", 1, 512, 4096, "gemv:1x128x16", 2, "launch"},
      {"M2 Ultra", 1, 151936, 896, "gemv:1x128x16", 1, "dram"},
      {"M3", 33, 4096, 4096, "fused:24x32x64", 3, "matrix"},
      {"M4 Max", 16, 4096, 14336, "fused:16x32x64", 2, "matrix"},
      {"M5", 8, 4096, 4096, "fused:8x32x64", 1, "matrix"},
  };
  for (const auto& row : rows) {
    const GemmProblem problem = product(row.M, row.N, row.K, 128);
    const GpuDevice device = whole(*find_chip(row.chip));
    const auto tilings = gemm_tilings(problem, device);
    const Tiling& taken = choose(tilings, problem, device);
    subject = std::string(row.chip) + ": " + std::to_string(row.M) + "x" + std::to_string(row.N) + "x" +
              std::to_string(row.K) + ": " + name(taken);
    expect(name(taken) == row.taken, std::string("expected ") + row.taken);
    expect(build_plan(taken, problem, device).dispatches.size() == row.dispatches,
           "expected " + std::to_string(row.dispatches) + " dispatches");
    expect(cost(taken, problem, device).dispatches[0].bound == row.bound, std::string("expected bound ") + row.bound);
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
      {17, 4096, 4096, 8, "gemv_uint4b8_float16", {3, 32, 1}, {128, 1, 1}, 1024, "gemv"},
      {5, 4096, 4096, 8, "gemm_fused_uint4b8_float16", {128, 1, 1}, {128, 1, 1}, 1024, "fused"},
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

// Checks that, in the model, a few rows cost about as much as one.
void check_few_rows() {
  const auto gemv_busy = [](const Chip& chip, uint32_t M, WeightFormat format) {
    GemmProblem problem = product(M, 4096, 14336, 64, format);
    problem.variant = "gemv";
    const auto tilings = gemm_tilings(problem, whole(chip));
    const DispatchCost part = cost(choose(tilings, problem, whole(chip)), problem, whole(chip)).dispatches[0];
    return std::max(part.issue_seconds, part.complex_seconds) / (part.dram_seconds * chip.dram_fraction.value);
  };
  for (std::string_view name : {"M1", "M1 Max", "M2 Max", "M4 Max"}) {
    const Chip& chip = *find_chip(name);
    subject = name;
    for (uint32_t M = 1; M <= 4; ++M)
      expect(gemv_busy(chip, M, WeightFormat::uint4b8) < 1,
             "INT4 weights are decoded faster than they are read, M " + std::to_string(M));
    for (uint32_t M = 1; M <= 2; ++M)
      expect(gemv_busy(chip, M, WeightFormat::float4_e2m1) < 1,
             "E2M1 weights are decoded faster than they are read, M " + std::to_string(M));
  }
  const auto over_one_row = [](const Chip& chip, uint32_t M) {
    return least_seconds(product(M, 4096, 14336, 64), whole(chip)) /
           least_seconds(product(1, 4096, 14336, 64), whole(chip));
  };
  for (const Chip& chip : kChips) {
    subject = chip.name;
    // An M5 Max has 40 cores and the fastest memory. With one dispatch of 32 threadgroups, gemv would leave eight cores
    // idle, so four rows take a second dispatch.
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
                          {"counts", check_counts},
                          {"all tilings", check_all_tilings},
                          {"ladder", check_ladder},
                          {"no better plan", check_no_better_plan},
                          {"choices", check_choices},
                          {"splits", check_splits},
                          {"few rows", check_few_rows}},
                         argc, argv);
}
