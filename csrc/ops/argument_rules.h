// All shape and dtype rules of the GEMM operators, with their error messages. All backends and the fake kernels share
// them. Sizes are symbolic integers, so that tracing with a dynamic number of rows adds no guard.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <string>
#include <string_view>

#include "csrc/core/weight_format.h"
#include "csrc/ops/weight_arguments.h"

namespace marlin {

struct WeightShape {
  WeightFormat format;
  c10::SymInt K;
  c10::SymInt N;
  c10::SymInt E = 1;  // the number of experts, or 1 for a single weight
};

// The dtypes of activations, floating scales, biases and zero points, as error messages name them.
inline constexpr std::string_view kFloating = "float16, bfloat16 or float32";

// Returns dtype and shape, for example "float16 [4096, 512]".
std::string describe(const Tensor& tensor);

// Returns the name of a dtype, for example "float16".
std::string dtype_name(at::ScalarType dtype);

// Raises c10::ValueError with a message of the form "torch_marlin_metal::<op>: <argument>: expected <rule>, got <what
// came>".
[[noreturn]] void fail(const char* op, std::string_view argument, const std::string& expected, const std::string& got);

// Returns the element type of a tensor whose dtype has been checked.
ElementType element_type(const Tensor& tensor);

// Each of the functions below checks the arguments of one operator, and calls fail() for the first wrong one.
WeightShape check_weight(const char* op, const WeightArguments& weight);
WeightShape check_gemm(const Tensor& a, const WeightArguments& weight, const OptionalTensor& bias,
                       std::string_view variant, const char* op = "gemm");
WeightShape check_gemm_transposed(const Tensor& a, const WeightArguments& weight);
// The weight's tensors have a leading dimension E.
WeightShape check_moe_gemm(const Tensor& a, const WeightArguments& weight, const Tensor& expert_ids,
                           const OptionalTensor& bias, const OptionalTensor& row_weights, std::string_view variant,
                           const char* op = "moe_gemm");
WeightShape check_moe_gemm_grad_a(const Tensor& grad, const WeightArguments& weight, const Tensor& expert_ids);
WeightShape check_dequantize(const WeightArguments& weight, at::ScalarType dtype);
WeightShape check_embedding(const Tensor& ids, const WeightArguments& weight, at::ScalarType dtype);
void check_gptq_repack(const Tensor& qweight, const OptionalTensor& perm);
StoredZeros check_gptq_unpack_zeros(const Tensor& qzeros, int64_t checkpoint_version, std::string_view rule);
void check_awq_repack(const Tensor& qweight);
void check_transpose_words(const Tensor& words);
void check_awq_unpack_zeros(const Tensor& qzeros);

// Raises if the tensor requires grad. Only a and bias of gemm, a of gemm_transposed, and a and row_weights of moe_gemm
// are differentiated.
void check_no_grad(const char* op, const char* argument, const Tensor& tensor);
// Raises if a tensor of the weight requires grad or has a forward-mode tangent.
void check_weight_no_grad(const char* op, const WeightArguments& weight);

// Raises if the tensor has a forward-mode tangent, because the operators would silently drop the tangent.
void check_no_tangent(const char* op, const char* argument, const Tensor& tensor);

}  // namespace marlin
