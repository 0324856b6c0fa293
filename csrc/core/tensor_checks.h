// Checks of tensor arguments for all operators, and the format of their error messages. Sizes are symbolic integers, so
// a trace with a dynamic number of rows gets no guard on that number.
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

// The permitted dtypes of activations, floating-point scales, biases and zero points, as text for error messages.
inline constexpr std::string_view kFloating = "float16, bfloat16 or float32";
inline bool is_floating(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat;
}

// Returns dtype and shape, for example "float16 [4096, 512]".
std::string describe(const Tensor& tensor);

// Returns the name of a dtype, for example "float16".
std::string dtype_name(at::ScalarType dtype);

// Raises c10::ValueError with the message "torch_marlin_metal::<op>: <argument>: expected <expected>, got <got>".
[[noreturn]] void fail(const char* op, std::string_view argument, const std::string& expected, const std::string& got);

// Returns the element type of a tensor. The caller has checked the dtype with is_floating.
ElementType element_type(const Tensor& tensor);

void check_no_grad(const char* op, const char* argument, const Tensor& tensor);
// Raises if the tensor has a forward-mode tangent. Without this check, the operators would silently drop the tangent.
void check_no_tangent(const char* op, const char* argument, const Tensor& tensor);

// Joins its arguments to a text for an error message. Call it only after a check has failed: the string stream costs
// more time than all checks of a call.
template <class... Part>
std::string text(const Part&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

// Checks the arguments of one call of an operator. Each method calls fail() if its argument is wrong.
struct Checker {
  const char* op;
  at::Device device;  // the device of the operator's first argument

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
