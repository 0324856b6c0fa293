// dequantize and embedding have no derivatives, so they raise an error if an argument requires grad.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "csrc/weights/argument_rules.h"
#include "csrc/weights/operators.h"

namespace marlin {
namespace {

Tensor dequantize_autograd(const WeightArguments& weight, at::ScalarType dtype) {
  check_weight_no_grad("dequantize", weight);
  at::AutoDispatchBelowADInplaceOrView guard;
  return dequantize_op().call(weight, dtype);
}

Tensor embedding_autograd(const Tensor& ids, const WeightArguments& weight, at::ScalarType dtype) {
  check_weight_no_grad("embedding", weight);
  at::AutoDispatchBelowADInplaceOrView guard;
  return embedding_op().call(ids, weight, dtype);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, Autograd, m) {
  m.impl("dequantize", weight_kernel<dequantize_autograd>);
  m.impl("embedding", weight_kernel<embedding_autograd>);
}

}  // namespace marlin
