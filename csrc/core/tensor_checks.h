// Checks of tensor arguments that all operators share, and the form of their errors. Sizes are symbolic integers, so
// that tracing with a dynamic number of rows adds no guard.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include "kernels/shared/types.h"

namespace marlin {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalText = std::optional<std::string_view>;

// The dtypes of activations, floating scales, biases and zero points, as error messages name them.
inline constexpr std::string_view kFloating = "float16, bfloat16 or float32";
// Returns true for the dtypes that kFloating names.
inline bool is_floating(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat;
}

// Returns dtype and shape, for example "float16 [4096, 512]".
std::string describe(const Tensor& tensor);

// Returns the name of a dtype, for example "float16".
std::string dtype_name(at::ScalarType dtype);

// Raises c10::ValueError with a message of the form "torch_marlin_metal::<op>: <argument>: expected <rule>, got <what
// came>".
[[noreturn]] void fail(const char* op, std::string_view argument, const std::string& expected, const std::string& got);

// Returns the element type of a tensor whose dtype has been checked.
ElementType element_type(const Tensor& tensor);

// Raises if the tensor requires grad.
void check_no_grad(const char* op, const char* argument, const Tensor& tensor);
// Raises if the tensor has a forward-mode tangent, because the operators would silently drop the tangent.
void check_no_tangent(const char* op, const char* argument, const Tensor& tensor);

// Joins texts for an error message. Call join only after a check has failed: its string stream costs more than all
// checks of a call.
template <class... Part>
std::string text(const Part&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// The argument checks of one call of an operator. Each calls fail() if its argument is wrong.
struct Checker {
  const char* op;
  at::Device device;  // the first argument's device

  void on_device(std::string_view argument, const Tensor& tensor) const {
    if (tensor.device() != device) {
      fail(op, argument, text("a tensor on ", device, " like the first argument"),
           text(describe(tensor), " on ", tensor.device()));
    }
  }

  void contiguous(std::string_view argument, const Tensor& tensor) const {
    if (!tensor.is_contiguous_or_false()) {
      fail(op, argument, "a contiguous tensor", text(describe(tensor), " with strides ", tensor.sym_strides()));
    }
  }
};

}  // namespace marlin
