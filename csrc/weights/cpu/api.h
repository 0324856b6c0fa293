// A packed weight on the CPU, and the operators that decode it, look up its rows or repack it. They take plain pointers
// and do not use torch; ops_cpu.cpp has the operators on tensors.
#pragma once

#include <cstdint>

#include "csrc/core/weight_format.h"
#include "csrc/cpu/machine.h"

namespace marlin::cpu {

// A packed weight and its scales [G, N]. All arrays are contiguous. G is ceil(K / group_size), so the last group may be
// short.
struct PackedWeight {
  WeightFormat format;
  int64_t K;
  int64_t N;
  int64_t group_size;       // a multiple of 8, at most K; if it is K, there is one group
  const uint32_t* words;    // [K/8, N] of 4-bit codes, [K/4, N] of 8-bit codes
  const uint32_t* high;     // [ceil(K / k_per_high_word), N], or nullptr for formats of one plane
  const void* scales;       // [G, N], or [G, N / kScaleBlock] with block_scales
  ElementType scales_type;  // uint8 for coded scales, uint8 or int8 for scales of two levels
  const void* zeros;        // [G, N] or nullptr
  ElementType zeros_type;
  const void* super_scales;  // [ceil(K / kSuperBlock), N], or nullptr without two levels
  const void* super_zeros;   // the same shape for zeros, or nullptr
  ElementType super_type;
  const float* global_scale;    // nullptr, or fp32 at [n * global_scale_stride]
  int64_t global_scale_stride;  // 0 for one value, 1 for a value per column
  const float* lut;             // fp32 [16] or nullptr
  bool block_scales = false;    // true if each scale is for a block of kScaleBlock x kScaleBlock weights
};

struct DequantizeArguments {
  PackedWeight weight;
  const int32_t* perm;  // nullptr, or [K]: out[perm[j], :] is packed row j
  void* out;            // [K, N] contiguous
  ElementType out_type;
};

struct EmbeddingArguments {
  PackedWeight weight;
  const int32_t* perm;  // nullptr, or [K]: out[row, perm[j]] is packed row j
  const int64_t* ids;   // [count], each in [0, N)
  int64_t count;
  void* out;  // [count, K] contiguous
  ElementType out_type;
};

void dequantize(const DequantizeArguments& arguments, const Parallel& parallel);
void embedding(const EmbeddingArguments& arguments, const Parallel& parallel);

// Permutes packed words with codes of 4 or 8 bits: row j of the result is row perm[j] of qweight. If perm is nullptr,
// the result is a copy.
void gptq_repack(const uint32_t* qweight, const int32_t* perm, int64_t K, int64_t N, int64_t code_bits, uint32_t* out,
                 const Parallel& parallel);
void awq_repack(const uint32_t* qweight, int64_t K, int64_t N, uint32_t* out, const Parallel& parallel);
// Transposes [rows, columns] to [columns, rows].
void transpose_words(const uint32_t* words, int64_t rows, int64_t columns, uint32_t* out, const Parallel& parallel);

void gptq_unpack_zeros(const uint32_t* qzeros, int64_t G, int64_t N, StoredZeros stored, uint8_t* out,
                       const Parallel& parallel);
void awq_unpack_zeros(const uint32_t* qzeros, int64_t G, int64_t N, uint8_t* out, const Parallel& parallel);

// These variants run on the instruction set `isa`, which this CPU must support. Tests and benchmarks use them to run
// every instruction set.
void dequantize_on(Isa isa, const DequantizeArguments& arguments, const Parallel& parallel);
void gptq_repack_on(Isa isa, const uint32_t* qweight, const int32_t* perm, int64_t K, int64_t N, int64_t code_bits,
                    uint32_t* out, const Parallel& parallel);

}  // namespace marlin::cpu
