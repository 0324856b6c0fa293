// The product with the transposed weight, which gives the gradient of gemm with respect to `a`. To save memory, the
// weight is decoded in parts. A part consists of some rows of the weight [K, N]. Each row gives one column of the
// result, so every sum lies within one part.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>

#include "csrc/core/math.h"
#include "csrc/gemm/argument_rules.h"
#include "csrc/gemm/operators.h"
#include "csrc/weights/operators.h"

namespace marlin {
namespace {

constexpr const char* kVariable = "TORCH_MARLIN_METAL_GRADIENT_BYTES";
constexpr int64_t kDefaultBytes = int64_t{64} << 20;
// The largest part on the CPU in bytes, even if the limit permits more. When a larger block is freed, the C library
// returns it to the system. The next part would then cause a page fault for each of its pages, which takes longer than
// the decode.
constexpr int64_t kCpuPartBytes = int64_t{16} << 20;

// The division of the rows of K into parts: a part consists of several whole groups, or of a fraction of one group.
struct Division {
  int64_t rows;        // rows of a part; the last part of K or of a group may have fewer
  bool inside_groups;  // true if no part contains rows of two groups
};

// Divides the weight into parts of at most `bytes`, as large as possible and of nearly equal size. The smallest
// possible part has eight rows, or the rows of one word of the second plane, or one group if the format fixes the group
// size. If this part is larger than `bytes`, all parts have its size.
Division divide(WeightFormat format, int64_t K, int64_t group_size, int64_t row_bytes, int64_t bytes) {
  const int64_t fitting = bytes / row_bytes;
  if (fitting >= K) return {K, false};
  const int64_t unit = k_per_high_word(high_bits(format));
  const int64_t group = std::min(round_up(group_size, unit), K);
  // A part inside a group must begin at a word of the second plane, so a group smaller than such a word is not divided.
  if (fitting >= group || group_size < unit || fixed_group_size(format) != 0) {
    const int64_t groups = group_count(K, group);
    const int64_t most = std::max<int64_t>(fitting / group, 1);
    return {ceil_divide(groups, ceil_divide(groups, most)) * group, false};
  }
  const int64_t units = ceil_divide(group, unit);
  const int64_t most = std::max<int64_t>(fitting / unit, 1);
  return {ceil_divide(units, ceil_divide(units, most)) * unit, true};
}

// Multiplies two-level scales or zeros of some groups by their super values. Returns them as fp32 values of one level.
Tensor one_level(const Tensor& codes, const Tensor& super, int64_t group_size, int64_t first, int64_t groups) {
  const Tensor of_group = at::arange(first, first + groups, codes.options().dtype(at::kLong)).mul_(group_size);
  const Tensor blocks = super.index_select(0, of_group.div_(kSuperBlock, "floor")).to(at::kFloat);
  return blocks.mul_(codes.narrow(0, first, groups));
}

Tensor dequantize_rows(const WeightArguments& weight, WeightFormat format, int64_t first, int64_t rows,
                       bool inside_group, at::ScalarType dtype) {
  const int64_t per_word = codes_per_word(format);
  const int64_t first_group = first / weight.group_size;
  const int64_t groups = inside_group ? 1 : group_count(rows, weight.group_size);
  OwnedWeight part = weight.own();
  part.b_packed = weight.b_packed.narrow(0, first / per_word, rows / per_word);
  if (weight.b_high) {
    const int64_t per_high_word = k_per_high_word(high_bits(format));
    part.b_high = weight.b_high->narrow(0, first / per_high_word, ceil_divide(rows, per_high_word));
  }
  part.scales = weight.scales.narrow(0, first_group, groups);
  if (weight.zeros) part.zeros = weight.zeros->narrow(0, first_group, groups);
  // A part may begin inside a block of kSuperBlock rows, so its scales and zeros are converted to one level.
  if (weight.super_scales && rows < weight.b_packed.size(0) * per_word) {
    const auto expand = [&](const Tensor& codes, OptionalTensor& super) {
      const Tensor result = one_level(codes, *super, weight.group_size, first_group, groups);
      super.reset();
      return result;
    };
    part.scales = expand(weight.scales, part.super_scales);
    if (part.super_zeros) part.zeros = expand(*weight.zeros, part.super_zeros);
  }
  // Scales of blocks require the group size kScaleBlock, even if the part has fewer rows.
  if (inside_group && weight.group_size != kScaleBlock) part.group_size = rows;
  part.perm = std::nullopt;
  return dequantize_op().call(part.arguments(), dtype);
}

// Multiplies rows of activations by a part of the weight, and writes the rounded product to that part's columns of
// `out`. If the part has another dtype than the activations, converts some rows of the activations at a time. The
// converted rows and their product use at most `bytes`.
void multiply_part(const Tensor& rows, const Tensor& part, int64_t bytes, Tensor out) {
  int64_t step = rows.size(0);
  if (rows.scalar_type() != part.scalar_type()) {
    const int64_t row_bytes = static_cast<int64_t>(part.element_size()) * (part.size(0) + part.size(1));
    step = std::clamp<int64_t>(bytes / row_bytes, 1, step);
  }
  for (int64_t first = 0; first < rows.size(0); first += step) {
    const int64_t count = std::min(step, rows.size(0) - first);
    out.narrow(0, first, count).copy_(at::mm(rows.narrow(0, first, count).to(part.scalar_type()), part.t()));
  }
}

Tensor gemm_transposed(const Tensor& a, const WeightArguments& weight) {
  const WeightShape shape = check_gemm_transposed(a, weight);
  const int64_t K = shape.K.expect_int();
  const int64_t N = shape.N.expect_int();
  at::DimVector sizes(a.sizes());
  sizes.back() = K;
  const int64_t bytes = a.is_cpu() ? std::min(gradient_bytes(), kCpuPartBytes) : gradient_bytes();
  if (a.numel() == 0) return at::empty(sizes, a.options());

  // Excludes autocast, which would round the fp32 computation.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  // The dtype of a decoded part. bf16 is sufficient for bf16 activations, because it has the range of fp32. fp16 is not
  // sufficient: with fp32 scales, weights can exceed its range, and small weights lose bits. A check of the scales
  // would not help, because on mps the host would wait for the GPU.
  const at::ScalarType dtype = a.scalar_type() == at::kBFloat16 ? at::kBFloat16 : at::kFloat;
  const Tensor rows = a.reshape({-1, N});
  const int64_t row_bytes = N * static_cast<int64_t>(c10::elementSize(dtype));
  // If the activations must be converted, half of `bytes` is for their copies, and the other half for a decoded part.
  const bool converts = dtype != a.scalar_type();
  const int64_t part_bytes = converts ? std::max<int64_t>(bytes / 2, 1) : bytes;
  const Division division = divide(shape.format, K, weight.group_size, row_bytes, part_bytes);

  Tensor out;
  if (division.rows >= K && !converts) {
    out = at::mm(rows, dequantize_rows(weight, shape.format, 0, K, false, dtype).t());
  } else {
    out = at::empty({rows.size(0), K}, a.options());
    for (int64_t first = 0, last = 0; first < K; first = last) {
      last = std::min(first + division.rows, K);
      if (division.inside_groups) last = std::min(last, (first / weight.group_size + 1) * weight.group_size);
      const Tensor part = dequantize_rows(weight, shape.format, first, last - first, division.inside_groups, dtype);
      multiply_part(rows, part, part_bytes, out.narrow(1, first, last - first));
    }
  }
  if (weight.perm) out = out.index_select(1, at::argsort(*weight.perm));
  return out.view(sizes);
}

}  // namespace

// Reads the variable at each call, so a program can change it. getenv costs far less time than a product.
int64_t gradient_bytes() {
  const char* text = std::getenv(kVariable);
  if (text == nullptr || *text == '\0') return kDefaultBytes;
  char* end = nullptr;
  errno = 0;
  const long long bytes = std::strtoll(text, &end, 10);
  TORCH_CHECK_VALUE(*end == '\0' && errno == 0 && bytes >= 1, kVariable, ": expected bytes, at least 1, got '", text,
                    "'");
  return bytes;
}

TORCH_LIBRARY_IMPL(torch_marlin_metal, CompositeExplicitAutograd, m) {
  m.impl("gemm_transposed", weight_kernel<gemm_transposed>);
}

}  // namespace marlin
