// Repacks codes from checkpoint layouts to the layout of a packed weight, without loss.
#include <algorithm>
#include <bit>
#include <cstring>

#include "csrc/core/math.h"
#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/cpu/scratch.h"
#include "csrc/cpu/shuffle.h"
#include "csrc/weights/cpu/api.h"

namespace marlin::cpu {

namespace {

constexpr int64_t kGrainWords = 1 << 13;          // the least number of words per thread
constexpr int64_t kBlockWords = (640 << 10) / 4;  // source words that are copied at once: most of a 1 MB L2 cache
constexpr int64_t kMinColumns = 64;
constexpr int64_t kMaxColumns = 512;

int64_t grain_rows(int64_t words_per_row) {
  return std::max<int64_t>(1, kGrainWords / std::max<int64_t>(words_per_row, 1));
}

// Permutes columns n to n + count - 1. Each word of the source is read eight times, in random order. If the row length
// of the source is a power of two, its rows compete for a few sets of the cache. So the words are first copied to a
// compact block.
void permute_columns(const KernelSet& kernels, const uint32_t* qweight, const int32_t* perm, int64_t K, int64_t N,
                     int64_t n, int64_t count, uint32_t* out) {
  static thread_local Scratch scratch;
  uint32_t* block = scratch.get<uint32_t>(K / 8 * count);
  for (int64_t r = 0; r < K / 8; ++r)
    std::copy_n(qweight + r * N + n, count, block + r * count);
  for (int64_t r = 0; r < K / 8; ++r) {
    GatherCodes row{{}, {}, count, out + r * N + n};
    for (size_t j = 0; j < 8; ++j) {
      const int64_t k = perm[8 * r + static_cast<int64_t>(j)];
      row.from[j] = block + k / 8 * count;
      row.shift[j] = static_cast<int>(4 * (k % 8));
    }
    kernels.gather_codes(row);
  }
}

// Permutes codes of 8 bits, which are whole bytes of the words.
void permute_byte_rows(const uint32_t* qweight, const int32_t* perm, int64_t N, int64_t begin, int64_t end,
                       uint32_t* out) {
  for (int64_t j = 4 * begin; j < 4 * end; ++j) {
    const int64_t k = perm[j];
    const uint8_t* from = reinterpret_cast<const uint8_t*>(qweight + k / 4 * N) + k % 4;
    uint8_t* to = reinterpret_cast<uint8_t*>(out + j / 4 * N) + j % 4;
    for (int64_t n = 0; n < N; ++n)
      to[4 * n] = from[4 * n];
  }
}

using Halves __attribute__((vector_size(16))) = uint16_t;
using Bytes __attribute__((vector_size(16))) = uint8_t;

Words load(const uint32_t* p) {
  Words words;
  std::memcpy(&words, p, sizeof words);
  return words;
}

// Restores the order of AWQ's columns: the eight columns of a word are in nibbles 0, 4, 1, 5, 2, 6, 3, 7 (AutoAWQ,
// awq/utils/packing_utils.py). `even` holds the repacked words of nibbles 0, 2, 4, 6, and `odd` those of nibbles 1, 3,
// 5, 7.
void store_columns(uint32_t* to, Words even, Words odd) {
  const Words columns[2] = {shuffle<0, 2, 4, 6>(even, odd), shuffle<1, 3, 5, 7>(even, odd)};
  std::memcpy(to, columns, sizeof columns);
}

// For every c, transposes the 4 x 4 bytes of word c in the four rows: byte b of word c of rows[p] becomes byte p of
// word b of result.of[c].
struct FourWords {
  Words of[4];
};
FourWords transpose_bytes(const Words (&rows)[4]) {
  auto zip = [](Words a, Words b, bool upper) {
    const auto x = std::bit_cast<Bytes>(a), y = std::bit_cast<Bytes>(b);
    return std::bit_cast<Halves>(upper ? shuffle<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(x, y)
                                       : shuffle<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(x, y));
  };
  FourWords result;
  for (int upper = 0; upper < 2; ++upper) {
    const Halves low = zip(rows[0], rows[1], upper != 0), high = zip(rows[2], rows[3], upper != 0);
    result.of[2 * upper] = std::bit_cast<Words>(shuffle<0, 8, 1, 9, 2, 10, 3, 11>(low, high));
    result.of[2 * upper + 1] = std::bit_cast<Words>(shuffle<4, 12, 5, 13, 6, 14, 7, 15>(low, high));
  }
  return result;
}

// Repacks eight rows of four words to one row of 32 words. `stride` is the number of words from one source row to the
// next.
void awq_block(const uint32_t* from, int64_t stride, uint32_t* to) {
  constexpr uint32_t kLow = 0x0F0F0F0FU, kHigh = 0xF0F0F0F0U;
  Words even[4], odd[4];
  for (int p = 0; p < 4; ++p) {
    const Words first = load(from + 2 * p * stride), second = load(from + (2 * p + 1) * stride);
    even[p] = (first & kLow) | ((second & kLow) << 4);
    odd[p] = ((first >> 4) & kLow) | (second & kHigh);
  }
  const FourWords evens = transpose_bytes(even), odds = transpose_bytes(odd);
  for (int c = 0; c < 4; ++c)
    store_columns(to + 8 * c, evens.of[c], odds.of[c]);
}

Bytes low_nibbles(Words words) {
  return std::bit_cast<Bytes>(words & 0x0F0F0F0FU);
}

// Unpacks four words to 32 bytes with one code each. In GPTQ, the lowest nibble of a word is its first column.
void spread_gptq(Words words, Bytes (&codes)[2]) {
  const Bytes even = low_nibbles(words), odd = low_nibbles(words >> 4);
  codes[0] = shuffle<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(even, odd);
  codes[1] = shuffle<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(even, odd);
}

// Unpacks four AWQ words to 32 bytes with one code each. Neighbouring columns are in nibbles i and i + 4 of a word,
// that is in bytes 0 and 2, or in bytes 1 and 3.
void spread_awq(Words words, Bytes (&codes)[2]) {
  words = (words & 0xFF0000FFU) | ((words & 0x0000FF00U) << 8) | ((words & 0x00FF0000U) >> 8);
  const auto even = std::bit_cast<Halves>(low_nibbles(words)), odd = std::bit_cast<Halves>(low_nibbles(words >> 4));
  codes[0] = std::bit_cast<Bytes>(shuffle<0, 8, 1, 9, 2, 10, 3, 11>(even, odd));
  codes[1] = std::bit_cast<Bytes>(shuffle<4, 12, 5, 13, 6, 14, 7, 15>(even, odd));
}

// Unpacks zero points. decode(words, codes) unpacks four words to 32 codes.
template <class Decode>
void unpack_zeros(const uint32_t* words, int64_t G, int64_t N, uint8_t* out, const Parallel& parallel, Decode decode) {
  parallel.run(G, grain_rows(N), [&](int64_t begin, int64_t end) {
    const int64_t last = end * (N / 8);
    for (int64_t i = begin * (N / 8); i < last; i += 4) {
      const int64_t count = std::min<int64_t>(4, last - i);
      uint32_t four[4] = {};
      Bytes codes[2];
      if (count == 4) {
        decode(load(words + i), codes);
        std::memcpy(out + 8 * i, codes, sizeof codes);
      } else {
        std::copy_n(words + i, count, four);
        decode(load(four), codes);
        std::memcpy(out + 8 * i, codes, static_cast<size_t>(8 * count));
      }
    }
  });
}

}  // namespace

void gptq_repack_on(Isa isa, const uint32_t* qweight, const int32_t* perm, int64_t K, int64_t N, int64_t code_bits,
                    uint32_t* out, const Parallel& parallel) {
  if (perm == nullptr) {
    parallel.run(K * code_bits / 32, grain_rows(N), [&](int64_t begin, int64_t end) {
      std::memcpy(out + begin * N, qweight + begin * N, static_cast<size_t>((end - begin) * N) * sizeof(uint32_t));
    });
    return;
  }
  if (code_bits == 8) {
    parallel.run(K / 4, grain_rows(N),
                 [&](int64_t begin, int64_t end) { permute_byte_rows(qweight, perm, N, begin, end, out); });
    return;
  }
  const KernelSet& kernels = *kernels_of(isa);
  const int64_t fitting = kBlockWords / std::max<int64_t>(K / 8, 1) / kMinColumns * kMinColumns;
  const int64_t columns = std::clamp(fitting, kMinColumns, kMaxColumns);
  const int64_t grain = std::max<int64_t>(1, kGrainWords / (K / 8 * columns));
  parallel.run(ceil_divide(N, columns), grain, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin * columns; n < std::min(end * columns, N); n += columns)
      permute_columns(kernels, qweight, perm, K, N, n, std::min(columns, N - n), out);
  });
}

void gptq_repack(const uint32_t* qweight, const int32_t* perm, int64_t K, int64_t N, int64_t code_bits, uint32_t* out,
                 const Parallel& parallel) {
  gptq_repack_on(capability().isa, qweight, perm, K, N, code_bits, out, parallel);
}

void awq_repack(const uint32_t* qweight, int64_t K, int64_t N, uint32_t* out, const Parallel& parallel) {
  const int64_t words = N / 8;
  parallel.run(K / 8, grain_rows(N), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const uint32_t* from = qweight + 8 * r * words;
      uint32_t* to = out + r * N;
      int64_t c = 0;
      for (; c + 4 <= words; c += 4)
        awq_block(from + c, words, to + 8 * c);
      if (c == words) continue;
      uint32_t rest[8 * 4] = {}, columns[8 * 4];
      for (int64_t i = 0; i < 8; ++i)
        std::copy(from + i * words + c, from + (i + 1) * words, rest + 4 * i);
      awq_block(rest, 4, columns);
      std::copy_n(columns, 8 * (words - c), to + 8 * c);
    }
  });
}

void transpose_words(const uint32_t* words, int64_t rows, int64_t columns, uint32_t* out, const Parallel& parallel) {
  constexpr int64_t kStrip = 64;  // rows per task: they fill four cache lines of each row of the result
  const int64_t whole_columns = columns / 4 * 4;
  parallel.run(ceil_divide(rows, kStrip), grain_rows(kStrip * columns), [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * kStrip; first < std::min(end * kStrip, rows); first += kStrip) {
      const int64_t last = std::min(first + kStrip, rows);
      const int64_t whole = first + (last - first) / 4 * 4;
      for (int64_t c = 0; c < whole_columns; c += 4) {
        for (int64_t r = first; r < whole; r += 4)
          transpose_4x4(words + r * columns + c, columns, out + c * rows + r, rows);
      }
      for (int64_t r = first; r < last; ++r) {
        for (int64_t c = r < whole ? whole_columns : 0; c < columns; ++c)
          out[c * rows + r] = words[r * columns + c];
      }
    }
  });
}

void gptq_unpack_zeros(const uint32_t* qzeros, int64_t G, int64_t N, StoredZeros stored, uint8_t* out,
                       const Parallel& parallel) {
  const uint32_t add_to_word = stored == StoredZeros::word ? 0x11111111U : 0U;
  const uint8_t add = stored == StoredZeros::masked || stored == StoredZeros::unmasked ? 1 : 0;
  const uint8_t mask = stored == StoredZeros::unmasked ? 31 : 15;
  unpack_zeros(qzeros, G, N, out, parallel, [=](Words four, Bytes(&codes)[2]) {
    spread_gptq(four + add_to_word, codes);
    for (Bytes& some : codes)
      some = (some + add) & mask;
  });
}

void awq_unpack_zeros(const uint32_t* qzeros, int64_t G, int64_t N, uint8_t* out, const Parallel& parallel) {
  unpack_zeros(qzeros, G, N, out, parallel, spread_awq);
}

}  // namespace marlin::cpu
