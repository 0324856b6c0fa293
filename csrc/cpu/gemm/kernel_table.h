// What an instruction-set family offers to the drivers in gemm.cpp and dequantize.cpp: a table of functions.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "capability.h"
#include "formats.h"
#include "mlstm_kernels.h"

namespace marlin::cpu {

// K is worked through in chunks of kChunk: 16 packed rows swept along N together, enough sequential streams for one
// core. A segment is the part of a group inside a chunk: its products are summed first and scaled once.
inline constexpr int kChunk = 128;

// One chunk times one strip of columns, for one block of rows. Strips are always whole: the driver pads.
struct Step {
  const float* values;    // [16] numbers of the codes
  const uint32_t* words;  // [k/8, strip], row stride ld_words
  int64_t ld_words;
  // The words that are needed soon, same strides. Prefetched into the second-level cache: where N is a power of two the
  // rows of a chunk share a few sets of the first.
  const uint32_t* ahead;
  const float* panel;  // [k, strip] decoded codes, where the kernel reads them instead of words
  // The following strip of the same chunk and the panel that the step decodes it into beside its products; or nullptr.
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
  float* y;     // [rows, strip] fp32, added to
};
using StepFunction = void (*)(const Step&);

inline constexpr int kMaxBlockRows = 32;

// Row `row` of a block of `rows`: `count` activations of one chunk.
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
  int panel_bytes;  // of Step::panel, which `unpack` fills and step reads in place of words; 0 where it reads words
  int ahead_rows;   // a step of up to so many rows in one segment heeds Step::next
  // The panel's codes are multiplied by the scales of their groups; step is given the global scale, and a chunk as one
  // segment.
  bool scaled_panel;
  bool (*representable)(const float* scales, int64_t count);  // of a scaled panel: false where a product may be inexact
  int row_bytes;                                              // of packed activations: one row of one chunk
  bool (*pack)(const PackRow&);                               // false where the kernel cannot represent a value
  // State of the thread, around all steps of a task; or nullptr. No row block of the task has more rows.
  void (*begin)(int segment, int rows);
  void (*end)();
  std::array<std::array<StepFunction, kMaxBlockRows + 1>, kCodesCount> step;
  std::array<void (*)(const Step&, float* panel), kCodesCount> unpack;
};

// Eight rows of a weight times up to kDequantizeColumns columns. All arrays have room for a
// multiple of 32.
inline constexpr int kDequantizeColumns = 256;

struct DequantizeBlock {
  const float* values;    // [16]
  const uint32_t* words;  // [count]
  const float* scales;    // [count]; a NaN here, in values or in zeros has no payload: it is what half a NaN rounds to
  const float* zeros;     // [count] or unused
  ZerosRole role;
  int count;
  char* out;  // [8, kDequantizeColumns]
  ElementType out_type;
};

// A row of words, code j of each from row from[j], bits shift[j] and up.
struct GatherCodes {
  std::array<const uint32_t*, 8> from;
  std::array<int, 8> shift;
  int64_t count;
  uint32_t* out;
};

struct KernelSet {
  MatrixKernel few_rows;
  MatrixKernel many_rows;
  void (*to_float)(const void* source, ElementType type, int64_t count, float* out);
  void (*decode_scales)(const uint8_t* source, ScaleCoding coding, int64_t count, float* out);
  void (*from_float)(const float* source, ElementType type, int64_t count, void* out);
  std::array<void (*)(const DequantizeBlock&), kCodesCount> dequantize;
  void (*gather_codes)(const GatherCodes&);
  // A copy past the caches, for results that are too large to stay there: a plain store first reads the line that it
  // replaces. Other threads see it after a stream_fence().
  void (*stream)(void* to, const void* from, int64_t bytes);
  MlstmKernels mlstm;
};

struct Bf16DotKernels {
  MatrixKernel one_fp32_row;  // three parts
  MatrixKernel few_rows;      // one part
  MatrixKernel many_rows;     // one part
};

// Activations as three planes of bytes, for integer and E2M1 codes.
struct PlanesKernels {
  MatrixKernel few_rows;
  MatrixKernel many_rows;
};

struct AmxKernels {
  MatrixKernel exact;   // codes that bf16 holds
  MatrixKernel scaled;  // the same, with their scales inside the panel
  MatrixKernel table;   // codes in three parts
};

// nullptr where this build has no code for the family.
const KernelSet* portable_kernels();
const KernelSet* avx2_kernels();
const KernelSet* avx512_kernels();
const KernelSet* neon_kernels();
const Bf16DotKernels* bf16_dot_kernels();
const PlanesKernels* planes_kernels();
const MatrixKernel* avx2_planes_kernel();
const AmxKernels* amx_kernels(int parts);  // of an activation
const KernelSet* kernels_of(Isa isa);

}  // namespace marlin::cpu
