#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "csrc/core/math.h"
#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/cpu/scratch.h"
#include "csrc/weights/cpu/api.h"
#include "csrc/weights/cpu/scales.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace marlin::cpu {

namespace {

constexpr int64_t kBlockColumns = 8 * kDequantizeColumns;  // the fp32 scales and zeros of a block take 16 KB
constexpr int64_t kBlockRows = 8;                          // blocks of eight k in one task
constexpr int64_t kPadding = 32;                           // in columns: two of the widest vectors

// A result of this size fills half of the last-level cache of a small machine. Larger results are written with
// instructions that bypass the caches.
constexpr int64_t kStreamBytes = int64_t{4} << 20;

void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// Replaces every NaN by the canonical quiet NaN. The kernels round to bf16 without a check for NaN. This rounding keeps
// the canonical NaN, but it may turn other NaNs into numbers.
void drop_payloads(float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    values[i] = std::isnan(values[i]) ? std::numeric_limits<float>::quiet_NaN() : values[i];
}

struct Buffers {
  float* scales;
  float* zeros;
  uint32_t* words;  // padded copies of a block with fewer than kDequantizeColumns columns, and of its high plane
  char* rows;       // [8, kDequantizeColumns] results

  explicit Buffers(Scratch& scratch) {
    scales = scratch.get<float>(2 * (kBlockColumns + kPadding) + (8 + kMaxWordsPerBlock) * kDequantizeColumns);
    zeros = scales + kBlockColumns + kPadding;
    rows = reinterpret_cast<char*>(zeros + kBlockColumns + kPadding);
    words = reinterpret_cast<uint32_t*>(rows) + 8 * kDequantizeColumns;
  }
};

class Dequantize {
 public:
  Dequantize(const DequantizeArguments& arguments, const KernelSet& kernels)
      : a_(arguments),
        w_(arguments.weight),
        kernels_(kernels),
        role_(zeros_role(w_.format)),
        high_bits_(high_bits(w_.format)),
        word_rows_(words_per_block(w_.format)),
        kernel_(kernels.dequantize[static_cast<size_t>(codes_of(w_.format))]),
        size_(element_bytes(a_.out_type)),
        streamed_(w_.K * w_.N * size_ > kStreamBytes) {
    std::copy_n(code_values(w_.format, w_.lut), 1 << code_bits(w_.format), values_.begin());
    drop_payloads(values_.data(), 1 << code_bits(w_.format));
  }

  void rows(int64_t begin, int64_t end) const {
    static thread_local Scratch scratch;
    const Buffers buffers(scratch);
    for (int64_t n = 0; n < w_.N; n += kBlockColumns) {
      const int64_t count = std::min(kBlockColumns, w_.N - n);
      int64_t loaded = -1;
      for (int64_t r = begin; r < end; ++r) {
        const int64_t group = r * 8 / w_.group_size;
        if (group != loaded) load_group(group, n, count, buffers);
        loaded = group;
        for (int64_t i = 0; i < count; i += kDequantizeColumns) {
          block(r, n, i, std::min<int64_t>(kDequantizeColumns, count - i), buffers);
        }
      }
    }
    if (streamed_) stream_fence();
  }

 private:
  void load_group(int64_t group, int64_t n, int64_t count, const Buffers& buffers) const {
    load_scales(kernels_, w_, group, n, count, buffers.scales);
    drop_payloads(buffers.scales, count);
    if (role_ == ZerosRole::none) return;
    load_zeros(kernels_, w_, group, n, count, buffers.zeros);
    drop_payloads(buffers.zeros, count);
  }

  // Decodes 8 rows of the weight from row 8 r on, in columns n + i to n + i + count - 1.
  void block(int64_t r, int64_t n, int64_t i, int64_t count, const Buffers& buffers) const {
    const uint32_t* words = w_.words + r * word_rows_ * w_.N + n + i;
    int64_t ld_words = w_.N;
    HighPlane high{w_.high, w_.N, high_bits_};
    int high_k = 0;
    if (high_bits_ != 0) {
      const int64_t first = 8 * r / k_per_high_word(high_bits_);
      high.words += first * w_.N + n + i;
      high_k = static_cast<int>(8 * r - first * k_per_high_word(high_bits_));
    }
    if (r + 1 < w_.K / kBlockK) {
      for (int64_t row = 0; row < word_rows_; ++row) {
        for (int64_t ahead = 0; ahead < count; ahead += 16)
          __builtin_prefetch(words + (word_rows_ + row) * w_.N + ahead);
      }
    }
    if (count < kDequantizeColumns) {
      for (int64_t row = 0; row < word_rows_; ++row)
        std::copy_n(words + row * w_.N, count, buffers.words + row * kDequantizeColumns);
      if (high_bits_ != 0) {
        std::copy_n(high.words, count, buffers.words + kDequantizeColumns);
        high.words = buffers.words + kDequantizeColumns;
      }
      words = buffers.words;
      ld_words = kDequantizeColumns;
    }
    kernel_({values_.data(), words, ld_words, high, high_k, buffers.scales + i, buffers.zeros + i, role_,
             static_cast<int>(count), buffers.rows, a_.out_type});
    for (int64_t j = 0; j < 8; ++j) {
      const int64_t k = a_.perm == nullptr ? 8 * r + j : a_.perm[8 * r + j];
      char* to = static_cast<char*>(a_.out) + (k * w_.N + n + i) * size_;
      const char* from = buffers.rows + j * kDequantizeColumns * size_;
      if (streamed_) {
        kernels_.stream(to, from, count * size_);
      } else {
        std::memcpy(to, from, static_cast<size_t>(count * size_));
      }
    }
  }

  const DequantizeArguments& a_;
  const PackedWeight& w_;
  const KernelSet& kernels_;
  const ZerosRole role_;
  CodeValues values_;
  const uint32_t high_bits_;
  const int64_t word_rows_;  // rows of packed words that hold eight k
  void (*const kernel_)(const DequantizeBlock&);
  const int64_t size_;
  const bool streamed_;
};

}  // namespace

void dequantize_on(Isa isa, const DequantizeArguments& arguments, const Parallel& parallel) {
  const Dequantize work(arguments, *kernels_of(isa));
  const int64_t blocks = arguments.weight.K / kBlockK;
  parallel.run(ceil_divide(blocks, kBlockRows), 1,
               [&](int64_t begin, int64_t end) { work.rows(begin * kBlockRows, std::min(end * kBlockRows, blocks)); });
}

void dequantize(const DequantizeArguments& arguments, const Parallel& parallel) {
  dequantize_on(capability().isa, arguments, parallel);
}

}  // namespace marlin::cpu
