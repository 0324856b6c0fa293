// The slots and parameters of the kernels in decoder/: RMS norm, rotary embedding, gated activation and cache writes.
// For shaders and host, in the C subset of kernels/shared/types.h. csrc/decoder/gpu_plan.cpp defines the grids.
#pragma once

#include "kernels/shared/slots.h"

namespace marlin {

enum LayerSlot {
  kSlotX = 0,           // rms_norm: [rows, columns], row stride in NormParams, unit stride in columns
  kSlotResidual = 1,    // rms_norm: the same shape, or absent
  kSlotNormWeight = 2,  // rms_norm: [columns]
  kSlotNorm = 3,        // rms_norm: [rows, columns]
  kSlotSum = 4,         // rms_norm: [rows, columns]; only with a residual
  kSlotRotaryQ = 0,     // rotary: [batches, heads, tokens, head_size], unit stride in head_size
  kSlotRotaryK = 1,
  kSlotCos = 2,  // rotary: [batches, tokens, table columns], unit stride in the last dimension
  kSlotSin = 3,
  kSlotRotatedQ = 4,  // rotary: the shape of q; RotaryFlag says whether heads or tokens come first in memory
  kSlotRotatedK = 5,
  kSlotGate = 0,  // gated_activation: [rows, columns], strides in ActivationParams
  kSlotUp = 1,
  kSlotActivated = 2,  // gated_activation: contiguous
  kSlotKeys = 0,       // write_cache: [batches, heads, length, k_size], contiguous
  kSlotValues = 1,     // write_cache: [batches, heads, length, v_size], contiguous
  kSlotNewKeys = 2,    // write_cache: [batches, heads, tokens, k_size], unit stride in k_size
  kSlotNewValues = 3,  // write_cache: [batches, heads, tokens, v_size], unit stride in v_size
  kSlotStart = 4,      // write_cache: int64 [1]
};

enum {
  kNormMaxThreads = 1024,
  kNormColumnsPerThread = 8,  // the least number of columns per thread, so that short rows use few simdgroups
  kNormBytes = kNormMaxThreads / kSimdWidth * 4,  // one sum per simdgroup
  kRotaryWidth = 32,
  kRotaryHeight = 4,
  kCacheWidth = 32,
  kCacheHeight = 4,
};

constexpr uint32_t norm_threads(uint32_t columns) {
  return columns >= kNormMaxThreads * kNormColumnsPerThread
             ? uint32_t(kNormMaxThreads)
             : round_up(ceil_divide(columns, kNormColumnsPerThread), kSimdWidth);
}

struct NormParams {
  int64_t x_stride;
  int64_t residual_stride;
  uint32_t columns;
  float eps;
  float weight_offset;  // added to each weight
  int32_t weight_type;  // ElementType
  uint32_t has_residual;
  uint32_t unused;
};
static_assert(sizeof(NormParams) == 40, "shared with the shaders");

enum RotaryFlag {
  kRotaryInterleaved = 1,  // a pair is elements 2 i and 2 i + 1; otherwise it is elements i and i + rotary_size / 2
  kRotaryPerPair = 2,      // cos and sin have one value per pair; otherwise one value per element
  kRotaryTransposed = 4,   // multiplies by the transposed matrix, for derivatives
  kRotaryTokenRowsQ = 8,   // in the rotated q, the heads of a token are adjacent; otherwise the tokens of a head are
                           // adjacent
  kRotaryTokenRowsK = 16,  // the same for the rotated k
};

// Strides of a tensor [batches, heads, tokens, columns].
struct HeadStrides {
  int64_t batch;
  int64_t head;
  int64_t token;
};

struct RotaryParams {
  HeadStrides q;
  HeadStrides k;
  HeadStrides cos;  // cos and sin are the same for all heads, so the stride `head` is 0
  HeadStrides sin;
  uint32_t q_heads;
  uint32_t k_heads;
  uint32_t tokens;
  uint32_t head_size;
  uint32_t rotary_size;  // number of elements at the start of each head that are rotated
  int32_t table_type;    // ElementType of cos and sin
  uint32_t flags;        // RotaryFlags
  uint32_t unused;
};
static_assert(sizeof(RotaryParams) == 128, "shared with the shaders");

enum class Activation : int32_t {
  silu = 0,
  gelu = 1,       // x Phi(x), with the error function
  gelu_tanh = 2,  // gelu, approximated with tanh
  // In clamped_silu and limited_silu, g = min(gate, limit) and u = min(max(up, -limit), limit).
  clamped_silu = 3,  // gpt-oss: g sigmoid(alpha g) (u + 1)
  limited_silu = 4,  // DeepSeek-V4: g sigmoid(g) u
};

struct ActivationParams {
  int64_t gate_row;
  int64_t up_row;
  int64_t gate_column;
  int64_t up_column;
  uint32_t rows;
  uint32_t columns;
  int32_t activation;
  float limit;
  float alpha;
  uint32_t unused;
};
static_assert(sizeof(ActivationParams) == 56, "shared with the shaders");

struct CacheParams {
  HeadStrides k;
  HeadStrides v;
  uint32_t heads;
  uint32_t tokens;
  uint32_t length;  // number of tokens for which the cache has space
  uint32_t k_size;
  uint32_t v_size;
  uint32_t unused;
};
static_assert(sizeof(CacheParams) == 72, "shared with the shaders");

}  // namespace marlin
