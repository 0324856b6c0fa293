// Emulates AMX tiles in plain C++, so that csrc/cpu/x86/amx.cpp can be tested on machines without AMX. The compiler's
// -include option includes this file before amx.cpp. It follows the pseudocode of TILELOADD, TILESTORED and TDPBF16PS
// in Intel's instruction set reference (volume 2): even and odd products have separate sums, subnormal inputs and
// results are flushed, and sums are rounded to nearest. The program stops on anything that the processor would refuse
// or that amx.cpp must not rely on.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace marlin::test {

struct Tile {
  uint8_t bytes[16][64];
};

struct Tiles {
  bool configured = false;
  uint16_t row_bytes[8];
  uint8_t rows[8];
  Tile tile[8];
};

inline thread_local Tiles tiles;

inline void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "FAILED emulated AMX: %s\n", what);
  std::abort();
}

inline void load_config(const void* memory) {
  const auto* bytes = static_cast<const uint8_t*>(memory);
  require(bytes[0] == 1 && bytes[1] == 0, "palette 1, start row 0");
  tiles = {};
  tiles.configured = true;
  for (int i = 0; i < 8; ++i) {
    std::memcpy(&tiles.row_bytes[i], bytes + 16 + 2 * i, 2);
    tiles.rows[i] = bytes[48 + i];
    require(tiles.row_bytes[i] <= 64 && tiles.rows[i] <= 16, "a tile of at most 16 rows of 64 bytes");
    require(tiles.row_bytes[i] > 0 && tiles.rows[i] > 0, "a configured tile has rows and columns");
  }
}

inline void release() {
  tiles = {};
}

inline void zero(int tile) {
  require(tiles.configured, "tiles are configured before use");
  tiles.tile[tile] = {};
}

inline void load(int tile, const void* base, int64_t stride) {
  zero(tile);
  for (int row = 0; row < tiles.rows[tile]; ++row)
    std::memcpy(tiles.tile[tile].bytes[row], static_cast<const char*>(base) + row * stride, tiles.row_bytes[tile]);
}

inline void store(int tile, void* base, int64_t stride) {
  require(tiles.configured, "tiles are configured before use");
  for (int row = 0; row < tiles.rows[tile]; ++row)
    std::memcpy(static_cast<char*>(base) + row * stride, tiles.tile[tile].bytes[row], tiles.row_bytes[tile]);
}

inline float flushed(float v) {
  return std::fpclassify(v) == FP_SUBNORMAL ? std::copysign(0.F, v) : v;
}

inline float bf16_at(const Tile& tile, int row, int element) {
  uint16_t bits;
  std::memcpy(&bits, tile.bytes[row] + 2 * element, 2);
  return flushed(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16));
}

inline void add_products(int to, int a, int b) {
  require(tiles.configured, "tiles are configured before use");
  const int pairs = tiles.row_bytes[a] / 4;
  require(tiles.rows[to] == tiles.rows[a], "the sums have as many rows as the first factor");
  require(tiles.row_bytes[to] == tiles.row_bytes[b], "the sums have as many columns as the second factor");
  require(tiles.row_bytes[a] % 4 == 0 && pairs == tiles.rows[b], "both factors have the same k");
  for (int m = 0; m < tiles.rows[to]; ++m) {
    for (int n = 0; n < tiles.row_bytes[to] / 4; ++n) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < pairs; ++k) {
        even = flushed(std::fma(bf16_at(tiles.tile[a], m, 2 * k), bf16_at(tiles.tile[b], k, 2 * n), even));
        odd = flushed(std::fma(bf16_at(tiles.tile[a], m, 2 * k + 1), bf16_at(tiles.tile[b], k, 2 * n + 1), odd));
      }
      std::memcpy(&sum, tiles.tile[to].bytes[m] + 4 * n, 4);
      sum = flushed(flushed(sum) + flushed(even + odd));
      std::memcpy(tiles.tile[to].bytes[m] + 4 * n, &sum, 4);
    }
  }
}

}  // namespace marlin::test

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig marlin::test::load_config
#define _tile_release marlin::test::release
#define _tile_loadd marlin::test::load
#define _tile_stored marlin::test::store
#define _tile_zero marlin::test::zero
#define _tile_dpbf16ps marlin::test::add_products
