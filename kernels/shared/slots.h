// Buffer slots and function constants. For shaders and host, in the C subset of types.h.
#pragma once

#include "kernels/shared/types.h"

namespace marlin {

// All GEMM kernels use the same slot for the same buffer. kernel_list.h lists the slots that each kernel declares. The
// host binds every declared slot. If an optional tensor is absent, the host binds a buffer of its own (encoder.mm),
// which the kernel does not read.
enum BufferSlot {
  kSlotA = 0,            // [M, K], row stride in GemmParams, unit stride in k; in embedding, the ids
  kSlotPacked = 1,       // int32 [K/8, N], or [K/4, N] for 8 bits; in the repack and unpack kernels, their input
  kSlotScales = 2,       // [G, N], or [G, N / kScaleBlock] with block_scales
  kSlotZeros = 3,        // [G, N]
  kSlotGlobalScale = 4,  // float [1] or [N]
  kSlotLut = 5,          // float [16]
  kSlotPerm = 6,         // int32 [K]
  kSlotBias = 7,         // [N]
  kSlotOut = 8,
  kSlotPartials = 9,  // float [splits, M, N]; for gemm_striped [2 * stripes, tile M, tile N]
  kSlotParams = 10,
  kSlotExpertIds = 11,    // int32 or int64 [T, top_k]
  kSlotBlocks = 12,       // the table and the pairs that moe_sort writes
  kSlotRowWeights = 13,   // [T, top_k]
  kSlotSuperScales = 14,  // [ceil(K / kSuperBlock), N]
  kSlotSuperZeros = 15,   // [ceil(K / kSuperBlock), N]
  kSlotHigh = 16,         // int32 [ceil(K / k_per_high_word), N]
  // The mLSTM kernels have their own slot numbers below kSlotCount, in kernels/mlstm/params.h.
  kSlotCount = 20,
};

// Function constants: X(index, Metal type, name in shaders, name on the host). The host sets all of them for every
// pipeline; a kernel ignores those that it does not read. *_type is an ElementType.
//   vector_columns          N is a multiple of 4; the planes, scales and zero points start aligned to 4 elements
//   vector_activations      there is no perm; activations start aligned to 4 elements; their row stride is a multiple
//                           of 4
//   rows_per_threadgroup    activation rows per threadgroup: 1 to kGemvMaxRows in gemv, a multiple of 8 up to
//                           kFusedMaxRows in fused, and a multiple of kTensorRows in gemm_tensor
//   subnormal_codes         codes are read as subnormal halves; true if probe_half_subnormals stored 1 on this GPU
//   writes_partials         each split of K stores its sums in kSlotPartials, and the reduce kernel adds them
//   short_group_size        the group size if it is 16 or 32 and smaller than K (in fused), or if it is 16 (in
//                           gemm_tensor); otherwise 0
//   block_scales            one scale is for kScaleBlock x kScaleBlock weights; only if takes_block_scales(format)
//   ragged_k                K is not a multiple of kGemvK (in gemv), kFusedK (in fused) or kTensorK (in gemm_tensor)
//   ragged_n                N is not a multiple of kGemvColumns (in gemv), kFusedColumns (in fused) or kTensorColumns
//                           (in gemm_tensor)
#define MARLIN_FUNCTION_CONSTANTS(X)                        \
  X(0, bool, has_perm, HasPerm)                             \
  X(1, bool, has_bias, HasBias)                             \
  X(2, bool, has_global_scale, HasGlobalScale)              \
  X(3, bool, global_scale_per_column, GlobalScalePerColumn) \
  X(4, int, scales_type, ScalesType)                        \
  X(5, int, zeros_type, ZerosType)                          \
  X(6, int, bias_type, BiasType)                            \
  X(7, bool, vector_columns, VectorColumns)                 \
  X(8, bool, vector_activations, VectorActivations)         \
  X(9, int, rows_per_threadgroup, Rows)                     \
  X(10, bool, subnormal_codes, SubnormalCodes)              \
  X(11, bool, writes_partials, WritesPartials)              \
  X(12, int, short_group_size, ShortGroupSize)              \
  X(13, bool, ragged_k, RaggedK)                            \
  X(14, bool, ragged_n, RaggedN)                            \
  X(15, int, super_type, SuperType)                         \
  X(16, bool, block_scales, BlockScales)

enum FunctionConstant {
#define MARLIN_CONSTANT_INDEX(index, type, shader_name, name) kConstant##name = index,
  MARLIN_FUNCTION_CONSTANTS(MARLIN_CONSTANT_INDEX)
#undef MARLIN_CONSTANT_INDEX
      kFunctionConstantCount = 17,
};

}  // namespace marlin
