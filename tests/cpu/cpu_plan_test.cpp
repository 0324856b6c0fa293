// Tests the CPU planner with a table of expected choices and with rules that hold for every plan. Uses no torch and
// runs no kernels.
#include <initializer_list>
#include <string>

#include "cpu_plan_support.h"
#include "csrc/cpu/kernels/kernel_table.h"
#include "tests/support/expect.h"

namespace marlin::cpu {
namespace {

using test::expect;

constexpr Machine kZen4{Isa::avx512, true, 2, true};
constexpr Machine kAppleM1{Isa::neon, false, 4, true};
constexpr Machine kAppleM2{Isa::neon, true, 4, true, true};
constexpr Machine kXeon{Isa::amx, false, 16, true};

CpuProblem problem(int64_t M, int64_t N, int64_t K, ElementType a_type) {
  return {M, N, K, WeightFormat::uint4b8, 128, a_type, 1, Precision::highest};
}

void test_choices() {
  using enum ElementType;
  struct Row {
    Machine machine;
    CpuProblem problem;
    const char* expected;
  };
  CpuProblem table_of_floats = problem(1, 4096, 4096, bfloat16);
  table_of_floats.format = WeightFormat::lut4;
  table_of_floats.code_parts = 3;
  CpuProblem large_m_of_table = table_of_floats;
  large_m_of_table.M = 16;
  CpuProblem some_rows_of_table = table_of_floats;
  some_rows_of_table.M = 15;
  CpuProblem subnormal_parts = large_m_of_table;
  subnormal_parts.code_parts = 0;
  auto reduced = [](int64_t M, WeightFormat format = WeightFormat::uint4b8, int64_t group_size = 128) {
    CpuProblem reduced = problem(M, 4096, 4096, float32);
    reduced.format = format;
    reduced.group_size = group_size;
    reduced.precision = Precision::reduced;
    return reduced;
  };
  auto in_bytes = [&](int64_t M, WeightFormat format = WeightFormat::uint4b8) {
    CpuProblem rounded = reduced(M, format);
    rounded.precision = Precision::int8;
    return rounded;
  };
  auto coded = [](int64_t M, WeightFormat format, int64_t group_size) {
    CpuProblem coded = problem(M, 4096, 4096, bfloat16);
    coded.format = format;
    coded.group_size = group_size;
    return coded;
  };
  auto rounding = [](int64_t M, ElementType a_type) {
    CpuProblem rounding = problem(M, 4096, 4096, a_type);
    rounding.rounds = true;
    return rounding;
  };
  CpuProblem rounding_table = rounding(128, bfloat16);
  rounding_table.format = WeightFormat::lut4;
  rounding_table.code_parts = 3;
  const Row rows[] = {
      {kZen4, rounding(127, bfloat16), "bf16_dot_panel parts=1 strip=32 tasks=1x2x1"},
      {kZen4, rounding(128, bfloat16), "bf16_dot_rounded parts=1 strip=32 tasks=1x2x1"},
      {kZen4, rounding(128, float16), "byte_split parts=1 strip=32 tasks=1x2x1"},
      {kXeon, rounding(128, bfloat16), "amx_rounded parts=1 strip=32 tasks=1x16x1"},
      {kXeon, rounding_table, "amx_rounded parts=1 strip=32 tasks=1x16x1"},
      {kAppleM2, rounding(128, bfloat16), "bf16_dot parts=1 strip=8 tasks=1x4x1"},
      {{Isa::portable, false, 1}, problem(1, 64, 64, float32), "small_m parts=1 strip=8 tasks=1x1x1"},
      {{Isa::avx2, false, 2}, problem(1, 4096, 4096, float32), "small_m parts=1 strip=32 tasks=1x1x2"},
      {{Isa::avx2, false, 2}, problem(1, 4096, 4096, float16), "byte_split_avx2 parts=1 strip=32 tasks=1x1x2"},
      {{Isa::avx2, false, 2}, problem(2, 4096, 4096, bfloat16), "small_m parts=1 strip=32 tasks=1x1x2"},
      {{Isa::avx2, false, 2}, problem(3, 4096, 4096, bfloat16), "large_m parts=1 strip=16 tasks=1x2x1"},
      {{Isa::avx512, false, 2}, problem(4, 4096, 4096, bfloat16), "small_m parts=1 strip=64 tasks=1x2x1"},
      {{Isa::avx512, false, 2}, problem(5, 4096, 4096, bfloat16), "large_m parts=1 strip=32 tasks=1x2x1"},
      {{Isa::neon, false, 4}, problem(7, 4096, 4096, float16), "large_m parts=1 strip=16 tasks=1x4x1"},
      {kAppleM1, problem(1, 4096, 4096, bfloat16), "byte_split_small_m parts=1 strip=16 tasks=1x1x4"},
      {kAppleM1, problem(3, 4096, 4096, float16), "byte_split parts=1 strip=8 tasks=1x4x1"},
      {kAppleM1, problem(1, 4096, 4096, float32), "small_m parts=1 strip=16 tasks=1x1x4"},
      {kAppleM2, problem(1, 4096, 4096, bfloat16), "byte_split_small_m parts=1 strip=16 tasks=1x1x4"},
      {kAppleM2, problem(2, 4096, 4096, bfloat16), "bf16_dot parts=1 strip=8 tasks=1x2x2"},
      {kAppleM2, problem(16, 4096, 4096, float16), "byte_matrix parts=1 strip=8 tasks=1x4x1"},
      {kAppleM2, problem(1, 4096, 4096, float32), "bf16_dot_fp32_row parts=3 strip=16 tasks=1x1x4"},
      {kAppleM2, problem(2, 4096, 4096, float32), "small_m parts=1 strip=16 tasks=1x2x2"},
      {kZen4, problem(1, 4096, 4096, bfloat16), "byte_split_small_m parts=1 strip=64 tasks=1x1x2"},
      {kZen4, problem(1, 4096, 4096, float16), "byte_split_small_m parts=1 strip=64 tasks=1x1x2"},
      {kZen4, problem(1, 4096, 4096, float32), "bf16_dot_fp32_row parts=3 strip=64 tasks=1x1x2"},
      {kZen4, problem(2, 4096, 4096, bfloat16), "bf16_dot_small_m parts=1 strip=64 tasks=1x1x2"},
      {kZen4, problem(2, 4096, 4096, float16), "byte_split_small_m parts=1 strip=64 tasks=1x1x2"},
      {kZen4, problem(2, 4096, 4096, float32), "small_m parts=1 strip=64 tasks=1x1x2"},
      {kZen4, problem(7, 4096, 4096, bfloat16), "bf16_dot parts=1 strip=32 tasks=1x2x1"},
      {kZen4, problem(8, 4096, 4096, bfloat16), "bf16_dot_small_m parts=1 strip=64 tasks=1x2x1"},
      {kZen4, problem(16, 4096, 4096, bfloat16), "bf16_dot_small_m parts=1 strip=64 tasks=1x2x1"},
      {kZen4, problem(17, 4096, 4096, bfloat16), "bf16_dot parts=1 strip=32 tasks=1x2x1"},
      {kZen4, problem(48, 4096, 4096, bfloat16), "bf16_dot parts=1 strip=32 tasks=1x2x1"},
      {kZen4, problem(49, 4096, 4096, bfloat16), "bf16_dot_panel parts=1 strip=32 tasks=1x2x1"},
      {kZen4, coded(24, WeightFormat::uint8b128, 32), "bf16_dot parts=1 strip=32 tasks=1x2x1"},
      {kZen4, coded(25, WeightFormat::mxfp8, 32), "bf16_dot_panel parts=1 strip=32 tasks=1x2x1"},
      {kZen4, problem(8, 4096, 4096, float32), "small_m parts=1 strip=64 tasks=1x2x1"},
      {kZen4, problem(16, 4096, 4096, float16), "byte_split parts=1 strip=32 tasks=1x2x1"},
      {kZen4, problem(16, 4096, 4096, float32), "small_m parts=1 strip=64 tasks=1x2x1"},
      {kZen4, problem(17, 4096, 4096, float32), "large_m parts=1 strip=32 tasks=1x2x1"},
      {{Isa::avx2, true, 2, true}, problem(16, 4096, 4096, float16), "large_m parts=1 strip=16 tasks=1x2x1"},
      {kZen4, table_of_floats, "small_m parts=1 strip=64 tasks=1x1x2"},
      {kZen4, problem(1, 512, 4096, bfloat16), "byte_split_small_m parts=1 strip=64 tasks=1x1x2"},
      {kZen4, problem(16, 512, 4096, float16), "byte_split parts=1 strip=32 tasks=1x1x2"},
      {kZen4, problem(23, 512, 4096, float16), "byte_split parts=1 strip=32 tasks=1x2x1"},
      {kZen4, problem(1, 512, 512, bfloat16), "byte_split_small_m parts=1 strip=64 tasks=1x2x1"},
      {kXeon, problem(1, 4096, 4096, float32), "small_m parts=1 strip=64 tasks=1x4x4"},
      {kXeon, problem(1, 512, 4096, bfloat16), "byte_split_small_m parts=1 strip=64 tasks=1x2x8"},
      {kXeon, problem(1, 4096, 4096, bfloat16), "byte_split_small_m parts=1 strip=64 tasks=1x4x4"},
      {kXeon, problem(2, 4096, 4096, bfloat16), "byte_split_small_m parts=1 strip=64 tasks=1x8x2"},
      {kXeon, problem(4, 4096, 4096, float16), "byte_split parts=1 strip=32 tasks=1x16x1"},
      {kXeon, problem(5, 4096, 4096, float16), "amx parts=2 strip=32 tasks=1x16x1"},
      {kXeon, problem(4, 4096, 4096, bfloat16), "byte_split parts=1 strip=32 tasks=1x16x1"},
      {kXeon, problem(5, 4096, 4096, bfloat16), "amx parts=1 strip=32 tasks=1x16x1"},
      {kXeon, coded(4, WeightFormat::nvfp4, 16), "byte_split parts=1 strip=32 tasks=1x16x1"},
      {kXeon, coded(5, WeightFormat::nvfp4, 16), "amx_scaled parts=1 strip=32 tasks=1x16x1"},
      {kXeon, coded(5, WeightFormat::uint4b8, 16), "amx parts=1 strip=32 tasks=1x16x1"},
      {kXeon, coded(16, WeightFormat::mxfp4, 32), "amx parts=1 strip=32 tasks=1x16x1"},
      {kXeon, coded(17, WeightFormat::mxfp4, 32), "amx_scaled parts=1 strip=32 tasks=1x16x1"},
      {kXeon, coded(4, WeightFormat::uint8b128, 128), "byte_split parts=1 strip=32 tasks=1x16x1"},
      {kXeon, coded(5, WeightFormat::uint6b32, 128), "amx parts=1 strip=32 tasks=1x16x1"},
      {kXeon, coded(5, WeightFormat::uint8b128, 128), "amx parts=1 strip=32 tasks=1x16x1"},
      {kXeon, coded(1, WeightFormat::mxfp8, 32), "small_m parts=1 strip=64 tasks=1x4x4"},
      {kXeon, coded(3, WeightFormat::mxfp8, 32), "bf16_dot_small_m parts=1 strip=64 tasks=1x16x1"},
      {kXeon, coded(4, WeightFormat::mxfp8, 32), "amx parts=1 strip=32 tasks=1x16x1"},
      {kXeon, coded(16, WeightFormat::mxfp8, 32), "amx parts=1 strip=32 tasks=1x16x1"},
      {kXeon, coded(17, WeightFormat::mxfp8, 32), "amx_scaled parts=1 strip=32 tasks=1x16x1"},
      {kZen4, coded(1, WeightFormat::uint8b128, 32), "bf16_dot_small_m parts=1 strip=64 tasks=1x1x2"},
      {{Isa::avx512, false, 2, true},
       coded(1, WeightFormat::uint8b128, 32),
       "byte_split_small_m parts=1 strip=64 tasks=1x1x2"},
      {kXeon, problem(64, 4096, 4096, float16), "amx parts=2 strip=32 tasks=1x16x1"},
      {kXeon, problem(64, 4096, 4096, float32), "amx parts=3 strip=32 tasks=1x16x1"},
      {kXeon, reduced(64), "amx parts=2 strip=32 tasks=1x16x1"},
      {kXeon, reduced(5), "amx parts=2 strip=32 tasks=1x16x1"},
      {kXeon, reduced(4), "byte_split parts=1 strip=32 tasks=1x16x1"},
      {kXeon, reduced(1), "byte_split_small_m parts=1 strip=64 tasks=1x4x4"},
      {kXeon, reduced(6, WeightFormat::nvfp4, 16), "byte_split parts=1 strip=32 tasks=1x16x1"},
      {kXeon, reduced(7, WeightFormat::nvfp4, 16), "amx_scaled parts=2 strip=32 tasks=1x16x1"},
      {kZen4, reduced(1), "byte_split_small_m parts=1 strip=64 tasks=1x1x2"},
      {kZen4, reduced(16), "byte_split parts=1 strip=32 tasks=1x2x1"},
      {kZen4, reduced(16, WeightFormat::lut4), "small_m parts=1 strip=64 tasks=1x2x1"},
      {{Isa::avx512, false, 2, true}, reduced(2), "byte_split_small_m parts=1 strip=64 tasks=1x1x2"},
      {{Isa::avx512, false, 2, true}, reduced(512), "byte_split parts=1 strip=32 tasks=1x2x1"},
      {{Isa::avx512, false, 2}, reduced(16), "large_m parts=1 strip=32 tasks=1x2x1"},
      {{Isa::avx2, false, 2}, reduced(1), "byte_split_avx2 parts=1 strip=32 tasks=1x1x2"},
      {{Isa::avx2, false, 2}, reduced(2), "small_m parts=1 strip=32 tasks=1x1x2"},
      {{Isa::portable, false, 1}, reduced(1), "small_m parts=1 strip=8 tasks=1x1x1"},
      {kAppleM1, in_bytes(1), "int8_small_m parts=1 strip=16 tasks=1x1x4"},
      {kAppleM2, in_bytes(5), "int8 parts=1 strip=8 tasks=1x4x1"},
      {kZen4, in_bytes(1), "byte_split_small_m parts=1 strip=64 tasks=1x1x2"},
      {kZen4, in_bytes(4), "int8_small_m parts=1 strip=64 tasks=1x2x1"},
      {kXeon, in_bytes(1), "int8_small_m parts=1 strip=64 tasks=1x4x4"},
      {kXeon, in_bytes(11), "int8 parts=1 strip=32 tasks=1x16x1"},
      {kXeon, in_bytes(12), "amx parts=1 strip=32 tasks=1x16x1"},
      {{Isa::avx2, false, 2}, in_bytes(1, WeightFormat::uint8b128), "small_m parts=1 strip=32 tasks=1x1x2"},
      {{Isa::avx512, false, 2}, in_bytes(1), "int8_avx2_small_m parts=1 strip=32 tasks=1x1x2"},
      {{Isa::avx2, false, 2, true}, in_bytes(2), "int8_avx2 parts=1 strip=16 tasks=1x1x2"},
      {kAppleM1, reduced(1), "byte_split_small_m parts=1 strip=16 tasks=1x1x4"},
      {kAppleM2, reduced(3), "byte_matrix parts=1 strip=8 tasks=1x4x1"},
      {{Isa::neon, false, 4}, reduced(1), "small_m parts=1 strip=16 tasks=1x1x4"},
      {kXeon, some_rows_of_table, "large_m parts=1 strip=32 tasks=1x16x1"},
      {kXeon, large_m_of_table, "amx_table parts=1 strip=32 tasks=1x16x1"},
      {kXeon, subnormal_parts, "large_m parts=1 strip=32 tasks=1x16x1"},
      {kXeon, problem(1, 128, 4096, float32), "small_m parts=1 strip=64 tasks=1x2x8"},
      {kXeon, problem(256, 128, 4096, float32), "amx parts=3 strip=32 tasks=4x4x1"},
      {kXeon, problem(1, 128, 256, float32), "small_m parts=1 strip=64 tasks=1x2x1"},
  };
  for (const Row& row : rows) {
    const CpuPlan plan = make_plan(row.machine, row.problem);
    const std::string printed = to_string(plan);
    const std::string got = printed.substr(0, printed.find(" max_rows")) + " tasks=" + std::to_string(plan.row_tasks) +
                            "x" + std::to_string(plan.column_tasks) + "x" + std::to_string(plan.k_slices);
    expect(got == row.expected, std::string(isa_name(row.machine.isa)) + " M=" + std::to_string(row.problem.M) + " N=" +
                                    std::to_string(row.problem.N) + ": expected " + row.expected + ", got " + got);
  }
}

// Checks when the planner chooses half chunks: on AMD's CPUs, for one row of 16-bit activations with many columns, and
// for one row with codes of 8 bits, except in byte_split with many threads.
void test_chunks() {
  using enum ElementType;
  const auto check = [](const Machine& machine, const CpuProblem& problem, int64_t expected) {
    const CpuPlan plan = make_plan(machine, problem);
    expect(plan.chunk == expected, "chunk: expected " + std::to_string(expected) + ", got " + to_string(plan));
  };
  check(kZen4, problem(1, 4096, 4096, bfloat16), kChunk / 2);
  check(kZen4, problem(1, 11008, 4096, float16), kChunk / 2);
  check(kZen4, problem(1, 4095, 4096, bfloat16), kChunk);
  check(kZen4, problem(2, 4096, 4096, float16), kChunk);
  check(kZen4, problem(1, 4096, 4096, float32), kChunk);
  check({Isa::avx512, false, 2, true}, problem(1, 4096, 4096, bfloat16), kChunk);
  check(kAppleM2, problem(1, 4096, 4096, bfloat16), kChunk);
  check(kXeon, problem(1, 4096, 4096, bfloat16), kChunk);
  CpuProblem bytes = problem(1, 512, 4096, bfloat16);
  bytes.format = WeightFormat::uint8b128;
  check({Isa::avx2, false, 16}, bytes, kChunk / 2);
  check({Isa::avx512, false, 4, true}, bytes, kChunk / 2);
  check(kXeon, bytes, kChunk);
  bytes.M = 2;
  check({Isa::avx2, false, 16}, bytes, kChunk);
}

// If bf16 cannot represent a scaled code, amx_scaled falls back to amx. If bf16 cannot represent an activation, amx
// falls back to fp32.
void test_fallbacks() {
  CpuProblem coded = problem(64, 4096, 4096, ElementType::bfloat16);
  coded.format = WeightFormat::mxfp4;
  coded.group_size = 32;
  CpuPlan plan = make_plan(kXeon, coded);
  for (const CpuKernel kernel : {CpuKernel::amx_scaled, CpuKernel::amx, CpuKernel::large_m}) {
    expect(plan.kernel == kernel,
           "fallback: expected " + std::to_string(static_cast<int>(kernel)) + ", got " + to_string(plan));
    plan = make_fallback_plan(kXeon, coded, plan);
  }
}

// Checks the assumptions of gemm.cpp about every plan.
void test_invariants() {
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::amx, Isa::neon}) {
    for (const bool fast_dot : {false, true}) {
      for (const int threads : {1, 2, 3, 16, 64}) {
        for (const ElementType a_type : {ElementType::float16, ElementType::bfloat16, ElementType::float32}) {
          for (int64_t M = 1; M < 1200; M += M < 70 ? 1 : 37) {
            for (const int64_t N : {1, 7, 100, 512, 4096, 11008}) {
              for (const int64_t K : {8, 136, 4096}) {
                const Machine machine{isa, fast_dot, threads, fast_dot};
                const CpuProblem p = problem(M, N, K, a_type);
                const CpuPlan plan = make_plan(machine, p);
                const std::string at = std::string(isa_name(isa)) + " M=" + std::to_string(M) +
                                       " N=" + std::to_string(N) + " K=" + std::to_string(K) + ": " + to_string(plan);
                expect(to_string(make_plan(machine, p)) == to_string(plan), at + ": a second call gave another plan");
                if (a_type == ElementType::float32) {
                  expect(plan.parts != 2 && !is_byte_split(plan.kernel),
                         at + ": computes with less than the highest precision");
                } else {
                  CpuProblem reduced = p;
                  reduced.precision = Precision::reduced;
                  expect(to_string(make_plan(machine, reduced)) == to_string(plan),
                         at + ": the fp32 precision setting changed the plan for 16-bit activations");
                }
                expect(plan.row_tasks * plan.column_tasks * plan.k_slices <= threads, at + ": more tasks than threads");
                expect(plan.block_columns % plan.strip == 0 && plan.block_columns > 0,
                       at + ": a block does not consist of whole strips");
                const int64_t least = M / plan.passes;
                const int64_t units = (least + plan.row_unit - 1) / plan.row_unit * plan.row_unit;
                const int64_t blocks = (least + plan.max_rows - 1) / plan.max_rows;
                expect(units / blocks >= 1 && least <= blocks * plan.max_rows, at + ": a row block is empty");
              }
            }
          }
        }
      }
    }
  }
}

void check_kernel(const MatrixKernel& kernel, const KernelShape& shape, const std::string& name,
                  std::initializer_list<Codes> all = {Codes::integer, Codes::e2m1, Codes::table}) {
  expect(kernel.strip == shape.strip && kernel.max_rows == shape.max_rows && kernel.row_unit == shape.row_unit,
         name + ": the planner's shape is not the kernel's");
  for (const Codes codes : all) {
    const auto& steps = kernel.step[static_cast<size_t>(codes)];
    for (int rows = kernel.min_rows; rows <= kernel.max_rows; ++rows) {
      expect(steps[static_cast<size_t>(rows)] != nullptr, name + ": no kernel for " + std::to_string(rows) + " rows");
    }
  }
  // Row blocks have nearly equal size, so the smallest has at least half the rows of the largest.
  expect(kernel.min_rows == 1 || kernel.min_rows <= (kernel.max_rows + 1) / 2,
         name + ": a row block can be smaller than min_rows");
}

void test_shapes() {
  static constexpr std::initializer_list<Codes> kSplit = {Codes::integer, Codes::e2m1};
  static constexpr std::initializer_list<Codes> kInt8 = {Codes::integer, Codes::e2m1, Codes::byte, Codes::planes};
  static constexpr std::initializer_list<Codes> kEvery = {Codes::integer, Codes::e2m1, Codes::table,
                                                          Codes::byte,    Codes::e4m3, Codes::planes};
  for (const Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::neon}) {
    const KernelSet* kernels = kernels_of(isa);
    if (kernels == nullptr) continue;
    std::printf("%s: shapes\n", isa_name(isa));
    check_kernel(kernels->small_m, kernel_shape(isa, CpuKernel::small_m), std::string(isa_name(isa)) + " small_m",
                 kEvery);
    check_kernel(kernels->large_m, kernel_shape(isa, CpuKernel::large_m), std::string(isa_name(isa)) + " large_m",
                 kEvery);
    expect(kernels->large_m.min_rows <= kernels->small_m.max_rows + 1,
           std::string(isa_name(isa)) + ": no kernel for the rows between small_m and large_m");
  }
  const Isa dotting = neon_kernels() == nullptr ? Isa::avx512 : Isa::neon;
  if (const Bf16DotKernels* dot = bf16_dot_kernels()) {
    check_kernel(dot->fp32_row, kernel_shape(dotting, CpuKernel::bf16_dot_fp32_row), "bf16_dot_fp32_row");
    check_kernel(dot->small_m, kernel_shape(dotting, CpuKernel::bf16_dot_small_m), "bf16_dot_small_m");
    check_kernel(dot->large_m, kernel_shape(dotting, CpuKernel::bf16_dot), "bf16_dot");
    if (dotting == Isa::avx512)
      for (const auto& [kernel, of, name] : {std::tuple{dot->panel, CpuKernel::bf16_dot_panel, "bf16_dot_panel"},
                                             std::tuple{dot->rounded, CpuKernel::bf16_dot_rounded, "bf16_dot_rounded"}})
        check_kernel(kernel, kernel_shape(dotting, of), name);
  }
  if (const ByteSplitKernels* split = avx2_byte_split_kernels()) {
    check_kernel(split->small_m, kernel_shape(Isa::avx2, CpuKernel::byte_split_avx2), "byte_split_avx2", kSplit);
    check_kernel(split->int8_small_m, kernel_shape(Isa::avx2, CpuKernel::int8_avx2_small_m), "int8_avx2_small_m",
                 kInt8);
    check_kernel(split->int8, kernel_shape(Isa::avx2, CpuKernel::int8_avx2), "int8_avx2", kInt8);
  }
  if (const ByteSplitKernels* split = byte_split_kernels()) {
    check_kernel(split->small_m, kernel_shape(dotting, CpuKernel::byte_split_small_m), "byte_split_small_m", kSplit);
    check_kernel(split->large_m, kernel_shape(dotting, CpuKernel::byte_split), "byte_split", kSplit);
    const auto& codes = dotting == Isa::neon ? kSplit : kInt8;
    check_kernel(split->int8_small_m, kernel_shape(dotting, CpuKernel::int8_small_m), "int8_small_m", codes);
    check_kernel(split->int8, kernel_shape(dotting, CpuKernel::int8), "int8", codes);
  }
  if (const MatrixKernel* kernel = byte_matrix_kernel()) {
    check_kernel(*kernel, kernel_shape(Isa::neon, CpuKernel::byte_matrix), "byte_matrix", kSplit);
  }
  for (int parts = 1; parts <= 3; ++parts) {
    if (const AmxKernels* tiles = amx_kernels(parts)) {
      check_kernel(tiles->exact, kernel_shape(Isa::amx, CpuKernel::amx), "amx", kEvery);
      check_kernel(tiles->scaled, kernel_shape(Isa::amx, CpuKernel::amx_scaled), "amx_scaled",
                   {Codes::integer, Codes::e2m1, Codes::table, Codes::e4m3});
      check_kernel(tiles->table, kernel_shape(Isa::amx, CpuKernel::amx_table), "amx_table");
      if (parts == 1)
        check_kernel(tiles->rounded, kernel_shape(Isa::amx, CpuKernel::amx_rounded), "amx_rounded", kEvery);
    }
  }
}

}  // namespace
}  // namespace marlin::cpu

int main(int argc, char** argv) {
  using namespace marlin;
  return test::run_cases({{"choices", cpu::test_choices},
                          {"chunks", cpu::test_chunks},
                          {"fallbacks", cpu::test_fallbacks},
                          {"invariants", cpu::test_invariants},
                          {"shapes", cpu::test_shapes}},
                         argc, argv);
}
