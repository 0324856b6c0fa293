// Prints what the tests need of kernels/variants.h as JSON, so that nothing is written down twice.
#include <cstddef>
#include <cstdio>

#include "variants.h"

using namespace marlin;

#define NUMBER(name) std::printf("\"%s\": %lld, ", #name, static_cast<long long>(name));
#define FIELD(type, name) std::printf("\"%s\": %zu, ", #name, offsetof(type, name));

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
  NUMBER(kElementwiseWidth)
  NUMBER(kElementwiseHeight)
  NUMBER(kGemvColumns)
  NUMBER(kGemvMaxRows)
  NUMBER(kGemvMaxSimdgroups)
  NUMBER(kTileM)
  NUMBER(kTileN)
  NUMBER(kTileK)
  NUMBER(kTileThreads)
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
  std::printf("\"end\": %zu}, \"ReduceParams\": {", sizeof(DequantizeParams));
  FIELD(ReduceParams, M)
  FIELD(ReduceParams, N)
  FIELD(ReduceParams, slices)
  std::printf("\"end\": %zu}, \"RepackParams\": {", sizeof(ReduceParams));
  FIELD(RepackParams, rows)
  FIELD(RepackParams, columns)
  FIELD(RepackParams, stored_zeros)
  std::printf("\"end\": %zu}}, \"constants\": [", sizeof(RepackParams));
#define CONSTANT(index, type, shader_name, name) std::printf("\"%s\", ", #shader_name);
  MARLIN_FUNCTION_CONSTANTS(CONSTANT)
  std::printf("\"\"], \"element_types\": {");
  for (int type = 0; type < 4; ++type) {
    std::printf("\"%s\": %d, ", std::string(name(static_cast<ElementType>(type))).c_str(), type);
  }
  std::printf("\"end\": 0}, \"kernels\": {");
  for (const KernelInfo& kernel : kKernels) {
    std::printf("\"%s\": [\"%s\", %d, %u], ", std::string(kernel.name).c_str(), std::string(kernel.library).c_str(),
                static_cast<int>(kernel.naming), kernel.slots);
  }
  std::printf("\"\": []}, \"formats\": [");
  for (int format = 0; format < kWeightFormatCount; ++format) {
    std::printf("\"%s\", ", std::string(name(static_cast<WeightFormat>(format))).c_str());
  }
  std::printf("\"\"], \"gemv_bytes\": [");
  for (uint32_t rows = 0; rows <= kGemvMaxRows; ++rows) {
    std::printf("[0");
    for (uint32_t simdgroups = 1; simdgroups <= kGemvMaxSimdgroups; ++simdgroups) {
      std::printf(", %u", gemv_threadgroup_bytes(rows, simdgroups));
    }
    std::printf("], ");
  }
  std::printf("[]], \"tile_bytes\": {");
  for (ElementType type : {ElementType::float16, ElementType::bfloat16, ElementType::float32}) {
    std::printf("\"%s\": [0, %u, %u], ", std::string(name(type)).c_str(), tile_threadgroup_bytes(type, 1),
                tile_threadgroup_bytes(type, 2));
  }
  std::printf("\"end\": []}}\n");
}
