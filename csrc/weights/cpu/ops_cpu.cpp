// The operators of packed weights for the CPU: checks the tensors, passes plain pointers to the kernels, and returns
// tensors.
#include <ATen/core/Tensor.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>

#include "csrc/cpu/huge_pages.h"
#include "csrc/cpu/parallel.h"
#include "csrc/weights/cpu/stored_weight.h"

namespace marlin::cpu {
namespace {

Tensor dequantize_cpu(const WeightArguments& weight, at::ScalarType dtype) {
  const StoredWeight stored(weight, check_dequantize(weight, dtype));
  const int32_t* order = stored.perm_data("dequantize");
  const std::array<int64_t, 2> sizes{stored.view.K, stored.view.N};
  const auto options = weight.scales.options().dtype(dtype);
  // A perm with repeated indices leaves some rows unwritten, so these outputs start as zeros.
  Tensor out = StoredWeight::repeats(order, stored.view.K) ? at::zeros(sizes, options) : at::empty(sizes, options);
  cpu::dequantize({stored.view, order, out.mutable_data_ptr(), element_type(out)}, at_parallel());
  return out;
}

void check_id_range(const Tensor& ids, int64_t N) {
  const auto [least, largest] = at::aminmax(ids);
  const int64_t low = least.item<int64_t>();
  const int64_t high = largest.item<int64_t>();
  TORCH_CHECK_INDEX(low >= 0 && high < N, "torch_marlin_metal::embedding: ids: expected values in [0, N) with N = ", N,
                    ", got ", low < 0 ? low : high);
}

Tensor embedding_cpu(const Tensor& ids, const WeightArguments& weight, at::ScalarType dtype) {
  const StoredWeight stored(weight, check_embedding(ids, weight, dtype));
  const int32_t* order = stored.perm_data("embedding");
  at::DimVector sizes(ids.sizes());
  sizes.push_back(stored.view.K);
  const auto options = weight.scales.options().dtype(dtype);
  // A perm with repeated indices leaves some columns unwritten, so these outputs start as zeros.
  Tensor out = StoredWeight::repeats(order, stored.view.K) ? at::zeros(sizes, options) : at::empty(sizes, options);
  if (ids.numel() == 0) return out;
  check_id_range(ids, stored.view.N);
  const Tensor indices = ids.to(at::kLong).contiguous();
  cpu::embedding({stored.view, order, indices.const_data_ptr<int64_t>(), indices.numel(), out.mutable_data_ptr(),
                  element_type(out)},
                 at_parallel());
  return out;
}

// Returns uninitialised memory for the words of a weight.
Tensor empty_words(at::IntArrayRef sizes, const at::TensorOptions& options) {
  Tensor out = at::empty(sizes, options);
  prefer_huge_pages(out.mutable_data_ptr(), static_cast<int64_t>(out.nbytes()));
  return out;
}

Tensor gptq_repack_cpu(const Tensor& qweight, const OptionalTensor& perm, int64_t code_bits) {
  check_gptq_repack(qweight, perm, code_bits);
  const Tensor stored = contiguous_or_undefined(perm);
  const int32_t* indices = perm ? stored.const_data_ptr<int32_t>() : nullptr;
  const int64_t K = qweight.size(0) * (32 / code_bits);
  if (indices) StoredWeight::check_perm_range("gptq_repack", indices, K);
  Tensor out = empty_words(qweight.sizes(), qweight.options());
  if (out.numel() == 0) return out;
  cpu::gptq_repack(static_cast<const uint32_t*>(qweight.const_data_ptr()), indices, K, qweight.size(1), code_bits,
                   static_cast<uint32_t*>(out.mutable_data_ptr()), at_parallel());
  return out;
}

Tensor gptq_unpack_zeros_cpu(const Tensor& qzeros, int64_t checkpoint_version, std::string_view rule) {
  const StoredZeros stored = check_gptq_unpack_zeros(qzeros, checkpoint_version, rule);
  Tensor out = at::empty({qzeros.size(0), qzeros.size(1) * kNibbles}, qzeros.options().dtype(at::kByte));
  if (out.numel() == 0) return out;
  cpu::gptq_unpack_zeros(static_cast<const uint32_t*>(qzeros.const_data_ptr()), out.size(0), out.size(1), stored,
                         out.mutable_data_ptr<uint8_t>(), at_parallel());
  return out;
}

Tensor awq_repack_cpu(const Tensor& qweight) {
  check_awq_repack(qweight);
  const int64_t K = qweight.size(0);
  const int64_t N = qweight.size(1) * kNibbles;
  Tensor out = empty_words({K / kNibbles, N}, qweight.options());
  if (out.numel() == 0) return out;
  cpu::awq_repack(static_cast<const uint32_t*>(qweight.const_data_ptr()), K, N,
                  static_cast<uint32_t*>(out.mutable_data_ptr()), at_parallel());
  return out;
}

Tensor awq_unpack_zeros_cpu(const Tensor& qzeros) {
  check_awq_unpack_zeros(qzeros);
  Tensor out = at::empty({qzeros.size(0), qzeros.size(1) * kNibbles}, qzeros.options().dtype(at::kByte));
  if (out.numel() == 0) return out;
  cpu::awq_unpack_zeros(static_cast<const uint32_t*>(qzeros.const_data_ptr()), out.size(0), out.size(1),
                        out.mutable_data_ptr<uint8_t>(), at_parallel());
  return out;
}

Tensor transpose_words_cpu(const Tensor& words) {
  check_transpose_words(words);
  Tensor out = empty_words({words.size(1), words.size(0)}, words.options());
  if (out.numel() == 0) return out;
  cpu::transpose_words(static_cast<const uint32_t*>(words.const_data_ptr()), words.size(0), words.size(1),
                       static_cast<uint32_t*>(out.mutable_data_ptr()), at_parallel());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, CPU, m) {
  m.impl("dequantize", weight_kernel<dequantize_cpu>);
  m.impl("embedding", weight_kernel<embedding_cpu>);
  m.impl("gptq_repack", gptq_repack_cpu);
  m.impl("gptq_unpack_zeros", gptq_unpack_zeros_cpu);
  m.impl("awq_repack", awq_repack_cpu);
  m.impl("awq_unpack_zeros", awq_unpack_zeros_cpu);
  m.impl("transpose_words", transpose_words_cpu);
}

}  // namespace marlin::cpu
