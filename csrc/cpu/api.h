// The CPU kernels' interface: plain pointers, no torch. The torch glue is in ops_cpu.cpp.
#pragma once

#include <cstdint>
#include <functional>

#include "csrc/core/weight_format.h"

namespace marlin::cpu {

// A packed weight [K/8, N] with its scales [G, N], all contiguous. G is ceil(K / group_size), so the last group may
// be short.
struct PackedWeight {
  WeightFormat format;
  int64_t K;
  int64_t N;
  int64_t group_size;       // a multiple of 8, at most K; if it is K, there is one group
  const uint32_t* words;    // [K/8, N]
  const void* scales;       // [G, N]
  ElementType scales_type;  // uint8 for coded scales
  const void* zeros;        // [G, N] or nullptr
  ElementType zeros_type;
  const float* global_scale;    // nullptr, or fp32 at [n * global_scale_stride]
  int64_t global_scale_stride;  // 0 for one value, 1 for a value per column
  const float* lut;             // fp32 [16] or nullptr
};

struct GemmArguments {
  PackedWeight weight;
  int64_t M;
  const void* a;         // [M, K], unit stride in k
  ElementType a_type;    // also the type of out
  int64_t a_row_stride;  // in elements; may be 0
  const int32_t* perm;   // nullptr, or [K]: packed row j multiplies a[m, perm[j]]
  const void* bias;      // nullptr or [N]
  ElementType bias_type;
  void* out;  // [M, N] contiguous

  // The next two describe rows that are not evenly spaced.
  const int64_t* a_starts = nullptr;  // [M]: row m of a starts at element a_starts[m]; a_row_stride is not used
  const int64_t* out_rows = nullptr;  // [M]: row m of the product is row out_rows[m] of out
  bool fp32_out = false;              // out is fp32, whatever a_type is
};

// A token is sent to top_k experts, one for each of its slots. A pair is a token and one of its slots. Pair t * top_k +
// s is slot s of token t: its row is multiplied by the weight of expert expert_ids[t, s].
struct MoeGemmArguments {
  PackedWeight weight;  // the weight of expert 0; each of its tensors is followed by those of experts 1, 2, ...
  int64_t experts;
  int64_t global_scale_expert_stride;  // 1 or N
  int64_t tokens;
  int64_t top_k;
  const int64_t* expert_ids;  // [tokens, top_k]; ids outside [0, experts) give rows of zeros
  const void* a;              // unit stride in k
  ElementType a_type;         // also the type of out
  int64_t a_token_stride;     // in elements
  int64_t a_slot_stride;      // 0 if the slots of a token share one row
  const int32_t* perm;        // nullptr or [experts, K]
  const void* bias;           // nullptr or [experts, N]
  ElementType bias_type;
  const void* row_weights;  // nullptr or [tokens, top_k]
  ElementType row_weights_type;
  bool reduce;  // adds the rows of a token in the order of its slots
  void* out;    // [tokens, top_k, N], or [tokens, N] with reduce
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

// Runs body(begin, end) over disjoint ranges that cover [0, count), possibly on several threads. The operators pass
// PyTorch's thread pool; C++ tests pass a plain loop.
using Body = std::function<void(int64_t begin, int64_t end)>;
struct Parallel {
  int num_threads;
  std::function<void(int64_t count, int64_t grain, const Body& body)> run;
};

// The precision that the caller wants for fp32 activations. With `highest` every kernel is as exact as fp32. `reduced`
// allows activations to be split into two bf16 terms or three bytes. 16-bit activations are not affected.
enum class Float32Precision : int32_t { highest, reduced };

void gemm(const GemmArguments& arguments, const Parallel& parallel, Float32Precision precision);
void moe_gemm(const MoeGemmArguments& arguments, const Parallel& parallel, Float32Precision precision);
void dequantize(const DequantizeArguments& arguments, const Parallel& parallel);
void embedding(const EmbeddingArguments& arguments, const Parallel& parallel);

// Row j of the result is row perm[j] of the source. If perm is nullptr, the result is a copy.
void gptq_repack(const uint32_t* qweight, const int32_t* perm, int64_t K, int64_t N, uint32_t* out,
                 const Parallel& parallel);
void awq_repack(const uint32_t* qweight, int64_t K, int64_t N, uint32_t* out, const Parallel& parallel);
// Transposes [rows, columns] to [columns, rows].
void transpose_words(const uint32_t* words, int64_t rows, int64_t columns, uint32_t* out, const Parallel& parallel);

void gptq_unpack_zeros(const uint32_t* qzeros, int64_t G, int64_t N, StoredZeros stored, uint8_t* out,
                       const Parallel& parallel);
void awq_unpack_zeros(const uint32_t* qzeros, int64_t G, int64_t N, uint8_t* out, const Parallel& parallel);

}  // namespace marlin::cpu
