#include "csrc/gemm/cpu/plan.h"

#include <algorithm>
#include <optional>

#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/gemm/cpu/blocks.h"

namespace marlin::cpu {

namespace {

constexpr int64_t kPassRows = 512;          // limits the packed activations to 8 MB of fp32 at K = 4096
constexpr int64_t kBlockBytes = 256 << 10;  // fp32 results of a block: a quarter of a 1 MB second-level cache
constexpr int64_t kBlockRows = 128;
// A rounded panel takes two to four times as many instructions as a decoded one, so more rows share it.
constexpr int64_t kRoundedBlockRows = 512;
// An AMX tile has 16 rows. If a product uses fewer than five of them, the byte_split kernels are as fast: at four rows
// they took 0.85 to 1.07 of the time of AMX (Intel Xeon, 2 MB of L2, two threads).
constexpr int64_t kAmxMinRows = 5;
// E4M3 has no byte_split kernel, so its limit is lower. Compared with dot products of bf16, AMX was 1.2 to 1.4 times as
// fast at four rows, and 1.0 to 1.2 times with groups of 32. At two rows it was 0.9 to 1.3 times as fast, and at one
// row slower (Intel Xeon, two and 16 threads).
constexpr int64_t kAmxMinRowsE4M3 = 4;
// With groups of 16, half of each tile product is empty, and sums are scaled twice as often as with groups of 32. An
// fp32 activation needs three tile products. So with fp32 activations and groups of 16, AMX is faster only from seven
// rows on.
constexpr int64_t kAmxMinRowsGroup16Float32 = 7;
// amx_scaled multiplies coded scales into the panel. This is faster if two tiles (more than 16 rows) share the panel.
// For groups of 32 it was 1.14 to 1.33 times as fast at 24 and 32 rows, and 0.85 to 1.25 times with fewer rows (Intel
// Xeon, two and 16 threads). For groups of 16 it is always faster.
constexpr int64_t kAmxScaledMinRows = 17;
// If the codes of a table need three bf16 terms each, they are decoded three times and need three to six tile products.
// AMX then ran at 0.65 to 0.84 times the speed of the fp32 kernels at eight rows, at 1.0 (fp32 activations) to 1.4
// times at 16 rows, and at 1.5 to 2.5 times at 64 rows (Intel Xeon, two threads).
constexpr int64_t kAmxTableMinRows = 16;
// bf16_dot_panel decodes codes once for all row blocks; other kernels decode them again for each block of twelve rows.
// On an EPYC with one thread and 512 rows, bf16_dot_panel was 1.3 times as fast for codes of 8 bits and 1.02 times for
// codes of 4 bits. The two took the same time at 24 rows for codes of 8 bits, and at 36 rows for codes of 4 bits.
constexpr int64_t kPanelMinRows = 49;
constexpr int64_t kBytePanelMinRows = 25;
constexpr int kInt8SmallMRows = 4;
// AMX multiplies activations that are rounded to bf16. It took 0.6 to 0.8 times as long as products of bytes for groups
// of 128 and 12 to 64 rows, and 1.0 to 1.6 times for groups of 32 (Intel Xeon, two threads).
constexpr int64_t kInt8AmxMinRows = 12;
constexpr int kByteSplitSmallMRows = 2;  // with more rows of four vectors, the compiler would spill accumulators
constexpr int64_t kSliceMinChunks = 4;   // a shorter slice of K saves less time than the addition of its partial sums
                                         // costs
// K is split before the columns if the partial sums need at most this much memory. Each thread then reads whole rows of
// words, which is faster than to share rows and pages with other threads. On two threads of an Intel Xeon, a split of K
// was 1.1 to 1.5 times as fast at N = 512 and up to 16 rows, and 1.1 times at one row and N = 11008. On 16 threads,
// partial sums of 128 KB cancelled the gain.
constexpr int64_t kMaxPartialBytes = 88 << 10;
// With one row of activations and at least this many columns, AMD's CPUs use half chunks. They read the eight rows of
// words of a half chunk faster than the 16 rows of a whole chunk, which are 16 KB or more apart. With weights outside
// the caches, half chunks were 1.04 to 1.24 times as fast; for fp32 activations they were 0.97 to 1.07 times as fast.
// Half chunks also scale sums twice as often. With fewer columns they were 0.85 to 1.00 times as fast, and with two
// rows of activations 0.95 times (EPYC, two threads). Intel's CPUs were not measured.
constexpr int64_t kHalfChunkMinColumns = 4096;

// Returns true for AMD's CPUs with AVX-512. On x86, capability.cpp sets fast_bf16_dot only for CPUs of AMD.
bool is_amd(const Machine& machine) {
  return machine.isa == Isa::avx512 && machine.fast_bf16_dot;
}

// Returns true if M rows are computed in blocks of four rows instead of eight. The registers hold four vectors of
// columns for a block of four rows, and only two for a block of eight. So each activation in a register is used twice
// as often. On an EPYC, bf16 and fp32 products of 8 and 16 rows were 1.00 to 1.10 times as fast in blocks of four.
// Products of five to seven and of twelve rows were 0.95 to 1.02 times as fast, so they use blocks of eight.
bool in_blocks_of_four(const Machine& machine, int64_t M) {
  return is_amd(machine) && (M == 8 || M == 16);
}

// With one row of activations and codes of 8 bits, kernels use half chunks, which have 16 rows of words. byte_split and
// int8 do so only with at most this many threads. On a Xeon, half chunks were 1.2 to 1.5 times as fast with AVX2, and
// 1.1 times with AVX-512 on two threads. With 16 threads, byte_split was 0.9 times as fast, because it scales three
// sums for each segment.
constexpr int kHalfChunkMaxThreads = 4;

int64_t chunk_of(const Machine& machine, const CpuProblem& problem, CpuKernel kernel) {
  if (problem.M != 1) return kChunk;
  const bool splits = kernel == CpuKernel::byte_split_small_m || kernel == CpuKernel::int8_small_m;
  const bool eight_rows = is_amd(machine) && splits && problem.N >= kHalfChunkMinColumns;
  const bool sixteen_rows =
      is_byte_wide(codes_of(problem.format)) && (!splits || machine.threads <= kHalfChunkMaxThreads);
  return eight_rows || sixteen_rows ? kChunk / 2 : kChunk;
}

}  // namespace

KernelShape kernel_shape(Isa isa, CpuKernel kernel) {
  if (kernel == CpuKernel::amx || kernel == CpuKernel::amx_scaled || kernel == CpuKernel::amx_table ||
      kernel == CpuKernel::amx_rounded)
    return {32, 32, 16};
  const bool neon = isa == Isa::neon;
  if (kernel == CpuKernel::bf16_dot_fp32_row) return {neon ? 16 : 64, 1, 1};
  if (kernel == CpuKernel::byte_split_avx2) return {32, 1, 1};
  if (kernel == CpuKernel::byte_split_small_m) return {neon ? 16 : 64, kByteSplitSmallMRows, 1};
  if (kernel == CpuKernel::byte_split) return {neon ? 8 : 32, 4, 1};
  if (kernel == CpuKernel::byte_matrix) return {8, 4, 1};
  if (kernel == CpuKernel::int8_avx2_small_m) return {32, 1, 1};
  if (kernel == CpuKernel::int8_avx2) return {16, 4, 1};
  if (kernel == CpuKernel::int8_small_m) return {neon ? 16 : 64, kInt8SmallMRows, 1};
  if (kernel == CpuKernel::int8) return {neon ? 8 : 32, 8, 1};
  if (kernel == CpuKernel::bf16_dot_small_m && neon) return {16, 1, 1};
  if (kernel == CpuKernel::bf16_dot && neon) return {8, 8, 2};
  const bool small_m = kernel == CpuKernel::small_m || kernel == CpuKernel::bf16_dot_small_m;
  switch (isa) {
    case Isa::avx512:
    case Isa::amx:
      return small_m ? KernelShape{64, 4, 1} : KernelShape{32, 12, 1};
    case Isa::avx2:
      return small_m ? KernelShape{32, 2, 1} : KernelShape{16, 6, 1};
    case Isa::neon:
      return small_m ? KernelShape{16, 4, 1} : KernelShape{16, 6, 1};
    default:
      return small_m ? KernelShape{8, 2, 1} : KernelShape{8, 4, 1};
  }
}

namespace {

struct Choice {
  CpuKernel kernel;
  int parts = 1;  // bf16 terms per activation
};

// Returns nullopt if the weight must not be rounded, or if rounding is not faster.
std::optional<Choice> choose_rounded(const Machine& machine, const CpuProblem& problem) {
  if (!problem.rounds || problem.a_type != ElementType::bfloat16) return std::nullopt;
  if (problem.code_parts == 0 || problem.M < kRoundedMinRows) return std::nullopt;
  if (machine.isa == Isa::amx) return Choice{CpuKernel::amx_rounded};
  if (is_amd(machine)) return Choice{CpuKernel::bf16_dot_rounded};
  return std::nullopt;
}

// Returns nullopt if the tiles cannot represent the codes, or if other kernels are as fast for this number of rows.
std::optional<Choice> choose_amx(const Machine& machine, const CpuProblem& problem) {
  if (machine.isa != Isa::amx || problem.code_parts == 0) return std::nullopt;
  const bool table = problem.code_parts > 1;
  const bool group_16 = problem.group_size < 32;
  const bool float32 = problem.a_type == ElementType::float32;
  const bool bf16_codes = problem.a_type == ElementType::bfloat16 && codes_of(problem.format) == Codes::e4m3;
  const int64_t min_rows = table                     ? kAmxTableMinRows
                           : group_16 && float32     ? kAmxMinRowsGroup16Float32
                           : bf16_codes && !group_16 ? kAmxMinRowsE4M3
                                                     : kAmxMinRows;
  if (problem.M < min_rows) return std::nullopt;
  const bool reduced = problem.precision == Precision::reduced;
  const int parts = problem.a_type == ElementType::bfloat16 ? 1 : float32 && !reduced ? 3 : 2;
  if (table) return Choice{CpuKernel::amx_table, parts};
  const bool scaled = has_coded_scales(problem.format) && (group_16 || problem.M >= kAmxScaledMinRows);
  return Choice{scaled ? CpuKernel::amx_scaled : CpuKernel::amx, parts};
}

Choice choose_kernel(const Machine& machine, const CpuProblem& problem);

// Chooses an int8 kernel, except in three cases where a more exact kernel is also faster. With one row on an EPYC,
// three bytes per activation took 0.75 to 0.85 of the time of one byte, and the default kernels for 8-bit codes 0.7 to
// 0.85. With one row of 8-bit codes on a Xeon with AVX2, exact products took 0.5 to 1.1 of the time of int8. In long
// groups, AMX multiplies bf16 faster than int8.
Choice choose_int8(const Machine& machine, const CpuProblem& problem) {
  if (!machine.byte_dot || machine.isa == Isa::avx2) {
    if (problem.M > 1) return {CpuKernel::int8_avx2};
    return {is_byte_wide(codes_of(problem.format)) ? CpuKernel::small_m : CpuKernel::int8_avx2_small_m};
  }
  if (problem.M == 1 && is_amd(machine)) {
    if (!is_byte_wide(codes_of(problem.format))) return {CpuKernel::byte_split_small_m};
    CpuProblem exact = problem;
    exact.precision = Precision::highest;
    return choose_kernel(machine, exact);
  }
  if (problem.M >= kInt8AmxMinRows && problem.group_size >= kChunk) {
    CpuProblem in_bf16 = problem;
    in_bf16.a_type = ElementType::bfloat16;
    if (const auto amx = choose_amx(machine, in_bf16)) return *amx;
  }
  return {problem.M <= kInt8SmallMRows ? CpuKernel::int8_small_m : CpuKernel::int8};
}

// A bf16 dot product does twice the work of an fp32 multiply-add, and a byte dot product does 4/3 of the work. The
// kernels with these instructions also decode faster than the fp32 kernels; byte_split decodes fastest. At M = 1 only
// the speed of the decode matters. fp32 activations need three bf16 dot products, so for them only the decode is
// faster.
Choice choose_kernel(const Machine& machine, const CpuProblem& problem) {
  if (problem.precision == Precision::int8) return choose_int8(machine, problem);
  if (const auto rounded = choose_rounded(machine, problem)) return *rounded;
  if (const auto amx = choose_amx(machine, problem)) return *amx;
  const bool small_m =
      problem.M <= kernel_shape(machine.isa, CpuKernel::small_m).max_rows || in_blocks_of_four(machine, problem.M);
  const Choice fp32{small_m ? CpuKernel::small_m : CpuKernel::large_m};
  const bool reduced = problem.precision == Precision::reduced;
  const bool half = problem.a_type != ElementType::float32;
  // byte_split keeps 23 bits relative to the largest activation of a group, so smaller fp32 activations lose bits. It
  // is used for fp32 only if the caller permits reduced precision.
  const Codes codes = codes_of(problem.format);
  const bool x86 = machine.isa == Isa::avx512 || machine.isa == Isa::amx;
  const bool planes = codes == Codes::planes;
  const bool splits = codes == Codes::integer || codes == Codes::e2m1 || (codes == Codes::byte && x86) ||
                      (planes && machine.isa != Isa::neon);
  const bool byte_split = (half || reduced) && splits;
  if (machine.isa == Isa::avx2 && byte_split && problem.M == 1) return {CpuKernel::byte_split_avx2};
  if (machine.isa != Isa::avx512 && machine.isa != Isa::amx && machine.isa != Isa::neon) return fp32;
  const bool fast_dot = machine.fast_bf16_dot && problem.code_parts == 1 && (x86 || (!is_byte_wide(codes) && !planes));
  // Intel's slow bf16 dot products are faster than fp32 here, too, because for few rows of E4M3 the decode takes most
  // of the time. A single row has a faster decoder of its own (e4m3_row.h).
  const bool dot = fast_dot || (machine.isa == Isa::amx && codes == Codes::e4m3 && problem.M > 1);
  if (dot && problem.a_type == ElementType::bfloat16 && (problem.M > 1 || is_byte_wide(codes))) {
    const int64_t panel_rows = is_byte_wide(codes) ? kBytePanelMinRows : kPanelMinRows;
    if (x86 && problem.M >= panel_rows) return {CpuKernel::bf16_dot_panel};
    const int dot_rows = kernel_shape(machine.isa, CpuKernel::bf16_dot_small_m).max_rows;
    const bool few = problem.M <= dot_rows || in_blocks_of_four(machine, problem.M);
    return {few ? CpuKernel::bf16_dot_small_m : CpuKernel::bf16_dot};
  }
  // At one row, a matrix instruction has no second row to multiply, so it needs as many instructions as dot products.
  if (byte_split && machine.byte_matrix && problem.M > 1) return {CpuKernel::byte_matrix};
  if (byte_split && machine.byte_dot) {
    return {problem.M <= kByteSplitSmallMRows ? CpuKernel::byte_split_small_m : CpuKernel::byte_split};
  }
  if (fast_dot && problem.a_type == ElementType::bfloat16) return {CpuKernel::bf16_dot_small_m};
  if (fast_dot && !half && problem.M == 1) return {CpuKernel::bf16_dot_fp32_row, 3};
  return fp32;
}

CpuPlan divide(const Machine& machine, const CpuProblem& problem, CpuKernel kernel, int parts) {
  CpuPlan plan{};
  plan.kernel = kernel;
  plan.parts = parts;
  const KernelShape shape = kernel_shape(machine.isa, plan.kernel);
  plan.chunk = chunk_of(machine, problem, kernel);
  plan.strip = shape.strip;
  plan.max_rows = shape.max_rows;
  plan.row_unit = shape.row_unit;
  plan.passes = std::max<int64_t>(ceil_divide(problem.M, kPassRows), 1);
  const int64_t pass_rows = std::max<int64_t>(ceil_divide(problem.M, plan.passes), 1);

  const int64_t threads = std::max(machine.threads, 1);
  const int64_t strips = ceil_divide(problem.N, plan.strip);
  const int64_t row_blocks = ceil_divide(pass_rows, plan.max_rows);
  const int64_t max_slices = std::max<int64_t>(ceil_divide(problem.K, kChunk) / kSliceMinChunks, 1);
  int64_t slices = 1;
  for (int64_t n = 2; n <= std::min(threads, max_slices); ++n) {
    const int64_t partial_bytes = int64_t{sizeof(float)} * n * pass_rows * problem.N;
    if (threads % n == 0 && partial_bytes <= kMaxPartialBytes) slices = n;
  }
  plan.column_tasks = std::min(strips, threads / slices);
  plan.row_tasks = std::clamp<int64_t>(threads / (plan.column_tasks * slices), 1, row_blocks);
  plan.k_slices = std::clamp<int64_t>(threads / (plan.column_tasks * plan.row_tasks), 1, max_slices);

  const bool rounds = kernel == CpuKernel::amx_rounded || kernel == CpuKernel::bf16_dot_rounded;
  plan.block_rows = std::min(ceil_divide(pass_rows, plan.row_tasks), rounds ? kRoundedBlockRows : kBlockRows);
  const int64_t block_strips = kBlockBytes / (int64_t{sizeof(float)} * plan.block_rows * plan.strip);
  plan.block_columns = plan.strip * std::clamp<int64_t>(block_strips, 1, ceil_divide(strips, plan.column_tasks));
  return plan;
}

}  // namespace

bool has_int8(const Machine& machine, WeightFormat format) {
  const Codes codes = codes_of(format);
  const bool x86 = machine.isa == Isa::avx2 || machine.isa == Isa::avx512 || machine.isa == Isa::amx;
  if (codes == Codes::integer || codes == Codes::e2m1) return x86 || (machine.isa == Isa::neon && machine.byte_dot);
  return x86 && (codes == Codes::byte || codes == Codes::planes);
}

CpuPlan make_plan(const Machine& machine, const CpuProblem& problem) {
  const Choice choice = choose_kernel(machine, problem);
  return divide(machine, problem, choice.kernel, choice.parts);
}

CpuPlan make_fallback_plan(const Machine& machine, const CpuProblem& problem, const CpuPlan& failed) {
  if (failed.kernel == CpuKernel::amx_scaled) return divide(machine, problem, CpuKernel::amx, failed.parts);
  const bool small_m = problem.M <= kernel_shape(machine.isa, CpuKernel::small_m).max_rows;
  return divide(machine, problem, small_m ? CpuKernel::small_m : CpuKernel::large_m, 1);
}

std::string to_string(const CpuPlan& plan) {
#define MARLIN_KERNEL_TEXT(name) #name,
  static constexpr const char* kNames[] = {MARLIN_CPU_KERNELS(MARLIN_KERNEL_TEXT)};
#undef MARLIN_KERNEL_TEXT
  auto number = [](const char* name, int64_t value) { return std::string(" ") + name + "=" + std::to_string(value); };
  return kNames[static_cast<int>(plan.kernel)] + number("parts", plan.parts) + number("strip", plan.strip) +
         number("max_rows", plan.max_rows) + number("chunk", plan.chunk) + number("passes", plan.passes) +
         number("block_rows", plan.block_rows) + number("block_columns", plan.block_columns) +
         number("row_tasks", plan.row_tasks) + number("column_tasks", plan.column_tasks) +
         number("k_slices", plan.k_slices);
}

}  // namespace marlin::cpu
