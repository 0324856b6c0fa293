#include <algorithm>

#include "gemm.h"
#include "kernel_set.h"
#include "scales.h"
#include "scratch.h"

namespace marlin::cpu {

namespace {

constexpr int64_t kBlockColumns = 2048;  // scales and zeros of a block as fp32: 16 KB
constexpr int64_t kBlockRows = 8;        // packed rows of a task

}  // namespace

void dequantize_on(Isa isa, const DequantizeArguments& arguments, const Parallel& parallel) {
  const PackedWeight& weight = arguments.weight;
  const KernelSet& kernels = *kernels_of(isa);
  const ZerosRole role = info(weight.format).zeros_role;
  const auto values = code_values(weight.format, weight.lut);
  const auto row = kernels.dequantize[static_cast<size_t>(codes_of(weight.format))];
  const int64_t word_rows = weight.K / 8;
  const int64_t size = element_size(arguments.out_type);
  parallel.run((word_rows + kBlockRows - 1) / kBlockRows, 1, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    float* scales = scratch.get<float>(2 * kBlockColumns);
    float* zeros = scales + kBlockColumns;
    for (int64_t n = 0; n < weight.N; n += kBlockColumns) {
      const int64_t count = std::min(kBlockColumns, weight.N - n);
      int64_t loaded = -1;
      for (int64_t r = begin * kBlockRows; r < std::min(end * kBlockRows, word_rows); ++r) {
        const int64_t group = r * 8 / weight.group_size;
        if (group != loaded) {
          load_scales(kernels, weight, group, n, count, scales);
          if (role != ZerosRole::none) load_zeros(kernels, weight, group, n, count, zeros);
          loaded = group;
        }
        DequantizeRow d{values.data(),     weight.words + r * weight.N + n, scales, zeros, role, count, {},
                        arguments.out_type};
        for (int64_t j = 0; j < 8; ++j) {
          const int64_t k = arguments.perm == nullptr ? 8 * r + j : arguments.perm[8 * r + j];
          d.out[static_cast<size_t>(j)] = static_cast<char*>(arguments.out) + (k * weight.N + n) * size;
        }
        row(d);
      }
    }
  });
}

void dequantize(const DequantizeArguments& arguments, const Parallel& parallel) {
  dequantize_on(capability().isa, arguments, parallel);
}

}  // namespace marlin::cpu
