#include "csrc/core/tensor_checks.h"

#include <c10/core/GradMode.h>

namespace marlin {

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kByte:
      return "uint8";
    case at::kChar:
      return "int8";
    case at::kShort:
      return "int16";
    case at::kInt:
      return "int32";
    case at::kLong:
      return "int64";
    case at::kBool:
      return "bool";
    default:
      return c10::toString(dtype);
  }
}

[[noreturn]] void fail(const char* op, std::string_view argument, const std::string& expected, const std::string& got) {
  TORCH_CHECK_VALUE(false, "torch_marlin_metal::", op, ": ", argument, ": expected ", expected, ", got ", got);
  __builtin_unreachable();
}

std::string describe(const Tensor& tensor) {
  return text(dtype_name(tensor.scalar_type()), " ", tensor.sym_sizes());
}

ElementType element_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
      return ElementType::float16;
    case at::kBFloat16:
      return ElementType::bfloat16;
    case at::kByte:
      return ElementType::uint8;
    case at::kChar:
      return ElementType::int8;
    default:
      return ElementType::float32;
  }
}

void check_no_grad(const char* op, const char* argument, const Tensor& tensor) {
  if (c10::GradMode::is_enabled() && tensor.requires_grad()) {
    fail(op, argument, "a tensor that does not require grad", describe(tensor) + " that requires grad");
  }
}

void check_no_tangent(const char* op, const char* argument, const Tensor& tensor) {
  TORCH_CHECK_VALUE(!tensor._fw_grad(/*level=*/0).defined(), "torch_marlin_metal::", op, ": ", argument,
                    ": expected no forward-mode tangent, got one: ", op, " has reverse-mode derivatives only");
}

}  // namespace marlin
