// The functions of an instruction-set family, as tables for the drivers in gemm.cpp, dequantize.cpp and repack.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "csrc/cpu/capability.h"
#include "csrc/cpu/gemm/formats.h"

namespace marlin::cpu {

// K is divided into chunks of kChunk, whose 16 packed rows are read along N together: enough sequential streams for one
// core. A segment is the part of a group inside a chunk: its products are summed first, then scaled once.
inline constexpr int kChunk = 128;

// One chunk times one strip of columns, for one block of rows. Strips are always whole, because the driver pads.
struct Step {
  const float* values;    // [16] numbers of the codes
  const uint32_t* words;  // [k/8, strip], row stride ld_words
  int64_t ld_words;
  // Words that are needed soon, with the same strides. They are prefetched into the second-level cache only: if N is a
  // power of two, the rows of a chunk share a few sets of the first.
  const uint32_t* ahead;
  const float* panel;  // [k, strip] decoded codes, if the kernel reads them instead of words
  // The next strip of the same chunk and the panel for it, which the step decodes between its products; or nullptr.
  const Step* next;
  float* next_panel;
  const void* x;      // packed activations of the row block
  const float* sums;  // [segments, rows] sums of activations, row stride ld_sums
  int64_t ld_sums;
  const float* scales;  // [segments, strip], row stride ld_scales
  const float* zeros;   // the same, or unused
  int64_t ld_scales;
  ZerosRole role;
  int rows;     // of the row block
  int k;        // a multiple of 8, at most kChunk
  int segment;  // a multiple of 8
  float* y;     // [rows, strip] fp32; the products are added to it
};
using StepFunction = void (*)(const Step&);

inline constexpr int kMaxBlockRows = 32;

// Row `row` of a block of `rows` rows: `count` activations of one chunk.
struct PackRow {
  const float* values;
  int count;
  int segment;
  int rows;
  int row;
  void* out;
};

// A matrix kernel: row blocks of min_rows..max_rows against strips of `strip` columns.
struct MatrixKernel {
  int strip;
  int min_rows;
  int max_rows;
  int row_unit;     // a block starts at a multiple of this
  int panel_bytes;  // size of Step::panel, which `unpack` fills; 0 if the steps read words
  int ahead_rows;   // steps of up to so many rows, with one segment, decode Step::next
  // The codes of the panel are multiplied by the scales of their groups. The steps are then given the global scale as
  // scales, and a whole chunk as one segment.
  bool scaled_panel;
  bool (*representable)(const float* scales, int64_t count);  // false if a scaled code may be inexact
  int row_bytes;                                              // packed activations: one row of one chunk
  bool (*pack)(const PackRow&);                               // false if the kernel cannot represent a value
  // Set and release state of the thread around all steps of a task; or nullptr. `rows` is the largest row block.
  void (*begin)(int segment, int rows);
  void (*end)();
  std::array<std::array<StepFunction, kMaxBlockRows + 1>, kCodeKindCount> step;
  std::array<void (*)(const Step&, float* panel), kCodeKindCount> unpack;
};

// Eight rows of a weight, up to kDequantizeColumns columns. All arrays have room for a multiple of 32 columns.
inline constexpr int kDequantizeColumns = 256;

struct DequantizeBlock {
  const float* values;    // [16]
  const uint32_t* words;  // [count]
  const float* scales;    // [count]; NaNs here, in values and in zeros are the canonical quiet NaN
  const float* zeros;     // [count] or unused
  ZerosRole role;
  int count;
  char* out;  // [8, kDequantizeColumns]
  ElementType out_type;
};

// A row of words: code j of each comes from row from[j], bits shift[j] to shift[j] + 3.
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
  void (*decode_scales)(const uint8_t* source, ScaleCoding coding, int64_t count, float* out);
  void (*from_float)(const float* source, ElementType type, int64_t count, void* out);
  std::array<void (*)(const DequantizeBlock&), kCodeKindCount> dequantize;
  void (*gather_codes)(const GatherCodes&);
  // Copies past the caches, for results that do not fit there: a plain store would first read the line that it
  // replaces. Other threads see the copy after a stream_fence().
  void (*stream)(void* to, const void* from, int64_t bytes);
};

struct Bf16DotKernels {
  MatrixKernel fp32_row;  // one row in three parts
  MatrixKernel small_m;   // one part
  MatrixKernel large_m;   // one part
};

// Activations as three bytes each, for integer and E2M1 codes.
struct ByteSplitKernels {
  MatrixKernel small_m;
  MatrixKernel large_m;
};

struct AmxKernels {
  MatrixKernel exact;   // codes that bf16 represents
  MatrixKernel scaled;  // the same, with their scales inside the panel
  MatrixKernel table;   // codes in three parts
};

// nullptr if this build has no code for the family.
const KernelSet* kernels_of(Isa isa);
const KernelSet* portable_kernels();
const KernelSet* avx2_kernels();
const KernelSet* avx512_kernels();
const KernelSet* neon_kernels();
const Bf16DotKernels* bf16_dot_kernels();
const ByteSplitKernels* byte_split_kernels();
const MatrixKernel* avx2_byte_split_kernel();
const AmxKernels* amx_kernels(int activation_parts);

}  // namespace marlin::cpu
