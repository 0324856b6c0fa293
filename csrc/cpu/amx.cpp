// AMX bf16 tiles with exact codes: a tile product adds 32 k of bf16 pairs in fp32. Codes are exact in bf16; activations
// are split into bf16 parts (bf16 one, fp16 two, fp32 three, or two where the caller accepts 2^-17) that add to the
// same tile; scale and zero point follow in fp32 after each segment. Tile products flush subnormals, so activations
// outside 2^-100 .. 2^120 are left to the fp32 kernels.
#include "kernel_set.h"

#if defined(__x86_64__) && defined(__linux__)

#include "target.h"

MARLIN_TARGET(MARLIN_AVX512 ",amx-tile,amx-bf16")

#include "bf16_parts.h"
#include "vec_avx512.h"

namespace marlin::cpu {

namespace {

constexpr int kTileRows = 16;
constexpr int kStrip = 32;  // two tiles of 16 columns

// k of one tile product: a short segment gets a short tile, so that no work goes into padding.
int tile_k(int segment) {
  return segment < 32 ? segment : 32;
}

// GCC 12's _tile_loadconfig and _tile_loadd do not say that they read memory.
void memory_is_read() {
  asm volatile("" ::: "memory");
}

// Tiles 0 and 1 hold activations, 2 and 3 codes, 4 to 7 sums. Tile configuration is state of the thread: loaded at the
// start of a task, released at its end, because other libraries expect their own.
void load_tiles(int segment) {
  struct alignas(64) {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  const int k = tile_k(segment);
  for (int tile = 0; tile < 8; ++tile) {
    const bool activations = tile < 2, codes = tile == 2 || tile == 3;
    config.bytes[tile] = static_cast<uint16_t>(activations ? 2 * k : 64);
    config.rows[tile] = static_cast<uint8_t>(codes ? k / 2 : kTileRows);
  }
  // GCC's _tile_loadconfig declares only 8 bytes as read: with the address in an asm the other stores must stay.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

void release_tiles() {
  _tile_release();
}

// panel: [tile product][2 column tiles][k/2][16 columns] pairs of bf16. Inside 8 k the pairs are (0, 4), (1, 5), (2,
// 6), (3, 7), as one shifted word of packed codes gives them.
void unpack_tiles(const Step& s, float* panel) {
  const __m512i table = bf16_table(s.values);
  const int words_of_tile = tile_k(s.segment) / 8;
  auto* out = reinterpret_cast<__m512i*>(panel);
  for (int begin = 0; begin < s.k; begin += s.segment) {
    const int end = begin + s.segment < s.k ? begin + s.segment : s.k;
    for (int k = begin; k < end; k += 8 * words_of_tile) {
      for (int column = 0; column < kStrip; column += 16) {
        for (int r = 0; r < words_of_tile; ++r, out += 4) {
          if (k + 8 * r >= end) {
            for (int j = 0; j < 4; ++j)
              _mm512_storeu_si512(out + j, _mm512_setzero_si512());
            continue;
          }
          const int64_t at = (k / 8 + r) * s.ld_words + column;
          const __m512i word = Avx512::load_words(s.words + at);
          __builtin_prefetch(s.ahead + at, 0, 2);
          _mm512_storeu_si512(out, _mm512_permutexvar_epi16(word, table));
          _mm512_storeu_si512(out + 1, _mm512_permutexvar_epi16(_mm512_srli_epi32(word, 4), table));
          _mm512_storeu_si512(out + 2, _mm512_permutexvar_epi16(_mm512_srli_epi32(word, 8), table));
          _mm512_storeu_si512(out + 3, _mm512_permutexvar_epi16(_mm512_srli_epi32(word, 12), table));
        }
      }
    }
  }
}

// The same with each code multiplied by the scale of its group. An E2M1 code has two significant bits and an E4M3 scale
// four, an E8M0 scale one: the product is exact in bf16.
void unpack_scaled_tiles(const Step& s, float* panel) {
  const __m512i table = bf16_table(s.values);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000U));
  auto* out = reinterpret_cast<__m512i*>(panel);
  const int end = (s.k + 31) / 32 * 4;
  for (int tile = 0; tile < end; tile += 4) {
    for (int column = 0; column < kStrip; column += 16) {
      for (int r = tile; r < tile + 4; ++r, out += 4) {
        if (8 * r >= s.k) {
          for (int j = 0; j < 4; ++j)
            _mm512_storeu_si512(out + j, _mm512_setzero_si512());
          continue;
        }
        const int64_t at = r * s.ld_words + column;
        const __m512i word = Avx512::load_words(s.words + at);
        __builtin_prefetch(s.ahead + at, 0, 2);
        const __m512 scale = _mm512_loadu_ps(s.scales + 8 * r / s.segment * s.ld_scales + column);
        for (int j = 0; j < 4; ++j) {
          const __m512i codes = _mm512_permutexvar_epi16(_mm512_srli_epi32(word, 4 * static_cast<unsigned>(j)), table);
          const __m512 low = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(codes, 16)), scale);
          const __m512 high = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(codes, upper)), scale);
          const __m512i low_bits = _mm512_srli_epi32(_mm512_castps_si512(low), 16);
          _mm512_storeu_si512(out + j, _mm512_mask_blend_epi16(0xAAAAAAAA, low_bits, _mm512_castps_si512(high)));
        }
      }
    }
  }
}

// Whether products with activations of pack_tiles' range stay clear of subnormals, which tile products flush: 2^-100
// times half of 2^-25 is the least normal number. NaN is representable.
bool scales_representable(const float* scales, int64_t count) {
  constexpr uint32_t kLeast = (127U - 25U) << 23;
  uint32_t strange = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(scales[i]) & 0x7FFFFFFFU;
    strange |= static_cast<uint32_t>(magnitude != 0) & static_cast<uint32_t>(magnitude < kLeast);
  }
  return strange == 0;
}

// y [rows, 32] += scale * (tile sums - zero * sum of activations), or with a bias in place of the zero point.
void add_tiles(const Step& s, int segment, int rows, const float* tiles, float* y) {
  const float* scales = s.scales + segment * s.ld_scales;
  const __m512 scale[2] = {_mm512_loadu_ps(scales), _mm512_loadu_ps(scales + 16)};
  __m512 zero[2] = {};
  if (s.role != ZerosRole::none) {
    const float* zeros = s.zeros + segment * s.ld_scales;
    for (int c = 0; c < 2; ++c)
      zero[c] = _mm512_loadu_ps(zeros + 16 * c);
  }
  for (int i = 0; i < rows; ++i) {
    const __m512 sum = _mm512_set1_ps(s.role == ZerosRole::none ? 0.F : s.sums[segment * s.ld_sums + i]);
    for (int c = 0; c < 2; ++c) {
      float* at = y + i * kStrip + 16 * c;
      __m512 tile = _mm512_loadu_ps(tiles + i * kStrip + 16 * c);
      if (s.role == ZerosRole::zero_point) tile = _mm512_fnmadd_ps(zero[c], sum, tile);
      __m512 total = _mm512_fmadd_ps(tile, scale[c], _mm512_loadu_ps(at));
      if (s.role == ZerosRole::bias) total = _mm512_fmadd_ps(zero[c], sum, total);
      _mm512_storeu_ps(at, total);
    }
  }
}

// x: [tile product][part][row tile][16 rows][k] bf16.
template <int parts, int row_tiles>
void tile_step(const Step& s) {
  const int k_bytes = 2 * tile_k(s.segment);
  const int a_tile = kTileRows * k_bytes;
  const int b_tile = k_bytes / 4 * 64;
  const char* a = static_cast<const char*>(s.x);
  const char* b = reinterpret_cast<const char*>(s.panel);
  alignas(64) float tiles[row_tiles * kTileRows * kStrip];
  // Several segments are added up on their own first: a long K in small groups would be one chain of roundings.
  alignas(64) float chunk[row_tiles * kTileRows * kStrip];
  const bool single = s.segment >= s.k;
  if (!single) std::memset(chunk, 0, sizeof(chunk));
  memory_is_read();
  for (int begin = 0, segment = 0; begin < s.k; begin += s.segment, ++segment) {
    const int end = begin + s.segment < s.k ? begin + s.segment : s.k;
    _tile_zero(4);
    _tile_zero(5);
    if constexpr (row_tiles == 2) {
      _tile_zero(6);
      _tile_zero(7);
    }
    for (int k = begin; k < end; k += tile_k(s.segment), b += 2 * b_tile) {
      _tile_loadd(2, b, 64);
      _tile_loadd(3, b + b_tile, 64);
      for (int part = 0; part < parts; ++part, a += row_tiles * a_tile) {
        _tile_loadd(0, a, k_bytes);
        _tile_dpbf16ps(4, 0, 2);
        _tile_dpbf16ps(5, 0, 3);
        if constexpr (row_tiles == 2) {
          _tile_loadd(1, a + a_tile, k_bytes);
          _tile_dpbf16ps(6, 1, 2);
          _tile_dpbf16ps(7, 1, 3);
        }
      }
    }
    constexpr int kStride = kStrip * sizeof(float);
    _tile_stored(4, tiles, kStride);
    _tile_stored(5, tiles + 16, kStride);
    if constexpr (row_tiles == 2) {
      _tile_stored(6, tiles + kTileRows * kStrip, kStride);
      _tile_stored(7, tiles + kTileRows * kStrip + 16, kStride);
    }
    add_tiles(s, segment, s.rows, tiles, single ? s.y : chunk);
  }
  if (single) return;
  for (int i = 0; i < s.rows * kStrip; i += 16) {
    _mm512_storeu_ps(s.y + i, _mm512_add_ps(_mm512_loadu_ps(s.y + i), _mm512_loadu_ps(chunk + i)));
  }
}

// Eight bf16 in the order of unpack_tiles' pairs.
__m128i paired(__m128i bits) {
  return _mm_shuffle_epi8(bits, _mm_set_epi8(15, 14, 7, 6, 13, 12, 5, 4, 11, 10, 3, 2, 9, 8, 1, 0));
}

template <int parts>
bool pack_tiles(const PackRow& p) {
  alignas(64) uint16_t bits[parts][kChunk];
  const bool good = split_bf16<parts>(p.values, p.count, bits);
  const int tile = tile_k(p.segment);
  const int row_tiles = (p.rows + kTileRows - 1) / kTileRows;
  const int part_size = row_tiles * kTileRows * tile;
  auto* to = static_cast<uint16_t*>(p.out) + p.row / kTileRows * kTileRows * tile + p.row % kTileRows * tile;
  for (int begin = 0; begin < p.count; begin += p.segment) {
    const int end = begin + p.segment < p.count ? begin + p.segment : p.count;
    for (int k = begin; k < end; k += tile) {
      for (int part = 0; part < parts; ++part, to += part_size) {
        for (int i = 0; i < tile; i += 8) {
          const auto* from = reinterpret_cast<const __m128i*>(bits[part] + k + i);
          const __m128i eight = k + i < end ? paired(_mm_load_si128(from)) : _mm_setzero_si128();
          _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), eight);
        }
      }
    }
  }
  return good;
}

template <int parts, bool scaled>
constexpr MatrixKernel tile_kernel() {
  MatrixKernel kernel{};
  kernel.strip = kStrip;
  kernel.min_rows = 1;
  kernel.max_rows = 2 * kTileRows;
  kernel.row_unit = kTileRows;
  kernel.from_panel = true;
  kernel.scaled_panel = scaled;
  kernel.representable = &scales_representable;
  kernel.row_bytes = 2 * parts * kChunk;
  kernel.pack = &pack_tiles<parts>;
  kernel.begin = &load_tiles;
  kernel.end = &release_tiles;
  for (auto& steps : kernel.step) {
    for (int rows = 1; rows <= 2 * kTileRows; ++rows) {
      steps[static_cast<size_t>(rows)] = rows <= kTileRows ? &tile_step<parts, 1> : &tile_step<parts, 2>;
    }
  }
  for (auto& unpack : kernel.unpack)
    unpack = scaled ? &unpack_scaled_tiles : &unpack_tiles;
  return kernel;
}

template <bool scaled>
constexpr std::array<MatrixKernel, 3> kTiles{tile_kernel<1, scaled>(), tile_kernel<2, scaled>(),
                                             tile_kernel<3, scaled>()};

}  // namespace

const MatrixKernel* amx_kernel(int parts) {
  return &kTiles<false>[static_cast<size_t>(parts - 1)];
}

const MatrixKernel* amx_scaled_kernel(int parts) {
  return &kTiles<true>[static_cast<size_t>(parts - 1)];
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#else

namespace marlin::cpu {
const MatrixKernel* amx_kernel(int) {
  return nullptr;
}
const MatrixKernel* amx_scaled_kernel(int) {
  return nullptr;
}
}  // namespace marlin::cpu

#endif
