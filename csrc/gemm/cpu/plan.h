// The CPU planner: chooses the kernel and the block sizes, and divides the work between threads. All functions are
// pure.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/core/weight_format.h"
#include "csrc/cpu/machine.h"

namespace marlin::cpu {

// The precision that the caller requests. With `highest`, every kernel is as exact as fp32. With `reduced`, a kernel
// may split fp32 activations into two bf16 terms or three bytes; 16-bit activations are not affected. With `int8`, a
// kernel may round activations of any type to 8 bits (byte_split.h) or to bf16.
enum class Precision : int32_t { highest, reduced, int8 };

// The least number of rows for rounded weights. With fewer rows, the decode costs as much as the faster product saves.
inline constexpr int64_t kRoundedMinRows = 128;

struct CpuProblem {
  int64_t M;
  int64_t N;
  int64_t K;
  WeightFormat format;
  int64_t group_size;
  ElementType a_type;
  // the number of bf16 terms that represent any code exactly: 1, or 3 for most tables; 0 if bf16 terms cannot represent
  // a code
  int code_parts;
  Precision precision;
  bool rounds = false;  // true if the weight may be rounded to bf16
};

#define MARLIN_CPU_KERNELS(X) \
  X(small_m)                  \
  X(large_m)                  \
  X(bf16_dot_fp32_row)        \
  X(bf16_dot_small_m)         \
  X(bf16_dot)                 \
  X(bf16_dot_panel)           \
  X(bf16_dot_rounded)         \
  X(byte_split_avx2)          \
  X(byte_split_small_m)       \
  X(byte_split)               \
  X(byte_matrix)              \
  X(int8_avx2_small_m)        \
  X(int8_avx2)                \
  X(int8_small_m)             \
  X(int8)                     \
  X(amx)                      \
  X(amx_scaled)               \
  X(amx_table)                \
  X(amx_rounded)
#define MARLIN_KERNEL_NAME(name) name,
enum class CpuKernel : int { MARLIN_CPU_KERNELS(MARLIN_KERNEL_NAME) };
#undef MARLIN_KERNEL_NAME

// The planner's copy of a kernel's shape. A test compares it with the kernel tables.
struct KernelShape {
  int strip;     // columns per kernel call
  int max_rows;  // rows per kernel call
  int row_unit;  // every row block starts at a multiple of this
};

struct CpuPlan {
  CpuKernel kernel;
  int parts;           // bf16 terms per activation; 1 if the kernel computes in fp32
  int64_t chunk;       // k per kernel call
  int64_t strip;       // columns per kernel call
  int64_t max_rows;    // largest number of rows per kernel call
  int64_t row_unit;    // every row block starts at a multiple of this
  int64_t passes;      // the rows are divided into this many passes of nearly equal size
  int64_t block_rows;  // the fp32 results of block_rows x block_columns stay in the cache
  int64_t block_columns;
  int64_t row_tasks;  // row_tasks * column_tasks * k_slices is at most the number of threads
  int64_t column_tasks;
  int64_t k_slices;  // if there are several slices, their fp32 partial sums are added in the order of k
};

KernelShape kernel_shape(Isa isa, CpuKernel kernel);
CpuPlan make_plan(const Machine& machine, const CpuProblem& problem);
// Returns true if this machine has kernels that multiply codes of this format with activations of 8 bits.
bool has_int8(const Machine& machine, WeightFormat format);
// Returns the plan to use after the kernel of `failed` found a value that it cannot represent. amx_scaled falls back to
// amx, and any other kernel falls back to fp32.
CpuPlan make_fallback_plan(const Machine& machine, const CpuProblem& problem, const CpuPlan& failed);
std::string to_string(const CpuPlan& plan);

}  // namespace marlin::cpu
