// The shape and dtype rules of a packed weight, and of the operators that decode it, look up its rows or repack it. All
// backends and the fake kernels share these rules.
#pragma once

#include "csrc/core/tensor_checks.h"
#include "csrc/core/weight_arguments.h"
#include "csrc/core/weight_format.h"

namespace marlin {

struct WeightShape {
  WeightFormat format;
  c10::SymInt K;
  c10::SymInt N;
  c10::SymInt E = 1;          // the number of experts, or 1 for a single weight
  bool block_scales = false;  // true if each scale is for a block of kScaleBlock x kScaleBlock weights
};

// Checks the tensors of a weight, and other tensors with the sizes of a weight's tensors.
struct WeightChecker : Checker {
  bool stacked = false;  // tensors have a leading dimension E
  c10::SymInt E = 1;

  // Fails unless the tensor is on the device and has these sizes, and `dtype_ok` is true. `dtypes` and `names` describe
  // the permitted dtypes and the dimensions in the error message.
  void sized(std::string_view argument, const Tensor& tensor, bool dtype_ok, std::string_view dtypes,
             std::string_view names, c10::SymDimVector sizes) const {
    if (stacked) sizes.insert(sizes.begin(), E);
    if (!dtype_ok || tensor.sym_sizes() != c10::SymIntArrayRef(sizes)) {
      fail(op, argument, text(dtypes, " ", dimensions(names), " = ", c10::SymIntArrayRef(sizes)), describe(tensor));
    }
    on_device(argument, tensor);
  }

  // Fails unless the tensor holds packed words: int32 and contiguous.
  void words(std::string_view argument, const Tensor& tensor, std::string_view names) const {
    if (tensor.scalar_type() != at::kInt || tensor.dim() != (stacked ? 3 : 2))
      fail(op, argument, text("int32 ", dimensions(names)), describe(tensor));
    contiguous(argument, tensor);
  }

  void perm(const OptionalTensor& perm, const c10::SymInt& K) const {
    if (perm) sized("perm", *perm, perm->scalar_type() == at::kInt, "int32", "K", {K});
  }

  std::string dimensions(std::string_view names) const { return text(stacked ? "[E, " : "[", names, "]"); }
};

// Each of the functions below checks the arguments of one operator, and calls fail() for the first invalid argument.

// If `stacked`, the weight's tensors have a leading dimension E.
WeightShape check_weight(const char* op, const WeightArguments& weight, bool stacked = false);
WeightShape check_dequantize(const WeightArguments& weight, at::ScalarType dtype);
WeightShape check_embedding(const Tensor& ids, const WeightArguments& weight, at::ScalarType dtype);
void check_gptq_repack(const Tensor& qweight, const OptionalTensor& perm, int64_t code_bits);
StoredZeros check_gptq_unpack_zeros(const Tensor& qzeros, int64_t checkpoint_version, std::string_view rule);
void check_awq_repack(const Tensor& qweight);
void check_transpose_words(const Tensor& words);
void check_awq_unpack_zeros(const Tensor& qzeros);

// Raises if a tensor of the weight, or the bias, requires grad or has a forward-mode tangent.
void check_weight_no_grad(const char* op, const WeightArguments& weight, const OptionalTensor& bias = std::nullopt);

}  // namespace marlin
