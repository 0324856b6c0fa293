// The list of all kernels. The shaders instantiate the kernels from it; the planner and the tests read it.
#pragma once

#include "kernels/gemm/geometry.h"
#ifndef __METAL_VERSION__
#include "kernels/decoder/params.h"
#include "kernels/experts/params.h"
#include "kernels/mlstm/params.h"
#endif

// The element types of activations and outputs, with their Metal types. The kernels for tensor units support only the
// first list.
#define MARLIN_FOR_EACH_TENSOR_ACTIVATION(X, ...) \
  X(float16, half, __VA_ARGS__)                   \
  X(bfloat16, bfloat, __VA_ARGS__)
#define MARLIN_FOR_EACH_ACTIVATION(X, ...)          \
  MARLIN_FOR_EACH_TENSOR_ACTIVATION(X, __VA_ARGS__) \
  X(float32, float, __VA_ARGS__)

// One list per library; a library is one .metal file. Each row is X(library, kernel, naming, slots).
//
// `naming` decides the kernel's host name, which host_name() below makes, for example gemv_uint4b8_float16:
//   kernel                                  if naming is plain or tensor_plain
//   kernel_<activation or output>           if naming is element
//   kernel_<format>_<activation or output>  if naming is format_element or tensor_operands; the tensor_operands
//                                           kernels have only the activations of tensor units, and no format with a
//                                           table
// The kernels whose naming starts with tensor_ need tensor units.
// `slots` are the BufferSlots that the kernel declares.
//
// The functions that plan a kernel define its launch: csrc/planner/variants.cpp for the products with one weight, and
// gpu_plan.cpp in csrc/weights, csrc/experts, csrc/decoder and csrc/mlstm for the kernels of these folders.
//
// All product kernels divide K in the same way. Threadgroups with the same grid z form a split; together they sum one
// part of K. A slice is a part of k_per_slice k whose products are summed in one place. In gemv and gemm_fused, a
// simdgroup sums a slice, and a split has several slices. In the staged kernels and gemm_tensor, a threadgroup sums a
// slice, so slice and split are the same. No slice is empty.
#define MARLIN_KERNELS_REPACK(X)                                                \
  X("weights/repack", gptq_repack, plain, kMaskRepack | MARLIN_SLOT(kSlotPerm)) \
  X("weights/repack", awq_repack, plain, kMaskRepack)                           \
  X("weights/repack", gptq_unpack_zeros, plain, kMaskRepack)                    \
  X("weights/repack", awq_unpack_zeros, plain, kMaskRepack)

#define MARLIN_KERNELS_DEQUANTIZE(X) \
  X("weights/dequantize", dequantize, format_element, kMaskWeight | MARLIN_SLOT(kSlotOut) | MARLIN_SLOT(kSlotParams))

#define MARLIN_KERNELS_EMBEDDING(X)                 \
  X("weights/embedding", embedding, format_element, \
    kMaskWeight | MARLIN_SLOT(kSlotA) | MARLIN_SLOT(kSlotOut) | MARLIN_SLOT(kSlotParams))

#define MARLIN_KERNELS_PROBE(X) \
  X("gemm/probe", probe_half_subnormals, plain, MARLIN_SLOT(kSlotPacked) | MARLIN_SLOT(kSlotOut))

#define MARLIN_KERNELS_GEMV(X) X("gemm/gemv", gemv, format_element, kMaskProduct)

#define MARLIN_KERNELS_GEMM_FUSED(X) X("gemm/fused", gemm_fused, format_element, kMaskProduct)

// MARLIN_TILES calls X(M, N, K, ...) for each tile of the double-buffered and single-stage kernels.
// MARLIN_STRIPED_TILES calls X only for the tiles that gemm_striped also has.
#define MARLIN_STRIPED_TILES(X, ...) X(64, 64, 32, __VA_ARGS__) X(32, 128, 32, __VA_ARGS__)
#define MARLIN_TILES(X, ...)           \
  MARLIN_STRIPED_TILES(X, __VA_ARGS__) \
  X(128, 64, 16, __VA_ARGS__) X(128, 128, 16, __VA_ARGS__)

#define MARLIN_STAGED_ROWS(M, N, K, X)                                                       \
  X("gemm/tiles/staged", gemm_double_buffered_##M##x##N##x##K, format_element, kMaskProduct) \
  X("gemm/tiles/staged", gemm_single_stage_##M##x##N##x##K, format_element, kMaskProduct)
#define MARLIN_STRIPED_ROWS(M, N, K, X) \
  X("gemm/tiles/striped", gemm_striped_##M##x##N##x##K, format_element, kMaskProduct)

#define MARLIN_KERNELS_GEMM_STAGED(X) MARLIN_TILES(MARLIN_STAGED_ROWS, X)

#define MARLIN_KERNELS_GEMM_STRIPED(X) MARLIN_STRIPED_TILES(MARLIN_STRIPED_ROWS, X)

// The tiles M x N x K of gemm_tensor, as X(M, N, K).
#define MARLIN_TENSOR_TILES(X) X(32, 64, 32) X(32, 128, 32) X(64, 64, 32) X(64, 128, 32)

#define MARLIN_KERNELS_GEMM_TENSOR(X) X("gemm/tensor", gemm_tensor, tensor_operands, kMaskProduct)

#define MARLIN_KERNELS_TENSOR_PROBE(X) X("gemm/tensor_probe", probe_tensor_layout, tensor_plain, MARLIN_SLOT(kSlotOut))

#define MARLIN_KERNELS_REDUCE(X)                 \
  X("gemm/reduce", reduce, element, kMaskReduce) \
  X("gemm/reduce", reduce_striped, element, kMaskReduce)

#define MARLIN_KERNELS_MOE_SORT(X)       \
  X("experts/moe_sort", moe_sort, plain, \
    MARLIN_SLOT(kSlotExpertIds) | MARLIN_SLOT(kSlotBlocks) | MARLIN_SLOT(kSlotParams))

#define MARLIN_KERNELS_MOE_GEMV(X) \
  X("experts/moe_gemv", moe_gemv, format_element, kMaskProduct | MARLIN_SLOT(kSlotExpertIds))

#define MARLIN_KERNELS_MOE_GEMV_REDUCE(X)                       \
  X("experts/moe_gemv_reduce", moe_gemv_reduce, format_element, \
    kMaskProduct | MARLIN_SLOT(kSlotExpertIds) | MARLIN_SLOT(kSlotRowWeights))

#define MARLIN_KERNELS_MOE_GEMV_GATED(X) \
  X("experts/moe_gemv_gated", moe_gemv_gated, format_element, kMaskProduct | MARLIN_SLOT(kSlotExpertIds))

#define MARLIN_KERNELS_MOE_GEMV_BLOCKS(X) \
  X("experts/moe_gemv_blocks", moe_gemv_blocks, format_element, kMaskProduct | MARLIN_SLOT(kSlotBlocks))

#define MARLIN_KERNELS_MOE_FUSED(X) \
  X("experts/moe_fused", moe_fused, format_element, kMaskProduct | MARLIN_SLOT(kSlotBlocks))

#define MARLIN_KERNELS_MOE_TENSOR(X) \
  X("experts/moe_tensor", moe_tensor, tensor_operands, kMaskProduct | MARLIN_SLOT(kSlotBlocks))

#define MARLIN_KERNELS_MOE_REDUCE(X) \
  X("experts/moe_reduce", moe_reduce, element, kMaskReduce | MARLIN_SLOT(kSlotExpertIds) | MARLIN_SLOT(kSlotRowWeights))

#define MARLIN_KERNELS_NORM(X)                                                                                 \
  X("decoder/norm", rms_norm, element,                                                                         \
    MARLIN_SLOT(kSlotX) | MARLIN_SLOT(kSlotResidual) | MARLIN_SLOT(kSlotNormWeight) | MARLIN_SLOT(kSlotNorm) | \
        MARLIN_SLOT(kSlotSum) | MARLIN_SLOT(kSlotParams))

#define MARLIN_KERNELS_ROTARY(X)                                                                            \
  X("decoder/rotary", rotary, element,                                                                      \
    MARLIN_SLOT(kSlotRotaryQ) | MARLIN_SLOT(kSlotRotaryK) | MARLIN_SLOT(kSlotCos) | MARLIN_SLOT(kSlotSin) | \
        MARLIN_SLOT(kSlotRotatedQ) | MARLIN_SLOT(kSlotRotatedK) | MARLIN_SLOT(kSlotParams))

#define MARLIN_KERNELS_ACTIVATION(X)                 \
  X("decoder/activation", gated_activation, element, \
    MARLIN_SLOT(kSlotGate) | MARLIN_SLOT(kSlotUp) | MARLIN_SLOT(kSlotActivated) | MARLIN_SLOT(kSlotParams))

#define MARLIN_KERNELS_CACHE(X)                                                                                   \
  X("decoder/cache", write_cache, element,                                                                        \
    MARLIN_SLOT(kSlotKeys) | MARLIN_SLOT(kSlotValues) | MARLIN_SLOT(kSlotNewKeys) | MARLIN_SLOT(kSlotNewValues) | \
        MARLIN_SLOT(kSlotStart) | MARLIN_SLOT(kSlotParams))

#define MARLIN_KERNELS_MLSTM_GATES(X)                                                           \
  X("mlstm/gates", mlstm_gates, plain,                                                          \
    MARLIN_SLOT(kSlotI) | MARLIN_SLOT(kSlotF) | MARLIN_SLOT(kSlotM0) | MARLIN_SLOT(kSlotOutM) | \
        MARLIN_SLOT(kSlotStatesM) | MARLIN_SLOT(kSlotFinalM) | kMaskGates | MARLIN_SLOT(kSlotParams))

#define MARLIN_KERNELS_MLSTM_STATES(X)                                                                                \
  X("mlstm/states", mlstm_states, element,                                                                            \
    MARLIN_SLOT(kSlotK) | MARLIN_SLOT(kSlotV) | MARLIN_SLOT(kSlotC0) | MARLIN_SLOT(kSlotN0) |                         \
        MARLIN_SLOT(kSlotStatesC) | MARLIN_SLOT(kSlotStatesN) | MARLIN_SLOT(kSlotFinalC) | MARLIN_SLOT(kSlotFinalN) | \
        kMaskGates | MARLIN_SLOT(kSlotParams))

#define MARLIN_KERNELS_MLSTM_OUTPUT(X)                                                                               \
  X("mlstm/output", mlstm_output, element,                                                                           \
    MARLIN_SLOT(kSlotQ) | MARLIN_SLOT(kSlotK) | MARLIN_SLOT(kSlotV) | MARLIN_SLOT(kSlotH) | MARLIN_SLOT(kSlotOutN) | \
        MARLIN_SLOT(kSlotOutM) | MARLIN_SLOT(kSlotStatesC) | MARLIN_SLOT(kSlotStatesN) | MARLIN_SLOT(kSlotGates) |   \
        MARLIN_SLOT(kSlotParams))

#define MARLIN_KERNELS_MLSTM_STEP(X)                                                                              \
  X("mlstm/step", mlstm_step, element,                                                                            \
    MARLIN_SLOT(kSlotQ) | MARLIN_SLOT(kSlotK) | MARLIN_SLOT(kSlotV) | MARLIN_SLOT(kSlotI) | MARLIN_SLOT(kSlotF) | \
        MARLIN_SLOT(kSlotC0) | MARLIN_SLOT(kSlotN0) | MARLIN_SLOT(kSlotM0) | MARLIN_SLOT(kSlotH) |                \
        MARLIN_SLOT(kSlotFinalC) | MARLIN_SLOT(kSlotFinalN) | MARLIN_SLOT(kSlotFinalM) | MARLIN_SLOT(kSlotParams))

#define MARLIN_KERNELS(X)           \
  MARLIN_KERNELS_REPACK(X)          \
  MARLIN_KERNELS_DEQUANTIZE(X)      \
  MARLIN_KERNELS_EMBEDDING(X)       \
  MARLIN_KERNELS_PROBE(X)           \
  MARLIN_KERNELS_GEMV(X)            \
  MARLIN_KERNELS_GEMM_FUSED(X)      \
  MARLIN_KERNELS_GEMM_STAGED(X)     \
  MARLIN_KERNELS_GEMM_STRIPED(X)    \
  MARLIN_KERNELS_GEMM_TENSOR(X)     \
  MARLIN_KERNELS_TENSOR_PROBE(X)    \
  MARLIN_KERNELS_REDUCE(X)          \
  MARLIN_KERNELS_MOE_SORT(X)        \
  MARLIN_KERNELS_MOE_GEMV(X)        \
  MARLIN_KERNELS_MOE_GEMV_REDUCE(X) \
  MARLIN_KERNELS_MOE_GEMV_GATED(X)  \
  MARLIN_KERNELS_MOE_GEMV_BLOCKS(X) \
  MARLIN_KERNELS_MOE_FUSED(X)       \
  MARLIN_KERNELS_MOE_TENSOR(X)      \
  MARLIN_KERNELS_MOE_REDUCE(X)      \
  MARLIN_KERNELS_NORM(X)            \
  MARLIN_KERNELS_ROTARY(X)          \
  MARLIN_KERNELS_ACTIVATION(X)      \
  MARLIN_KERNELS_CACHE(X)           \
  MARLIN_KERNELS_MLSTM_GATES(X)     \
  MARLIN_KERNELS_MLSTM_STATES(X)    \
  MARLIN_KERNELS_MLSTM_OUTPUT(X)    \
  MARLIN_KERNELS_MLSTM_STEP(X)

// The ways to compute a product on a GPU, as X(name), in the order in which the planner compares them. Of two ways with
// equal cost, the planner chooses the earlier one. csrc/planner/variants.cpp defines <name>_variant for each name.
#define MARLIN_GEMM_VARIANTS(X) X(gemv) X(fused) X(double_buffered) X(single_stage) X(striped) X(tensor) X(two_pass)

#ifdef __METAL_VERSION__

#define MARLIN_INSTANTIATE_AS(name, ...) template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
#define MARLIN_INSTANTIATE_ELEMENT(element, type, kernel) MARLIN_INSTANTIATE_AS(#kernel "_" #element, kernel<type>)
#define MARLIN_INSTANTIATE_FORMAT_ELEMENT(element, type, format, kernel) \
  MARLIN_INSTANTIATE_AS(#kernel "_" #format "_" #element, kernel<WeightFormat::format, type>)
#define MARLIN_INSTANTIATE_FORMAT(format, codes, bits, offset, scales, zeros, group, formula, kernel) \
  MARLIN_FOR_EACH_ACTIVATION(MARLIN_INSTANTIATE_FORMAT_ELEMENT, format, kernel)
#define MARLIN_INSTANTIATE_TENSOR_integer(format, kernel) \
  MARLIN_FOR_EACH_TENSOR_ACTIVATION(MARLIN_INSTANTIATE_FORMAT_ELEMENT, format, kernel)
#define MARLIN_INSTANTIATE_TENSOR_e2m1(format, kernel) MARLIN_INSTANTIATE_TENSOR_integer(format, kernel)
#define MARLIN_INSTANTIATE_TENSOR_e4m3(format, kernel) MARLIN_INSTANTIATE_TENSOR_integer(format, kernel)
#define MARLIN_INSTANTIATE_TENSOR_table(format, kernel)
#define MARLIN_INSTANTIATE_TENSOR_FORMAT(format, codes, bits, offset, scales, zeros, group, formula, kernel) \
  MARLIN_INSTANTIATE_TENSOR_##codes(format, kernel)

#define MARLIN_INSTANTIATE_plain(kernel)
#define MARLIN_INSTANTIATE_tensor_plain(kernel)
#define MARLIN_INSTANTIATE_element(kernel) MARLIN_FOR_EACH_ACTIVATION(MARLIN_INSTANTIATE_ELEMENT, kernel)
#define MARLIN_INSTANTIATE_format_element(kernel) MARLIN_WEIGHT_FORMATS(MARLIN_INSTANTIATE_FORMAT, kernel)
#define MARLIN_INSTANTIATE_tensor_operands(kernel) MARLIN_WEIGHT_FORMATS(MARLIN_INSTANTIATE_TENSOR_FORMAT, kernel)
// Instantiates the kernel of one row of a library's list. A kernel with plain naming is not a template, so its row
// expands to nothing.
#define MARLIN_INSTANTIATE(library, kernel, naming, slots) MARLIN_INSTANTIATE_##naming(kernel)

// MARLIN_FUNCTIONS instantiates the functions of a file. To compile all of them takes 14 times as long as to compile
// one, and a product needs one or two. So the host compiles one function at a time: it defines MARLIN_ONLY as a
// template instance, for example gemv<WeightFormat::uint4b8, half>, and MARLIN_ONLY_NAME as the instance's host name.
#ifdef MARLIN_ONLY
#define MARLIN_FUNCTIONS(...) MARLIN_INSTANTIATE_AS(MARLIN_ONLY_NAME, MARLIN_ONLY)
#else
#define MARLIN_FUNCTIONS(...) __VA_ARGS__
#endif

#else

#include <array>
#include <compare>
#include <string>
#include <string_view>

namespace marlin {

enum class KernelNaming { plain, tensor_plain, element, format_element, tensor_operands };

constexpr bool is_plain(KernelNaming naming) {
  return naming == KernelNaming::plain || naming == KernelNaming::tensor_plain;
}

constexpr bool names_format(KernelNaming naming) {
  return naming == KernelNaming::format_element || naming == KernelNaming::tensor_operands;
}

#define MARLIN_SLOT(slot) (1U << (slot))
inline constexpr uint32_t kMaskRepack = MARLIN_SLOT(kSlotPacked) | MARLIN_SLOT(kSlotOut) | MARLIN_SLOT(kSlotParams);
inline constexpr uint32_t kMaskWeight = MARLIN_SLOT(kSlotPacked) | MARLIN_SLOT(kSlotScales) | MARLIN_SLOT(kSlotZeros) |
                                        MARLIN_SLOT(kSlotGlobalScale) | MARLIN_SLOT(kSlotLut) | MARLIN_SLOT(kSlotPerm) |
                                        MARLIN_SLOT(kSlotSuperScales) | MARLIN_SLOT(kSlotSuperZeros) |
                                        MARLIN_SLOT(kSlotHigh);
inline constexpr uint32_t kMaskReduce =
    MARLIN_SLOT(kSlotBias) | MARLIN_SLOT(kSlotOut) | MARLIN_SLOT(kSlotPartials) | MARLIN_SLOT(kSlotParams);
inline constexpr uint32_t kMaskProduct =
    ((2U << kSlotParams) - 1) | MARLIN_SLOT(kSlotSuperScales) | MARLIN_SLOT(kSlotSuperZeros) | MARLIN_SLOT(kSlotHigh);
inline constexpr uint32_t kMaskGates = MARLIN_SLOT(kSlotGates) | MARLIN_SLOT(kSlotChunks);

struct KernelInfo {
  std::string_view library;  // kernels/<library>.metal
  std::string_view name;
  KernelNaming naming;
  uint32_t slots;  // bit i is set if the kernel declares BufferSlot i
};

#define MARLIN_KERNEL_ROW(library, kernel, naming, slots) KernelInfo{library, #kernel, KernelNaming::naming, slots},
inline constexpr std::array kKernels{MARLIN_KERNELS(MARLIN_KERNEL_ROW)};
#undef MARLIN_KERNEL_ROW

enum class Kernel : int32_t {
#define MARLIN_KERNEL_ENUMERATOR(library, kernel, naming, slots) kernel,
  MARLIN_KERNELS(MARLIN_KERNEL_ENUMERATOR)
#undef MARLIN_KERNEL_ENUMERATOR
};

constexpr const KernelInfo& info(Kernel kernel) {
  return kKernels[static_cast<size_t>(kernel)];
}

constexpr bool declares(Kernel kernel, uint32_t slot) {
  return (info(kernel).slots >> slot & 1) != 0;
}

// Returns true if the kernel needs Metal language version 4.0 and a GPU with tensor units.
constexpr bool needs_tensor_units(Kernel kernel) {
  const KernelNaming naming = info(kernel).naming;
  return naming == KernelNaming::tensor_operands || naming == KernelNaming::tensor_plain;
}

// Returns true if the kernels for tensor units have an instance for this format and these activations.
constexpr bool has_tensor_kernel(WeightFormat format, ElementType activations) {
#define MARLIN_IS_ACTIVATION(name, ...) || activations == ElementType::name
  return !has_lut(format) && (false MARLIN_FOR_EACH_TENSOR_ACTIVATION(MARLIN_IS_ACTIVATION, ));
#undef MARLIN_IS_ACTIVATION
}

constexpr bool operator==(const TileShape& a, const TileShape& b) {
  return a.M == b.M && a.N == b.N && a.K == b.K;
}

constexpr std::string_view name(ElementType type) {
  constexpr std::array<std::string_view, 5> names{"float16", "bfloat16", "float32", "uint8", "int8"};
  return names[static_cast<size_t>(type)];
}

constexpr std::string_view metal_type(ElementType activations) {
#define MARLIN_METAL_TYPE(name, type, ...) \
  if (activations == ElementType::name) return #type;
  MARLIN_FOR_EACH_ACTIVATION(MARLIN_METAL_TYPE, )
#undef MARLIN_METAL_TYPE
  return {};
}

// A function that the host can compile: a kernel and, if its naming includes them, the format and the element type.
struct KernelInstance {
  Kernel kernel{};
  WeightFormat format{};
  ElementType element{};

  auto operator<=>(const KernelInstance&) const = default;
};

// Returns the name under which the host finds a function. Fields that the name does not include are ignored.
inline std::string host_name(const KernelInstance& instance) {
  const KernelInfo& row = info(instance.kernel);
  std::string result(row.name);
  if (names_format(row.naming)) result.append("_").append(name(instance.format));
  if (!is_plain(row.naming)) result.append("_").append(name(instance.element));
  return result;
}

// Returns the template instance of a kernel, for example gemv<WeightFormat::uint4b8, half>, or an empty text if the
// kernel is not a template.
inline std::string template_instance(const KernelInstance& instance) {
  const KernelInfo& row = info(instance.kernel);
  if (is_plain(row.naming)) return {};
  std::string result(row.name);
  result.append("<");
  if (names_format(row.naming)) result.append("WeightFormat::").append(name(instance.format)).append(", ");
  return result.append(metal_type(instance.element)).append(">");
}

}  // namespace marlin

#endif
