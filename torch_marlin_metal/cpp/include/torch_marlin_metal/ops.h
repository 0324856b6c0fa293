// torch_marlin_metal's operators for C++ programs. Each function calls PyTorch's dispatcher, so tensors on the CPU and
// on mps use the same kernels as in Python, and wrong arguments throw c10::ValueError with the same message.
// docs/use/operators.md describes the arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace torch_marlin_metal {

// A packed weight [K, N]. The weight's format decides which optional tensors are needed.
struct Weight {
  at::Tensor b_packed;  // int32 [K/8, N]; the lowest k is in the lowest nibble
  at::Tensor scales;    // [ceil(K / group_size), N]
  std::string_view weight_format;
  int64_t group_size;
  std::optional<at::Tensor> zeros{};
  std::optional<at::Tensor> super_scales{};
  std::optional<at::Tensor> super_zeros{};
  std::optional<at::Tensor> global_scale{};
  std::optional<at::Tensor> lut{};
  std::optional<at::Tensor> perm{};
  std::optional<at::Tensor> b_high{};  // the upper bits of codes of 5 and 6 bits
};

namespace detail {

using OptionalTensor = std::optional<at::Tensor>;

template <typename Function>
c10::TypedOperatorHandle<Function> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

}  // namespace detail

// Returns `a @ weight + bias`, [..., N] in the dtype of `a`, for a [..., K] and bias [N]. `activations` may be "int8"
// on the CPU.
inline at::Tensor gemm(const at::Tensor& a, const Weight& weight, const std::optional<at::Tensor>& bias = {},
                       std::string_view variant = "auto", std::optional<std::string_view> activations = {}) {
  using detail::OptionalTensor;
  using Function = at::Tensor(
      const at::Tensor&, const at::Tensor&, const at::Tensor&, c10::string_view, int64_t, const OptionalTensor&,
      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
      const OptionalTensor&, const OptionalTensor&, c10::string_view, std::optional<c10::string_view>);
  static const auto operation = detail::find<Function>("torch_marlin_metal::gemm");
  return operation.call(a, weight.b_packed, weight.scales, weight.weight_format, weight.group_size, weight.zeros,
                        weight.super_scales, weight.super_zeros, weight.global_scale, weight.lut, weight.perm,
                        weight.b_high, bias, variant, activations);
}

// Returns the weight in floats, [K, N].
inline at::Tensor dequantize(const Weight& weight, at::ScalarType dtype = at::kHalf) {
  using detail::OptionalTensor;
  using Function = at::Tensor(const at::Tensor&, const at::Tensor&, c10::string_view, int64_t, const OptionalTensor&,
                              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, at::ScalarType);
  static const auto operation = detail::find<Function>("torch_marlin_metal::dequantize");
  return operation.call(weight.b_packed, weight.scales, weight.weight_format, weight.group_size, weight.zeros,
                        weight.super_scales, weight.super_zeros, weight.global_scale, weight.lut, weight.perm,
                        weight.b_high, dtype);
}

}  // namespace torch_marlin_metal
