// The schemas of the operators of packed weights, and their fake (Meta) kernels.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "csrc/weights/argument_rules.h"

// docs/use/operators.md lists shapes and dtypes. ScalarType 5 is float16.
TORCH_LIBRARY_FRAGMENT(torch_marlin_metal, m) {
  using marlin::weight_schema;
  m.def(weight_schema("dequantize(Weight weight, *, ScalarType dtype=5) -> Tensor"));
  m.def(weight_schema("embedding(Tensor ids, Weight weight, *, ScalarType dtype=5) -> Tensor"));
  m.def("gptq_repack(Tensor qweight, *, Tensor? perm=None, int code_bits=4) -> Tensor");
  m.def("gptq_unpack_zeros(Tensor qzeros, *, int checkpoint_version, str rule=\"word\") -> Tensor");
  m.def("awq_repack(Tensor qweight) -> Tensor");
  m.def("awq_unpack_zeros(Tensor qzeros) -> Tensor");
  m.def("transpose_words(Tensor words) -> Tensor");
}

namespace marlin {
namespace {

Tensor dequantize_meta(const WeightArguments& weight, at::ScalarType dtype) {
  const WeightShape shape = check_dequantize(weight, dtype);
  return at::empty_symint({shape.K, shape.N}, weight.scales.options().dtype(dtype));
}

Tensor embedding_meta(const Tensor& ids, const WeightArguments& weight, at::ScalarType dtype) {
  const WeightShape shape = check_embedding(ids, weight, dtype);
  c10::SymDimVector sizes(ids.sym_sizes());
  sizes.push_back(shape.K);
  return at::empty_symint(sizes, weight.scales.options().dtype(dtype));
}

Tensor gptq_repack_meta(const Tensor& qweight, const OptionalTensor& perm, int64_t code_bits) {
  check_gptq_repack(qweight, perm, code_bits);
  return at::empty_symint(qweight.sym_sizes(), qweight.options());
}

Tensor gptq_unpack_zeros_meta(const Tensor& qzeros, int64_t checkpoint_version, std::string_view rule) {
  check_gptq_unpack_zeros(qzeros, checkpoint_version, rule);
  return at::empty_symint({qzeros.sym_size(0), qzeros.sym_size(1) * kNibbles}, qzeros.options().dtype(at::kByte));
}

Tensor awq_repack_meta(const Tensor& qweight) {
  check_awq_repack(qweight);
  return at::empty_symint({qweight.sym_size(0) / kNibbles, qweight.sym_size(1) * kNibbles}, qweight.options());
}

Tensor awq_unpack_zeros_meta(const Tensor& qzeros) {
  check_awq_unpack_zeros(qzeros);
  return at::empty_symint({qzeros.sym_size(0), qzeros.sym_size(1) * kNibbles}, qzeros.options().dtype(at::kByte));
}

// Runs on every device except the CPU, which has a faster kernel.
Tensor transpose_words(const Tensor& words) {
  check_transpose_words(words);
  return words.t().clone(at::MemoryFormat::Contiguous);
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, CompositeExplicitAutograd, m) {
  m.impl("transpose_words", transpose_words);
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, Meta, m) {
  m.impl("dequantize", weight_kernel<dequantize_meta>);
  m.impl("embedding", weight_kernel<embedding_meta>);
  m.impl("gptq_repack", gptq_repack_meta);
  m.impl("gptq_unpack_zeros", gptq_unpack_zeros_meta);
  m.impl("awq_repack", awq_repack_meta);
  m.impl("awq_unpack_zeros", awq_unpack_zeros_meta);
}

}  // namespace marlin
