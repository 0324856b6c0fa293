// Products in AMX bf16 tiles. One tile instruction adds the products of 32 k in fp32. Codes and activations are sums of
// bf16 terms ("parts"), and the products of all parts are added to the same tile. A code has one part, but three if
// bf16 cannot represent the codes of a table. An activation has one part in bf16, two in fp16, and three in fp32, or
// two if the caller accepts errors of 2^-17. After each segment, scale and zero point are applied in fp32. Tile
// products flush subnormals, so activations outside 2^-96 .. 2^120 go to the kernels that multiply in fp32
// (bf16_parts.h).
#include "csrc/cpu/kernels/kernel_table.h"

#if defined(__x86_64__) && defined(__linux__)

#include "csrc/cpu/target.h"

MARLIN_TARGET(MARLIN_AVX512 ",avx512bf16,avx512vbmi,amx-tile,amx-bf16")

#include "csrc/cpu/kernels/segments.h"
#include "csrc/cpu/x86/bf16_codes.h"
#include "csrc/cpu/x86/vec_avx512.h"

namespace marlin::cpu {

namespace {

constexpr int kTileRows = 16;

// Tells GCC 12 that memory is read. GCC 12 does not know that _tile_loadconfig and _tile_loadd read memory, so it could
// move or remove the stores before them.
void memory_is_read() {
  asm volatile("" ::: "memory");
}

// The numbers of the tile registers: activations (rows 0 to 15, rows 16 to 31), codes (columns 0 to 15, columns 16 to
// 31), and the four blocks of sums. They are macros, because GCC's intrinsics paste the number into the text of an
// instruction.
#define MARLIN_TILE_ROWS_0 0
#define MARLIN_TILE_ROWS_1 1
#define MARLIN_TILE_CODES_0 2
#define MARLIN_TILE_CODES_1 3
#define MARLIN_TILE_SUMS_00 4
#define MARLIN_TILE_SUMS_01 5
#define MARLIN_TILE_SUMS_10 6
#define MARLIN_TILE_SUMS_11 7

// Loads the tile configuration of the thread. Each task loads it at its start and releases it at its end, because other
// libraries load their own configuration.
void load_tiles(int segment, int rows) {
  struct alignas(64) {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  const int k = tile_k(segment);
  for (int tile = 0; tile < 8; ++tile) {
    const bool activations = tile <= MARLIN_TILE_ROWS_1;
    const bool codes = tile == MARLIN_TILE_CODES_0 || tile == MARLIN_TILE_CODES_1;
    const bool second = tile == MARLIN_TILE_ROWS_1 || tile >= MARLIN_TILE_SUMS_10;
    config.bytes[tile] = static_cast<uint16_t>(activations ? 2 * k : 64);
    config.rows[tile] =
        static_cast<uint8_t>(codes ? k / 2 : std::clamp(second ? rows - kTileRows : rows, 1, kTileRows));
  }
  // GCC assumes that _tile_loadconfig reads only 8 bytes, and would remove the other stores. The asm prevents this.
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

void release_tiles() {
  _tile_release();
}

template <class Decoded>
void unpack_tiles(const Step& s, float* panel) {
  const Decoded codes(s.values);
  auto* out = reinterpret_cast<__m512i*>(panel);
  const int segment = Decoded::scaled ? kChunk : s.segment;
  for (int begin = 0; begin < s.k; begin += segment) {
    const int end = std::min(begin + segment, s.k);
    for (int k = begin; k < end; k += tile_k(segment))
      out = codes.unpack(s, k, end, out);
  }
}

// The smallest activation (2^-68) and the smallest scale (2^-25) for a scaled panel. Their product with the smallest
// code, 2^-9 in E4M3, is 2^-102. The tiles flush values below 2^-126, so a flushed value is less than 2^-24 of that
// product.
constexpr uint32_t kMinScaledActivation = (127U - 68U) << 23, kMinScale = (127U - 25U) << 23;

// Returns true if every product of a code and its scale is large enough for the tiles and cannot overflow. NaN is
// allowed.
bool scales_representable(const float* scales, int64_t count) {
  constexpr uint32_t kScaleEnd = (127U + 119U) << 23;  // times the largest code, 448, this is less than 2^128
  constexpr uint32_t kInfinity = 255U << 23;
  uint32_t out_of_range = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(scales[i]) & 0x7FFFFFFFU;
    const bool outside = magnitude < kMinScale || (magnitude >= kScaleEnd && magnitude <= kInfinity);
    out_of_range |= static_cast<uint32_t>(magnitude != 0 && outside);
  }
  return out_of_range == 0;
}

// Adds scale * (tile sums - zero * sum of activations) to y [rows, 32]. For a format with a bias instead of a zero,
// adds scale * tile sums + bias * sum of activations.
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

// Returns true if the kernel multiplies this part of an activation with this part of a code. Part 0 is the largest.
// Products of two small parts are omitted, because they are less than 2^-24 of the product of activation and code.
constexpr bool counts(int part, int code_part) {
  return part + code_part < 3;
}

// s.x is [tile product][part][row tile][16 rows][k], in bf16.
template <int parts, int row_tiles, class Decoded>
void tile_step(const Step& s) {
  const Decoded codes(s.values);
  const int k_bytes = 2 * tile_k(s.segment);
  const int a_tile = kTileRows * k_bytes;
  const int b_tile = k_bytes / 4 * 64;
  const char* a = static_cast<const char*>(s.x);
  const char* b = reinterpret_cast<const char*>(s.panel);
  auto* next_panel = reinterpret_cast<__m512i*>(s.next_panel);
  alignas(64) float tiles[row_tiles * kTileRows * kStrip];
  // The sum of several segments. With small groups and a long K, direct addition of each segment to y would be one long
  // chain of roundings.
  alignas(64) float chunk[row_tiles * kTileRows * kStrip];
  const bool single = s.segment >= s.k;
  if (!single) std::memset(chunk, 0, sizeof(chunk));
  memory_is_read();
  for_each_segment(s, [&](int segment, int begin, int end) __attribute__((always_inline)) {
    _tile_zero(MARLIN_TILE_SUMS_00);
    _tile_zero(MARLIN_TILE_SUMS_01);
    if constexpr (row_tiles == 2) {
      _tile_zero(MARLIN_TILE_SUMS_10);
      _tile_zero(MARLIN_TILE_SUMS_11);
    }
    for (int k = begin; k < end; k += tile_k(s.segment), a += parts * row_tiles * a_tile) {
      for (int code_part = 0; code_part < Decoded::parts; ++code_part, b += 2 * b_tile) {
        _tile_loadd(MARLIN_TILE_CODES_0, b, 64);
        _tile_loadd(MARLIN_TILE_CODES_1, b + b_tile, 64);
        for (int part = 0; part < parts && counts(part, code_part); ++part) {
          const char* of_part = a + part * row_tiles * a_tile;
          _tile_loadd(MARLIN_TILE_ROWS_0, of_part, k_bytes);
          _tile_dpbf16ps(MARLIN_TILE_SUMS_00, MARLIN_TILE_ROWS_0, MARLIN_TILE_CODES_0);
          _tile_dpbf16ps(MARLIN_TILE_SUMS_01, MARLIN_TILE_ROWS_0, MARLIN_TILE_CODES_1);
          if constexpr (row_tiles == 2) {
            _tile_loadd(MARLIN_TILE_ROWS_1, of_part + a_tile, k_bytes);
            _tile_dpbf16ps(MARLIN_TILE_SUMS_10, MARLIN_TILE_ROWS_1, MARLIN_TILE_CODES_0);
            _tile_dpbf16ps(MARLIN_TILE_SUMS_11, MARLIN_TILE_ROWS_1, MARLIN_TILE_CODES_1);
          }
        }
      }
      if constexpr (Decoded::ahead_rows != 0) {
        if (s.next != nullptr) next_panel = codes.unpack(*s.next, k, end, next_panel);
        memory_is_read();  // keeps the decode here, between the tile products
      }
    }
    constexpr int kStride = kStrip * sizeof(float);
    _tile_stored(MARLIN_TILE_SUMS_00, tiles, kStride);
    _tile_stored(MARLIN_TILE_SUMS_01, tiles + 16, kStride);
    if constexpr (row_tiles == 2) {
      _tile_stored(MARLIN_TILE_SUMS_10, tiles + kTileRows * kStrip, kStride);
      _tile_stored(MARLIN_TILE_SUMS_11, tiles + kTileRows * kStrip + 16, kStride);
    }
    add_tiles(s, segment, s.rows, tiles, single ? s.y : chunk);
  });
  if (single) return;
  for (int i = 0; i < s.rows * kStrip; i += 16) {
    _mm512_storeu_ps(s.y + i, _mm512_add_ps(_mm512_loadu_ps(s.y + i), _mm512_loadu_ps(chunk + i)));
  }
}

// Packs one row of a chunk. Returns false if an activation is too small or too large.
template <int parts, uint32_t min>
bool pack_tiles(const PackRow& p) {
  const int tile = tile_k(p.segment);
  const auto whole_tile = static_cast<__mmask32>((uint64_t{1} << tile) - 1);
  const auto row_tiles = static_cast<int>(ceil_divide(p.rows, kTileRows));
  const int part_size = row_tiles * kTileRows * tile;
  auto* to = static_cast<uint16_t*>(p.out) + p.row / kTileRows * kTileRows * tile + p.row % kTileRows * tile;
  const PartsOfRow<parts, min> row(p);
  __mmask16 bad = 0;
  for (int begin = 0; begin < p.count; begin += p.segment) {
    const int end = std::min(begin + p.segment, p.count);
    for (int k = begin; k < end; k += tile, to += parts * part_size) {
      bad |= row.take(k, std::min(k + tile, end), [&](int part, __m512i pairs) {
        _mm512_mask_storeu_epi16(to + part * part_size, whole_tile, pairs);
      });
    }
  }
  return bad == 0;
}

template <int parts, class Decoded>
constexpr void add_codes(MatrixKernel& kernel, Codes of) {
  auto& steps = kernel.step[static_cast<size_t>(of)];
  for (int rows = 1; rows <= 2 * kTileRows; ++rows) {
    steps[static_cast<size_t>(rows)] =
        rows <= kTileRows ? &tile_step<parts, 1, Decoded> : &tile_step<parts, 2, Decoded>;
  }
  kernel.unpack[static_cast<size_t>(of)] = &unpack_tiles<Decoded>;
}

template <int parts, class Decoded>
constexpr MatrixKernel tile_kernel() {
  MatrixKernel kernel{};
  kernel.strip = kStrip;
  kernel.min_rows = 1;
  kernel.max_rows = 2 * kTileRows;
  kernel.row_unit = kTileRows;
  kernel.panel_bytes = 2 * Decoded::parts * kStrip * kChunk;
  kernel.ahead_rows = Decoded::ahead_rows;
  kernel.scaled_panel = Decoded::scaled;
  kernel.representable = &scales_representable;
  kernel.row_bytes = 2 * parts * kChunk;
  constexpr uint32_t min = Decoded::scaled ? kMinScaledActivation : kMinActivation;
  kernel.pack = &pack_tiles<parts, min>;
  kernel.begin = &load_tiles;
  kernel.end = &release_tiles;
  for (const Codes of : {Codes::integer, Codes::e2m1, Codes::table})
    add_codes<parts, Decoded>(kernel, of);
  return kernel;
}

template <int parts>
constexpr MatrixKernel scaled_kernel() {
  MatrixKernel kernel = tile_kernel<parts, Scaled<CodesInParts<1>>>();
  add_codes<parts, Scaled<ByteCodes<Codes::e4m3>>>(kernel, Codes::e4m3);
  return kernel;
}

template <int parts>
constexpr MatrixKernel exact_kernel() {
  MatrixKernel kernel = tile_kernel<parts, CodesInParts<1>>();
  add_codes<parts, ByteCodes<Codes::byte>>(kernel, Codes::byte);
  add_codes<parts, ByteCodes<Codes::e4m3>>(kernel, Codes::e4m3);
  add_codes<parts, ByteCodes<Codes::planes>>(kernel, Codes::planes);
  return kernel;
}

template <int parts>
constexpr MatrixKernel rounded_kernel() {
  MatrixKernel kernel = tile_kernel<parts, Rounded<Codes::table>>();
  kernel.scaled_panel = false;
  kernel.rounded_panel = true;
  kernel.pack = &pack_tiles<parts, kMinActivation>;
  add_codes<parts, Rounded<Codes::byte>>(kernel, Codes::byte);
  add_codes<parts, Rounded<Codes::e4m3>>(kernel, Codes::e4m3);
  add_codes<parts, Rounded<Codes::planes>>(kernel, Codes::planes);
  return kernel;
}

template <int parts>
constexpr AmxKernels kTiles{exact_kernel<parts>(), scaled_kernel<parts>(), tile_kernel<parts, CodesInParts<3>>(),
                            parts == 1 ? rounded_kernel<1>() : MatrixKernel{}};

}  // namespace

const AmxKernels* amx_kernels(int parts) {
  return parts == 1 ? &kTiles<1> : parts == 2 ? &kTiles<2> : &kTiles<3>;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#endif
