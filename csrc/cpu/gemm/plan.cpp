#include "plan.h"

#include <algorithm>

#include "gemm_blocks.h"
#include "kernel_set.h"

namespace marlin::cpu {

namespace {

constexpr int64_t kPassRows = 512;          // bounds the packed activations: 8 MB of fp32 at K = 4096
constexpr int64_t kBlockBytes = 256 << 10;  // of fp32 results a task keeps: a quarter of a 1 MB second-level cache
constexpr int64_t kBlockRows = 128;
// Fewer rows leave a tile of 16 so empty that planes of bytes are as fast: at four rows they took 0.85 to 1.07 of the
// tiles' time (an Intel Xeon, 2 MB of L2, two threads).
constexpr int64_t kAmxRows = 5;
// Groups of 16 leave half of each tile product empty and scale twice as often, which three products for each fp32
// activation do not pay for before.
constexpr int64_t kAmxGroup16Float32Rows = 7;
// Coded scales of groups of 32 are multiplied into the panel from the second row tile on (1.14 to 1.33 times as fast at
// 24 and 32 rows, 0.85 to 1.25 below, the same machine, two and 16 threads); those of groups of 16 wherever tiles are
// used.
constexpr int64_t kAmxScaledRows = 17;
// Codes in three parts cost three decodings and three to six products: against fp32 multiply-adds 0.65 to 0.84 of the
// speed at eight rows, 1.0 (fp32) to 1.4 at 16, 1.5 to 2.5 at 64 (an Intel Xeon, two threads).
constexpr int64_t kAmxTableRows = 16;
constexpr int kPlanesFewRows = 2;    // as many as leave the accumulators of four vectors in registers
constexpr int64_t kSliceChunks = 4;  // a slice of K shorter than this costs more to add up than it saves
// Partial sums that slices of K may cost before columns are divided. Threads that read whole rows of words read faster
// than threads that share rows and pages: on two threads of an Intel Xeon 1.1 to 1.5 times as fast at N = 512 and up to
// 16 rows, 1.1 times at one row and N = 11008. On 16 threads slices of 128 KB in all lost what they had gained.
constexpr int64_t kPartialBytes = 88 << 10;

}  // namespace

KernelShape kernel_shape(Isa isa, Kernel kernel) {
  if (kernel == Kernel::amx || kernel == Kernel::amx_scaled || kernel == Kernel::amx_table) return {32, 32, 16};
  const bool neon = isa == Isa::neon;
  if (kernel == Kernel::bf16_dot_fp32_row) return {neon ? 16 : 64, 1, 1};
  if (kernel == Kernel::planes_avx2) return {32, 1, 1};
  if (kernel == Kernel::planes_few_rows) return {neon ? 16 : 64, kPlanesFewRows, 1};
  if (kernel == Kernel::planes) return {neon ? 8 : 32, 4, 1};
  if (kernel == Kernel::bf16_dot_few_rows && neon) return {16, 1, 1};
  if (kernel == Kernel::bf16_dot && neon) return {8, 8, 2};
  const bool few = kernel == Kernel::few_rows || kernel == Kernel::bf16_dot_few_rows;
  switch (isa) {
    case Isa::avx512:
    case Isa::amx:
      return few ? KernelShape{64, 4, 1} : KernelShape{32, 12, 1};
    case Isa::avx2:
      return few ? KernelShape{32, 2, 1} : KernelShape{16, 6, 1};
    case Isa::neon:
      return few ? KernelShape{16, 4, 1} : KernelShape{16, 6, 1};
    default:
      return few ? KernelShape{8, 2, 1} : KernelShape{8, 4, 1};
  }
}

namespace {

// Bf16 dot products do twice the work of an fp32 multiply-add, planes of bytes 4/3 of it, and both decode for less:
// planes for least, which decides at one row; fp32 activations in three parts gain by that only.
Kernel choose_kernel(const Machine& machine, const Problem& problem, int* parts) {
  const bool few = problem.M <= kernel_shape(machine.isa, Kernel::few_rows).max_rows;
  const Kernel fp32 = few ? Kernel::few_rows : Kernel::many_rows;
  *parts = 1;
  const bool reduced = problem.precision == Float32Precision::reduced;
  const bool table = problem.code_parts > 1;
  if (machine.isa == Isa::amx && problem.code_parts != 0) {
    const int needed = problem.a_type == ElementType::bfloat16             ? 1
                       : problem.a_type == ElementType::float16 || reduced ? 2
                                                                           : 3;
    const bool coded_scales = info(problem.format).scale_coding != ScaleCoding::floating;
    const bool group_16 = problem.group_size < 32;
    const int64_t least = table                                                ? kAmxTableRows
                          : group_16 && problem.a_type == ElementType::float32 ? kAmxGroup16Float32Rows
                                                                               : kAmxRows;
    if (problem.M >= least) {
      *parts = needed;
      if (table) return Kernel::amx_table;
      return coded_scales && (group_16 || problem.M >= kAmxScaledRows) ? Kernel::amx_scaled : Kernel::amx;
    }
  }
  const bool half = problem.a_type != ElementType::float32;
  // 23 bits relative to the largest of a group: less than fp32 activations have beside a larger neighbour.
  const bool planes = (half || reduced) && codes_of(problem.format) != Codes::table;
  if (machine.isa == Isa::avx2 && planes && problem.M == 1) return Kernel::planes_avx2;
  if (machine.isa != Isa::avx512 && machine.isa != Isa::amx && machine.isa != Isa::neon) return fp32;
  const bool fast_dot = machine.fast_bf16_dot && problem.code_parts == 1;
  if (fast_dot && problem.a_type == ElementType::bfloat16 && problem.M > 1) {
    const bool few_dots = problem.M <= kernel_shape(machine.isa, Kernel::bf16_dot_few_rows).max_rows;
    return few_dots ? Kernel::bf16_dot_few_rows : Kernel::bf16_dot;
  }
  if (planes && machine.byte_dot) {
    return problem.M <= kPlanesFewRows ? Kernel::planes_few_rows : Kernel::planes;
  }
  if (fast_dot && problem.a_type == ElementType::bfloat16) return Kernel::bf16_dot_few_rows;
  if (fast_dot && !half && problem.M == 1) {
    *parts = 3;
    return Kernel::bf16_dot_fp32_row;
  }
  return fp32;
}

Plan divide(const Machine& machine, const Problem& problem, Kernel kernel, int parts) {
  Plan plan{};
  plan.kernel = kernel;
  plan.parts = parts;
  const KernelShape shape = kernel_shape(machine.isa, plan.kernel);
  plan.strip = shape.strip;
  plan.max_rows = shape.max_rows;
  plan.row_unit = shape.row_unit;
  plan.passes = std::max<int64_t>(ceil_div(problem.M, kPassRows), 1);
  const int64_t pass_rows = std::max<int64_t>(ceil_div(problem.M, plan.passes), 1);

  const int64_t threads = std::max(machine.threads, 1);
  const int64_t strips = ceil_div(problem.N, plan.strip);
  const int64_t row_blocks = ceil_div(pass_rows, plan.max_rows);
  const int64_t most_slices = std::max<int64_t>(ceil_div(problem.K, kChunk) / kSliceChunks, 1);
  int64_t slices = 1;
  for (int64_t n = 2; n <= std::min(threads, most_slices); ++n) {
    const int64_t partial_bytes = int64_t{sizeof(float)} * n * pass_rows * problem.N;
    if (threads % n == 0 && partial_bytes <= kPartialBytes) slices = n;
  }
  plan.column_tasks = std::min(strips, threads / slices);
  plan.row_tasks = std::clamp<int64_t>(threads / (plan.column_tasks * slices), 1, row_blocks);
  plan.k_slices = std::clamp<int64_t>(threads / (plan.column_tasks * plan.row_tasks), 1, most_slices);

  plan.block_rows = std::min(ceil_div(pass_rows, plan.row_tasks), kBlockRows);
  const int64_t block_strips = kBlockBytes / (int64_t{sizeof(float)} * plan.block_rows * plan.strip);
  plan.block_columns = plan.strip * std::clamp<int64_t>(block_strips, 1, ceil_div(strips, plan.column_tasks));
  return plan;
}

}  // namespace

Plan make_plan(const Machine& machine, const Problem& problem) {
  int parts = 1;
  const Kernel kernel = choose_kernel(machine, problem, &parts);
  return divide(machine, problem, kernel, parts);
}

Plan make_fallback_plan(const Machine& machine, const Problem& problem, const Plan& failed) {
  if (failed.kernel == Kernel::amx_scaled) return divide(machine, problem, Kernel::amx, failed.parts);
  const bool few = problem.M <= kernel_shape(machine.isa, Kernel::few_rows).max_rows;
  return divide(machine, problem, few ? Kernel::few_rows : Kernel::many_rows, 1);
}

std::string to_string(const Plan& plan) {
  static constexpr const char* kNames[] = {"few_rows", "many_rows",   "bf16_dot_fp32_row", "bf16_dot_few_rows",
                                           "bf16_dot", "planes_avx2", "planes_few_rows",   "planes",
                                           "amx",      "amx_scaled",  "amx_table"};
  auto number = [](const char* name, int64_t value) { return std::string(" ") + name + "=" + std::to_string(value); };
  return kNames[static_cast<int>(plan.kernel)] + number("parts", plan.parts) + number("strip", plan.strip) +
         number("max_rows", plan.max_rows) + number("passes", plan.passes) + number("block_rows", plan.block_rows) +
         number("block_columns", plan.block_columns) + number("row_tasks", plan.row_tasks) +
         number("column_tasks", plan.column_tasks) + number("k_slices", plan.k_slices);
}

}  // namespace marlin::cpu
