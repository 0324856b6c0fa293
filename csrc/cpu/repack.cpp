// Lossless moves of 4-bit codes between checkpoint layouts and [K/8, N].
#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace marlin::cpu {

namespace {

constexpr int64_t kGrainWords = 1 << 13;  // words of work that are worth a thread

int64_t grain_rows(int64_t words_per_row) {
  return std::max<int64_t>(1, kGrainWords / std::max<int64_t>(words_per_row, 1));
}

// Column 8c + j of a word of AWQ's "gemm" layout stands in nibble kAwqNibble[j] (AutoAWQ, awq/utils/packing_utils.py).
constexpr int kAwqNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};

}  // namespace

void gptq_repack(const uint32_t* qweight, const int32_t* perm, int64_t K, int64_t N, uint32_t* out,
                 const Parallel& parallel) {
  parallel.run(K / 8, grain_rows(N), [&](int64_t begin, int64_t end) {
    if (perm == nullptr) {
      std::memcpy(out + begin * N, qweight + begin * N, static_cast<size_t>((end - begin) * N) * sizeof(uint32_t));
      return;
    }
    for (int64_t r = begin; r < end; ++r) {
      const uint32_t* from[8];
      uint32_t shift[8];
      for (int j = 0; j < 8; ++j) {
        const int64_t k = perm[8 * r + j];
        from[j] = qweight + k / 8 * N;
        shift[j] = static_cast<uint32_t>(4 * (k % 8));
      }
      uint32_t* to = out + r * N;
      for (int64_t n = 0; n < N; ++n) {
        uint32_t word = 0;
        for (int j = 0; j < 8; ++j)
          word |= ((from[j][n] >> shift[j]) & 15U) << (4 * j);
        to[n] = word;
      }
    }
  });
}

void awq_repack(const uint32_t* qweight, int64_t K, int64_t N, uint32_t* out, const Parallel& parallel) {
  const int64_t words = N / 8;
  parallel.run(K / 8, grain_rows(N), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < words; ++c) {
        uint32_t w[8];
        for (int i = 0; i < 8; ++i)
          w[i] = qweight[(8 * r + i) * words + c];
        // Transpose of the 8 x 8 nibbles: swap off-diagonal blocks of 4, 2 and 1 nibbles.
        for (int i = 0; i < 4; ++i) {
          const uint32_t t = ((w[i] >> 16) ^ w[i + 4]) & 0x0000FFFFU;
          w[i] ^= t << 16;
          w[i + 4] ^= t;
        }
        for (const int i : {0, 1, 4, 5}) {
          const uint32_t t = ((w[i] >> 8) ^ w[i + 2]) & 0x00FF00FFU;
          w[i] ^= t << 8;
          w[i + 2] ^= t;
        }
        for (int i = 0; i < 8; i += 2) {
          const uint32_t t = ((w[i] >> 4) ^ w[i + 1]) & 0x0F0F0F0FU;
          w[i] ^= t << 4;
          w[i + 1] ^= t;
        }
        uint32_t* to = out + r * N + 8 * c;
        for (int j = 0; j < 8; ++j)
          to[j] = w[kAwqNibble[j]];
      }
    }
  });
}

void gptq_unpack_zeros(const uint32_t* qzeros, int64_t G, int64_t N, int checkpoint_version, ZerosRule rule,
                       uint8_t* out, const Parallel& parallel) {
  const int64_t words = N / 8;
  const uint32_t add_to_word = checkpoint_version == 1 && rule == ZerosRule::word ? 0x11111111U : 0U;
  const uint32_t add = checkpoint_version == 1 && rule != ZerosRule::word ? 1U : 0U;
  const uint32_t mask = rule == ZerosRule::unmasked ? 31U : 15U;
  parallel.run(G, grain_rows(N), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * words; i < end * words; ++i) {
      const uint32_t word = qzeros[i] + add_to_word;
      for (int j = 0; j < 8; ++j)
        out[8 * i + j] = static_cast<uint8_t>((((word >> (4 * j)) & 15U) + add) & mask);
    }
  });
}

void awq_unpack_zeros(const uint32_t* qzeros, int64_t G, int64_t N, uint8_t* out, const Parallel& parallel) {
  const int64_t words = N / 8;
  parallel.run(G, grain_rows(N), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * words; i < end * words; ++i) {
      for (int j = 0; j < 8; ++j)
        out[8 * i + j] = static_cast<uint8_t>((qzeros[i] >> (4 * kAwqNibble[j])) & 15U);
    }
  });
}

}  // namespace marlin::cpu
