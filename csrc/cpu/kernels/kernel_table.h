// The functions of each instruction set, as tables for gemm.cpp, dequantize.cpp and repack.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "csrc/cpu/capability.h"
#include "csrc/cpu/formats.h"

namespace marlin::cpu {

// The location of the upper bits of codes in two planes. Kernels for other codes do not use it.
struct HighPlane {
  const uint32_t* words;  // row stride ld_words
  int64_t ld_words;
  uint32_t bits;  // number of upper bits of each code

  // Returns the row of words that contains `k`. `k` counts from the first field of `words`.
  const uint32_t* row(int k) const { return words + int64_t{static_cast<uint32_t>(k) * bits / 32} * ld_words; }
};

// K is divided into chunks of at most kChunk elements. A kernel reads all packed rows of a chunk at the same time, each
// along N, so one core reads several sequential streams. N is divided into strips. A strip is the set of columns that
// one kernel call computes. A segment is the part of one group that lies in a chunk. A kernel sums the products of a
// segment first and then scales the sum once.
inline constexpr int kChunk = 128;

// The arguments of one kernel call: the product of one block of rows with one strip of columns, over one chunk.
// gemm.cpp pads the columns, so every strip is complete.
struct Step {
  const float* values;    // the value of each code
  const uint32_t* words;  // [k/8, strip], or [k/4, strip] of 8-bit codes; row stride ld_words
  int64_t ld_words;
  HighPlane high;  // for codes in two planes; its first k is that of `words`
  // Words to prefetch, with the same stride as `words`. Most kernels prefetch them into the second-level cache only.
  // The first-level cache could evict them: if N is a power of two, all rows of a chunk share a few of its sets. For
  // the kernels of near_row, these words are needed sooner, and they are prefetched into the first-level cache.
  const uint32_t* ahead;
  const float* panel;  // [k, strip] decoded codes, if the kernel reads a panel instead of words
  // The next strip of the same chunk, or nullptr. This step decodes that strip into next_panel between its own
  // products.
  const Step* next;
  float* next_panel;
  const void* x;      // packed activations of the row block
  const float* sums;  // [segments, rows], the sums of the activations, row stride ld_sums
  int64_t ld_sums;
  const float* scales;  // [segments, strip], row stride ld_scales
  const float* zeros;   // [segments, strip], row stride ld_scales; unused if role is none
  int64_t ld_scales;
  ZerosRole role;
  int rows;     // rows in the row block
  int k;        // a multiple of 8, at most the plan's chunk
  int segment;  // a multiple of 8
  float* y;     // [rows, strip] fp32; the products are added to it
};
using StepFunction = void (*)(const Step&);

inline constexpr int kMaxBlockRows = 32;

// The arguments of MatrixKernel::pack: `count` activations of one chunk, for row `row` of a block of `rows` rows.
struct PackRow {
  float* values;  // a kernel that rounds activations to 8 bits replaces these by the rounded values
  int count;
  int segment;
  int rows;
  int row;
  void* out;
  bool byte_codes;  // true for codes of 8 bits, for which some kernels pack the k in another order
};

// A kernel that multiplies blocks of min_rows to max_rows rows with strips of `strip` columns.
struct MatrixKernel {
  int strip;
  int min_rows;
  int max_rows;
  int row_unit;     // every row block starts at a multiple of this
  int panel_bytes;  // size of Step::panel, which `unpack` fills; 0 if the steps read words
  int ahead_rows;   // a step with at most this many rows decodes Step::next
  // True if `unpack` multiplies the codes by the scales of their groups. Step::scales then holds the global scale, and
  // a whole chunk is one segment.
  bool scaled_panel;
  // True if `unpack` also applies the zeros and the global scale, and rounds the weight to bf16. The steps then get
  // scales of 1 and no zeros, and a whole chunk is one segment.
  bool rounded_panel;
  bool (*representable)(const float* scales, int64_t count);  // returns false if a code times a scale may be inexact
  std::array<bool, kCodesCount>
      near_row;                  // true for codes whose step for one row prefetches into the first-level cache
  int row_bytes;                 // bytes of the packed activations of one row in one chunk
  bool (*pack)(const PackRow&);  // returns false if the kernel cannot represent a value
  // If not nullptr, called before and after all steps of a task, to set and release per-thread state. `rows` is the
  // number of rows of the largest row block.
  void (*begin)(int segment, int rows);
  void (*end)();
  std::array<std::array<StepFunction, kMaxBlockRows + 1>, kCodesCount> step;
  std::array<void (*)(const Step&, float* panel), kCodesCount> unpack;
};

// Eight rows of a weight, in up to kDequantizeColumns columns. All arrays are padded to a multiple of 32 columns.
inline constexpr int kDequantizeColumns = 256;

struct DequantizeBlock {
  const float* values;    // the value of each code
  const uint32_t* words;  // [count], or [2, count] of 8-bit codes
  int64_t ld_words;
  HighPlane high;       // for codes in two planes
  int high_k;           // the first k of the block, counted from the first k of `high`
  const float* scales;  // [count]; in scales, zeros and values, every NaN is the canonical quiet NaN
  const float* zeros;   // [count]; unused if role is none
  ZerosRole role;
  int count;
  char* out;  // [8, kDequantizeColumns]
  ElementType out_type;
};

// Makes one row of words of 4-bit codes. Code j of each word is bits shift[j] to shift[j] + 3 of the same column in row
// from[j].
struct GatherCodes {
  std::array<const uint32_t*, 8> from;
  std::array<int, 8> shift;
  int64_t count;
  uint32_t* out;
};

struct KernelSet {
  MatrixKernel small_m;
  MatrixKernel large_m;
  void (*to_float)(const void* source, ElementType type, int64_t count, float* out);
  // Multiplies codes, which are uint8 or int8, by floating-point values.
  void (*scale_codes)(const void* codes, ElementType of_codes, const void* values, ElementType type, int64_t count,
                      float* out);
  void (*decode_scales)(const uint8_t* source, ScaleCoding coding, int64_t count, float* out);
  void (*from_float)(const float* source, ElementType type, int64_t count, void* out);
  std::array<void (*)(const DequantizeBlock&), kCodesCount> dequantize;
  void (*gather_codes)(const GatherCodes&);
  // Copies with stores that bypass the caches, for results that do not fit in the caches. An ordinary store would first
  // read the cache line that it overwrites. Other threads see the copy after a stream_fence().
  void (*stream)(void* to, const void* from, int64_t bytes);
};

struct Bf16DotKernels {
  MatrixKernel fp32_row;  // for one row of fp32; splits each activation into three bf16 terms
  MatrixKernel small_m;   // for bf16 activations
  MatrixKernel large_m;   // for bf16 activations
  MatrixKernel panel;     // for several row blocks of bf16, which share decoded codes; empty on Arm
  MatrixKernel rounded;   // like `panel`, but rounds the weights to bf16; empty on Arm
};

// Kernels that split each activation into three bytes (small_m, large_m) or round it to one byte (int8_small_m, int8),
// for integer and E2M1 codes of 4 bits. On x86 the kernels also support integers of 5, 6 and 8 bits.
struct ByteSplitKernels {
  MatrixKernel small_m;
  MatrixKernel large_m;  // empty for AVX2
  MatrixKernel int8_small_m;
  MatrixKernel int8;
};

struct AmxKernels {
  MatrixKernel exact;    // for codes that bf16 represents exactly
  MatrixKernel scaled;   // for the same codes; the panel holds codes times scales
  MatrixKernel table;    // for codes that need three bf16 terms
  MatrixKernel rounded;  // for weights that are rounded to bf16
};

// Each function returns nullptr if this build has no code for its instruction set.
const KernelSet* kernels_of(Isa isa);
const KernelSet* portable_kernels();
const KernelSet* avx2_kernels();
const KernelSet* avx512_kernels();
const KernelSet* neon_kernels();
const Bf16DotKernels* bf16_dot_kernels();
const ByteSplitKernels* byte_split_kernels();
const ByteSplitKernels* avx2_byte_split_kernels();
const MatrixKernel* byte_matrix_kernel();
const AmxKernels* amx_kernels(int activation_parts);

}  // namespace marlin::cpu
