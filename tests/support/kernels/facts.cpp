// Prints constants and tables of kernels/shared/kernel_list.h as JSON, so that tests do not repeat them.
#include <cstddef>
#include <cstdio>

#include "kernels/shared/kernel_list.h"

using namespace marlin;

#define NUMBER(name) std::printf("\"%s\": %lld, ", #name, static_cast<long long>(name));
#define FIELD(type, name) std::printf("\"%s\": %zu, ", #name, offsetof(type, name));

void tile(TileShape shape) {
  std::printf("[%u, %u, %u, %u, {", shape.M, shape.N, shape.K, tile_threads(shape));
  for (ElementType type : {ElementType::float16, ElementType::bfloat16, ElementType::float32}) {
    std::printf("\"%s\": [0, %u, %u], ", std::string(name(type)).c_str(), tile_threadgroup_bytes(shape, type, 1),
                tile_threadgroup_bytes(shape, type, 2));
  }
  std::printf("\"end\": []}], ");
}

int main() {
  std::printf("{\"numbers\": {");
  NUMBER(kSlotA)
  NUMBER(kSlotPacked)
  NUMBER(kSlotScales)
  NUMBER(kSlotZeros)
  NUMBER(kSlotGlobalScale)
  NUMBER(kSlotLut)
  NUMBER(kSlotPerm)
  NUMBER(kSlotBias)
  NUMBER(kSlotOut)
  NUMBER(kSlotPartials)
  NUMBER(kSlotParams)
  NUMBER(kSlotExpertIds)
  NUMBER(kSlotBlocks)
  NUMBER(kSlotRowWeights)
  NUMBER(kSlotSuperScales)
  NUMBER(kSlotSuperZeros)
  NUMBER(kSlotHigh)
  NUMBER(kSlotCount)
  // clang-format off
#define MLSTM_NUMBERS(X)                                                                                        \
  X(kSlotQ) X(kSlotK) X(kSlotV) X(kSlotI) X(kSlotF) X(kSlotC0) X(kSlotN0) X(kSlotM0) X(kSlotH) X(kSlotOutN)      \
  X(kSlotOutM) X(kSlotStatesC) X(kSlotStatesN) X(kSlotStatesM) X(kSlotFinalC) X(kSlotFinalN) X(kSlotFinalM)      \
  X(kSlotGates) X(kSlotChunks) X(kGateVectorCount) X(kChunkVectorCount) X(kMlstmInitialState) X(kMlstmGivenM)    \
  X(kMlstmForOutput) X(kMlstmBlock) X(kMlstmSimdColumns) X(kMlstmStateTile) X(kMlstmStateThreads)                \
  X(kMlstmMaxSimdgroups) X(kMlstmGateSimdgroups) X(kMlstmStepColumns) X(kMlstmStepMaxSimdgroups)
  // clang-format on
  MLSTM_NUMBERS(NUMBER)
  NUMBER(kElementwiseWidth)
  NUMBER(kElementwiseHeight)
  NUMBER(kGemvColumns)
  NUMBER(kGemvK)
  NUMBER(kGemvMaxRows)
  NUMBER(kGemvMaxSimdgroups)
  NUMBER(kFusedColumns)
  NUMBER(kFusedMaxRows)
  NUMBER(kFusedK)
  NUMBER(kTensorRows)
  NUMBER(kTensorColumns)
  NUMBER(kTensorK)
  NUMBER(kTensorMatches)
  NUMBER(kTensorElement)
  NUMBER(kTensorCapacity)
  NUMBER(kTensorProbed)
  NUMBER(kMoeSortThreads)
  NUMBER(kMoeBlockWords)
  NUMBER(kMoeReduceMaxSimdgroups)
  // clang-format off
#define DECODER_NUMBERS(X)                                                                                        \
  X(kSlotX) X(kSlotResidual) X(kSlotNormWeight) X(kSlotNorm) X(kSlotSum) X(kSlotRotaryQ) X(kSlotRotaryK)        \
  X(kSlotCos) X(kSlotSin) X(kSlotRotatedQ) X(kSlotRotatedK) X(kSlotGate) X(kSlotUp) X(kSlotActivated)           \
  X(kNormBytes) X(kRotaryWidth) X(kRotaryHeight) X(kRotaryInterleaved) X(kRotaryPerPair) X(kRotaryTransposed) \
  X(kRotaryTokenRowsQ) X(kRotaryTokenRowsK) X(kSlotKeys) X(kSlotValues) X(kSlotNewKeys) X(kSlotNewValues)       \
  X(kSlotStart) X(kCacheWidth) X(kCacheHeight)
  // clang-format on
  DECODER_NUMBERS(NUMBER)
  std::printf("\"end\": 0}, \"structs\": {\"GemmParams\": {");
  FIELD(GemmParams, a_row_stride)
  FIELD(GemmParams, M)
  FIELD(GemmParams, N)
  FIELD(GemmParams, K)
  FIELD(GemmParams, group_size)
  FIELD(GemmParams, k_per_slice)
  std::printf("\"end\": %zu}, \"DequantizeParams\": {", sizeof(GemmParams));
  FIELD(DequantizeParams, N)
  FIELD(DequantizeParams, K)
  FIELD(DequantizeParams, group_size)
  std::printf("\"end\": %zu}, \"EmbeddingParams\": {", sizeof(DequantizeParams));
  FIELD(EmbeddingParams, N)
  FIELD(EmbeddingParams, K)
  FIELD(EmbeddingParams, group_size)
  FIELD(EmbeddingParams, count)
  FIELD(EmbeddingParams, id_bytes)
  std::printf("\"end\": %zu}, \"ReduceParams\": {", sizeof(EmbeddingParams));
  FIELD(ReduceParams, M)
  FIELD(ReduceParams, N)
  FIELD(ReduceParams, splits)
  std::printf("\"end\": %zu}, \"StripedReduceParams\": {", sizeof(ReduceParams));
  FIELD(StripedReduceParams, M)
  FIELD(StripedReduceParams, N)
  FIELD(StripedReduceParams, tile_M)
  FIELD(StripedReduceParams, tile_N)
  FIELD(StripedReduceParams, slices)
  FIELD(StripedReduceParams, stripes)
  std::printf("\"end\": %zu}, \"RepackParams\": {", sizeof(StripedReduceParams));
  FIELD(RepackParams, rows)
  FIELD(RepackParams, columns)
  FIELD(RepackParams, stored_zeros)
  FIELD(RepackParams, code_bits)
  std::printf("\"end\": %zu}, \"MoeParams\": {", sizeof(RepackParams));
  FIELD(MoeParams, product)
  FIELD(MoeParams, a_slot_stride)
  FIELD(MoeParams, experts)
  FIELD(MoeParams, top_k)
  FIELD(MoeParams, id_bytes)
  FIELD(MoeParams, global_scale_expert_stride)
  FIELD(MoeParams, block_rows)
  FIELD(MoeParams, blocks)
  FIELD(MoeParams, row_weights_type)
  FIELD(MoeParams, gate)
  std::printf("\"end\": %zu}, \"MoeGate\": {", sizeof(MoeParams));
  FIELD(MoeGate, activation)
  FIELD(MoeGate, interleaved)
  FIELD(MoeGate, limit)
  FIELD(MoeGate, alpha)
  std::printf("\"end\": %zu}, \"MoeReduceParams\": {", sizeof(MoeGate));
  FIELD(MoeReduceParams, rows)
  FIELD(MoeReduceParams, N)
  FIELD(MoeReduceParams, terms)
  FIELD(MoeReduceParams, experts)
  FIELD(MoeReduceParams, id_bytes)
  FIELD(MoeReduceParams, row_weights_type)
  std::printf("\"end\": %zu}, \"NormParams\": {", sizeof(MoeReduceParams));
  // clang-format off
#define NORM_FIELDS(X, type)                                                                                       \
  X(type, x_stride) X(type, residual_stride) X(type, columns) X(type, eps) X(type, weight_offset)                  \
  X(type, weight_type) X(type, has_residual)
#define ROTARY_FIELDS(X, type)                                                                                     \
  X(type, q.batch) X(type, q.head) X(type, q.token) X(type, k.batch) X(type, k.head) X(type, k.token)              \
  X(type, cos.batch) X(type, cos.token) X(type, sin.batch) X(type, sin.token) X(type, q_heads) X(type, k_heads)    \
  X(type, tokens) X(type, head_size) X(type, rotary_size) X(type, table_type) X(type, flags)
#define ACTIVATION_FIELDS(X, type)                                                                                 \
  X(type, gate_row) X(type, up_row) X(type, gate_column) X(type, up_column) X(type, rows) X(type, columns)         \
  X(type, activation) X(type, limit) X(type, alpha)
#define CACHE_FIELDS(X, type)                                                                                      \
  X(type, k.batch) X(type, k.head) X(type, k.token) X(type, v.batch) X(type, v.head) X(type, v.token)              \
  X(type, heads) X(type, tokens) X(type, length) X(type, k_size) X(type, v_size)
  // clang-format on
  NORM_FIELDS(FIELD, NormParams)
  std::printf("\"end\": %zu}, \"RotaryParams\": {", sizeof(NormParams));
  ROTARY_FIELDS(FIELD, RotaryParams)
  std::printf("\"end\": %zu}, \"ActivationParams\": {", sizeof(RotaryParams));
  ACTIVATION_FIELDS(FIELD, ActivationParams)
  std::printf("\"end\": %zu}, \"CacheParams\": {", sizeof(ActivationParams));
  CACHE_FIELDS(FIELD, CacheParams)
  std::printf("\"end\": %zu}, \"MlstmParams\": {", sizeof(CacheParams));
  // clang-format off
#define MLSTM_FIELDS(X, type)                                                                                       \
  X(type, q.batch) X(type, q.head) X(type, q.token) X(type, k.batch) X(type, k.head) X(type, k.token)                \
  X(type, v.batch) X(type, v.head) X(type, v.token) X(type, i.batch) X(type, i.head) X(type, i.token)                \
  X(type, f.batch) X(type, f.head) X(type, f.token) X(type, heads) X(type, heads_per_batch) X(type, S) X(type, DK)   \
  X(type, DV) X(type, chunk_size) X(type, chunks) X(type, first_chunk) X(type, segment_chunks) X(type, save_every)   \
  X(type, state_slots) X(type, final_slots) X(type, gate_stride) X(type, gate_type) X(type, flags) X(type, scale)    \
  X(type, eps)
  // clang-format on
  MLSTM_FIELDS(FIELD, MlstmParams)
  std::printf("\"end\": %zu}}, \"constants\": [", sizeof(MlstmParams));
#define CONSTANT(index, type, shader_name, name) std::printf("\"%s\", ", #shader_name);
  MARLIN_FUNCTION_CONSTANTS(CONSTANT)
  std::printf("\"\"], \"norm_threads\": {");
  for (uint32_t columns : {1U, 33U, 777U, 8200U})
    std::printf("\"%u\": %u, ", columns, norm_threads(columns));
  std::printf("\"end\": 0}, \"element_types\": {");
  for (int type = 0; type < 5; ++type) {
    std::printf("\"%s\": %d, ", std::string(name(static_cast<ElementType>(type))).c_str(), type);
  }
  std::printf("\"end\": 0}, \"kernels\": {");
  for (const KernelInfo& kernel : kKernels) {
    std::printf("\"%s\": [\"%s\", %d, %u], ", std::string(kernel.name).c_str(), std::string(kernel.library).c_str(),
                is_plain(kernel.naming) ? 0 : 1 + names_format(kernel.naming), kernel.slots);
  }
  std::printf("\"\": []}, \"formats\": [");
  for (int format = 0; format < kWeightFormatCount; ++format) {
    std::printf("\"%s\", ", std::string(name(static_cast<WeightFormat>(format))).c_str());
  }
  std::printf("\"\"], \"traits\": {");
#define TRAITS(name, ...)                                                                                              \
  {                                                                                                                    \
    const FormatTraits t = traits(WeightFormat::name);                                                                 \
    std::printf("\"%s\": [%d, %u, %u, %d, %d, %u], ", #name, static_cast<int>(t.code_kind), t.code_bits,               \
                t.fixed_offset, static_cast<int>(t.scale_coding), static_cast<int>(t.zeros_role), t.fixed_group_size); \
  }
  MARLIN_WEIGHT_FORMATS(TRAITS, )
  std::printf("\"end\": []}, \"gemv_bytes\": {");
  for (int format = 0; format < kWeightFormatCount; ++format) {
    std::printf("\"%s\": [", std::string(name(static_cast<WeightFormat>(format))).c_str());
    for (uint32_t rows = 0; rows <= kGemvMaxRows; ++rows) {
      std::printf("[0");
      for (uint32_t simdgroups = 1; simdgroups <= kMoeReduceMaxSimdgroups; ++simdgroups) {
        std::printf(", %u", gemv_threadgroup_bytes(static_cast<WeightFormat>(format), rows, simdgroups));
      }
      std::printf("], ");
    }
    std::printf("[]], ");
  }
  std::printf("\"end\": []}, \"fused_bytes\": {");
  for (int format = 0; format < kWeightFormatCount; ++format) {
    std::printf("\"%s\": [", std::string(name(static_cast<WeightFormat>(format))).c_str());
    for (uint32_t simdgroups = 0; simdgroups <= kFusedMaxSimdgroups; ++simdgroups) {
      std::printf("[0");
      for (uint32_t rows = 8; rows <= kFusedMaxRows; rows += 8) {
        std::printf(", %u", fused_threadgroup_bytes(static_cast<WeightFormat>(format), rows, simdgroups));
      }
      std::printf("], ");
    }
    std::printf("[]], ");
  }
  std::printf("\"end\": []}, \"tiles\": [");
#define TILE(M, N, K, ...) tile({M, N, K});
  MARLIN_TILES(TILE)
  std::printf("[]], \"tensor_tiles\": {");
#define TENSOR_TILE(M, N, K) std::printf("\"%dx%dx%d\": %u, ", M, N, K, tensor_threads({M, N, K}));
  MARLIN_TENSOR_TILES(TENSOR_TILE)
  std::printf("\"end\": 0}, \"mlstm_output_bytes\": {");
  for (uint32_t size : {16U, 32U, 64U, 128U, 256U})
    std::printf("\"%u\": %u, ", size, mlstm_output_bytes(size));
  std::printf("\"end\": 0}, \"mlstm_step_bytes\": [0");
  for (uint32_t simdgroups = 1; simdgroups <= kMlstmStepMaxSimdgroups; ++simdgroups)
    std::printf(", %u", mlstm_step_bytes(simdgroups));
  std::printf("]}\n");
}
