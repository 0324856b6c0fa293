// The planner alone: expected choices, and what must hold for every plan. Prints "<checks> checks, <failures> failed".
#include <cstdio>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>

#include "../../csrc/plan.h"

using namespace marlin;

namespace {

int checks = 0;
int failures = 0;
std::string subject;

void expect(bool condition, const std::string& what) {
  ++checks;
  if (condition) return;
  ++failures;
  std::printf("FAILED %s\n  in %s\n", what.c_str(), subject.c_str());
}

template <typename T>
std::string text(const T& value) {
  std::ostringstream stream;
  stream << value;
  return stream.str();
}

template <typename Body>
void expect_refused(const char* what, const Body& body) {
  try {
    body();
    expect(false, std::string("no error: ") + what);
  } catch (const std::invalid_argument&) {
    expect(true, what);
  }
}

std::set<std::string> all_functions() {
  std::set<std::string> names;
  for (size_t kernel = 0; kernel < kKernels.size(); ++kernel) {
    for (int format = 0; format < kWeightFormatCount; ++format) {
      for (int type = 0; type < 3; ++type) {
        names.insert(
            host_name(static_cast<Kernel>(kernel), static_cast<WeightFormat>(format), static_cast<ElementType>(type)));
      }
    }
  }
  return names;
}

void check_dispatch(const Dispatch& dispatch) {
  static const std::set<std::string> names = all_functions();
  expect(names.contains(dispatch.function), "the kernel exists: " + dispatch.function);
  expect(dispatch.grid.x > 0 && dispatch.grid.y > 0 && dispatch.grid.z > 0, "no empty grid");
  const uint32_t threads = dispatch.threads.x * dispatch.threads.y * dispatch.threads.z;
  expect(threads > 0 && threads <= 1024, "1 to 1024 threads");
  expect(dispatch.threadgroup_bytes <= 32768, "at most 32 KB of threadgroup memory");
}

// `blocks` blocks of `length` tile [0, size): all of it, and none of them empty.
void expect_tiling(uint64_t blocks, uint64_t length, uint64_t size, const std::string& what) {
  expect(blocks * length >= size, what + " covered");
  expect((blocks - 1) * length < size, what + ": no empty block");
}

void check_gemm(const GemmProblem& problem, const GpuDevice& device) {
  const Plan plan = plan_gemm(problem, device);
  subject = text(plan);
  for (const Dispatch& dispatch : plan.dispatches)
    check_dispatch(dispatch);
  const Dispatch& product = plan.dispatches.front();
  const auto& params = std::get<GemmParams>(product.params);
  const WeightProblem& weight = problem.weight;
  expect(params.M == problem.M && params.N == weight.N && params.K == weight.K, "sizes");
  expect(params.group_size == std::min(weight.group_size, weight.K), "group size");
  expect(params.a_row_stride == problem.a_row_stride, "row stride");

  if (product.kernel == Kernel::gemv) {
    const auto rows = static_cast<uint32_t>(product.constants[kConstantRows]);
    const uint32_t simdgroups = product.threads.x / kSimdWidth;
    expect(rows >= 1 && rows <= kGemvMaxRows, "rows of a threadgroup");
    expect(product.threads.x % kSimdWidth == 0 && simdgroups >= 1 && simdgroups <= kGemvMaxSimdgroups, "simdgroups");
    expect(product.threadgroup_bytes == gemv_threadgroup_bytes(rows, simdgroups), "threadgroup memory");
    expect(product.constants[kConstantSubnormalCodes] ==
               (device.half_subnormals && problem.activations == ElementType::float16),
           "probe's answer, for fp16");
    expect(params.k_per_slice % kCodesPerWord == 0, "slices of whole words");
    expect_tiling(product.grid.x, kGemvColumns, weight.N, "columns");
    expect_tiling(product.grid.y, rows, problem.M, "rows");
    expect_tiling(product.grid.z, uint64_t{simdgroups} * params.k_per_slice, weight.K, "k");
  } else {
    const uint32_t stages = product.kernel == Kernel::gemm_double_buffered ? 2 : 1;
    expect(product.threads.x == kTileThreads && product.threads.y == 1, "threads");
    expect(product.threadgroup_bytes == tile_threadgroup_bytes(problem.activations, stages), "threadgroup memory");
    expect(params.k_per_slice % kTileK == 0, "slices of whole k-steps");
    expect_tiling(product.grid.x, kTileN, weight.N, "columns");
    expect_tiling(product.grid.y, kTileM, problem.M, "rows");
    expect_tiling(product.grid.z, params.k_per_slice, weight.K, "k");
  }

  const bool splits = product.grid.z > 1;
  expect(product.constants[kConstantWritesPartials] == splits, "partials where K is split over threadgroups");
  expect(plan.dispatches.size() == (splits ? 2 : 1), "a reduction where K is split over threadgroups");
  expect((plan.partials.z != 0) == splits, "a workspace where K is split over threadgroups");
  const Dispatch& last = plan.dispatches.back();
  expect((last.constants[kConstantHasBias] != 0) == problem.has_bias, "the last kernel adds the bias");
  if (splits) {
    expect(last.kernel == Kernel::reduce, "the second kernel reduces");
    expect(product.constants[kConstantHasBias] == 0, "the bias is added once");
    const auto& reduce = std::get<ReduceParams>(last.params);
    expect(reduce.M == problem.M && reduce.N == weight.N && reduce.slices == product.grid.z, "reduction's sizes");
    expect(plan.partials.x == weight.N && plan.partials.y == problem.M && plan.partials.z == reduce.slices,
           "workspace's sizes");
    expect_tiling(last.grid.x, last.threads.x, weight.N, "reduced columns");
    expect_tiling(last.grid.y, last.threads.y, problem.M, "reduced rows");
  }
  if (weight.has_perm) expect(product.constants[kConstantVectorActivations] == 0, "no vector loads through perm");
  if (weight.N % 4 != 0) expect(product.constants[kConstantVectorColumns] == 0, "no vector loads of odd rows");
  expect(text(plan_gemm(problem, device)) == subject, "the same plan twice");
}

GemmProblem square(uint32_t M, uint32_t N, uint32_t K, uint32_t group_size, std::string_view variant = "auto") {
  GemmProblem problem{.M = M, .a_row_stride = K, .vector_aligned_a = true, .variant = variant};
  problem.weight = {.K = K, .N = N, .group_size = group_size, .vector_aligned = true};
  return problem;
}

void check_random_problems() {
  std::mt19937 random(0);
  const auto pick = [&](uint32_t from, uint32_t to) { return std::uniform_int_distribution(from, to)(random); };
  const uint32_t groups[] = {16, 32, 64, 128, 256};
  for (int i = 0; i < 4000; ++i) {
    const uint32_t K = 8 * pick(1, i % 4 == 0 ? 4096 : 40);
    const uint32_t group = pick(0, 5);
    GemmProblem problem =
        square(pick(1, i % 3 == 0 ? 5000 : 80), pick(1, i % 5 == 0 ? 20000 : 300), K, group == 5 ? K : groups[group]);
    problem.weight.format = static_cast<WeightFormat>(pick(0, kWeightFormatCount - 1));
    problem.activations = static_cast<ElementType>(pick(0, 2));
    problem.has_bias = pick(0, 1);
    problem.weight.has_perm = pick(0, 1);
    problem.weight.vector_aligned = pick(0, 1);
    const GpuDevice device{pick(1, 80), pick(0, 1) == 1};
    check_gemm(problem, device);
    for (std::string_view variant : gemm_variants()) {
      problem.variant = variant;
      check_gemm(problem, device);
    }
  }
}

// The choices on an M1 (8 cores) and an M1 Max (32).
void check_choices() {
  const struct {
    uint32_t M, N, K, group_size, cores;
    const char* function;
    Extent grid, threads;
    uint32_t k_per_slice;
  } rows[] = {
      {1, 4096, 4096, 128, 8, "gemv_uint4b8_float16", {32, 1, 1}, {192, 1, 1}, 768},
      {1, 512, 4096, 128, 8, "gemv_uint4b8_float16", {4, 1, 2}, {512, 1, 1}, 128},
      {1, 512, 4096, 128, 32, "gemv_uint4b8_float16", {4, 1, 4}, {512, 1, 1}, 64},
      {1, 151936, 896, 64, 8, "gemv_uint4b8_float16", {1187, 1, 1}, {32, 1, 1}, 896},
      {5, 4096, 4096, 128, 8, "gemv_uint4b8_float16", {32, 2, 1}, {96, 1, 1}, 1408},
      {24, 4096, 4096, 128, 8, "gemv_uint4b8_float16", {32, 6, 1}, {32, 1, 1}, 4096},
      {25, 4096, 4096, 128, 8, "gemm_double_buffered_uint4b8_float16", {64, 1, 1}, {256, 1, 1}, 4096},
      {33, 512, 4096, 128, 8, "gemm_double_buffered_uint4b8_float16", {8, 1, 2}, {256, 1, 1}, 2048},
      {4096, 4096, 4096, 128, 8, "gemm_double_buffered_uint4b8_float16", {64, 64, 1}, {256, 1, 1}, 4096},
      {1, 1, 8, 8, 8, "gemv_uint4b8_float16", {1, 1, 1}, {32, 1, 1}, 8},
  };
  for (const auto& row : rows) {
    const Plan plan = plan_gemm(square(row.M, row.N, row.K, row.group_size), {.cores = row.cores});
    subject = text(plan);
    const Dispatch& first = plan.dispatches.front();
    const auto same = [](const Extent& a, const Extent& b) { return a.x == b.x && a.y == b.y && a.z == b.z; };
    expect(first.function == row.function, std::string("expected ") + row.function);
    expect(same(first.grid, row.grid) && same(first.threads, row.threads), "expected grid and threads");
    expect(std::get<GemmParams>(first.params).k_per_slice == row.k_per_slice, "expected slices");
  }
}

void check_elementwise() {
  for (uint32_t K : {8U, 24U, 4096U}) {
    for (uint32_t N : {1U, 64U, 65U, 4096U}) {
      const DequantizeProblem problem{.weight = {.K = K, .N = N, .group_size = 32}, .out = ElementType::bfloat16};
      const Plan dequantize = plan_dequantize(problem);
      subject = text(dequantize);
      check_dispatch(dequantize.dispatches.at(0));
      expect(dequantize.dispatches[0].function == "dequantize_uint4b8_bfloat16", "function");
      const Plan repack = plan_repack({.kernel = Kernel::awq_repack, .rows = K / 8, .columns = N});
      for (const Plan* plan : {&dequantize, &repack}) {
        subject = text(*plan);
        const Dispatch& dispatch = plan->dispatches.at(0);
        check_dispatch(dispatch);
        expect(plan->dispatches.size() == 1 && plan->partials.z == 0, "one kernel");
        expect_tiling(dispatch.grid.x, dispatch.threads.x, N, "columns");
        expect_tiling(dispatch.grid.y, dispatch.threads.y, K / 8, "rows");
      }
    }
  }
}

void check_refusals() {
  subject = "refusals";
  expect_refused("M = 0", [] { plan_gemm(square(0, 8, 8, 8), {}); });
  expect_refused("N = 0", [] { plan_gemm(square(1, 0, 8, 8), {}); });
  expect_refused("K = 12", [] { plan_gemm(square(1, 8, 12, 8), {}); });
  expect_refused("group of 12", [] { plan_gemm(square(1, 8, 24, 12), {}); });
  expect_refused("unknown variant", [] { plan_gemm(square(1, 8, 8, 8, "fastest"), {}); });
  expect_refused("no rows", [] { plan_repack({.rows = 0, .columns = 8}); });
  expect_refused("not a repack", [] { plan_repack({.kernel = Kernel::gemv, .rows = 1, .columns = 8}); });
}

}  // namespace

int main() {
  check_choices();
  check_random_problems();
  check_elementwise();
  check_refusals();
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
