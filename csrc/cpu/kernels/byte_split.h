// Splits each activation into signed bytes.
//
// Three bytes together hold the activation as a multiple of a unit, an integer of 23 bits. The unit is a power of two
// that depends on the largest activation of the segment. The error is at most 2^-22 of that largest activation, so fp32
// activations lose low bits. A 16-bit activation loses bits only if it is smaller than 2^-11 (fp16) or 2^-14 (bf16) of
// the largest.
//
// A single byte holds the activation rounded to a multiple of 1/127 of the largest activation of its unit group. A unit
// group has at most 32 k of one segment. Callers request this rounding with activations="int8".
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "csrc/cpu/kernels/kernel_table.h"

namespace marlin::cpu {

// The largest number of k that share a unit. A unit group never contains k of two segments.
template <int bytes>
inline constexpr int kUnitGroup = bytes == 1 ? 32 : kChunk;
// The number of 32-bit header fields for each row of a unit group: the unit, and for each byte the sum over k.
template <int bytes>
inline constexpr int kHeader = bytes + 1;
inline constexpr int kMaxGroups = kChunk / 16;  // the smallest group is 16, unless K itself is smaller

// Returns the end of the unit group that begins at `begin`.
template <class V>
int unit_end(const PackRow& p, int begin) {
  return std::min({begin + kUnitGroup<V::kBytes>, (begin / p.segment + 1) * p.segment, p.count});
}

// value[k] = unit * (bytes[0][k] * 2^16 + bytes[1][k] * 2^8 + bytes[2][k]), or unit * bytes[0][k] for a single byte
template <int bytes_>
struct SplitGroup {
  float unit;
  int32_t sums[bytes_];
  int8_t bytes[bytes_][kUnitGroup<bytes_>];
};

inline constexpr float kWhole = 0x1.8p23F;  // after this number is added to a float, the low bits hold the nearest
                                            // integer

// Sets `unit` to the unit of a group and `units` to 1 / unit. `largest` is the group's largest magnitude, as bits.
// Returns false if this magnitude is not finite or lies outside 2^-100 .. 2^120. Here and below, the template argument
// V gives different symbols to the instances for different instruction sets.
template <class V>
bool find_unit(uint32_t largest, float& unit, float& units) {
  constexpr uint32_t kMin = (127U - 100U) << 23, kEnd = (127U + 120U) << 23;
  if (largest != 0 && (largest < kMin || largest >= kEnd)) return false;
  if constexpr (V::kBytes == 1) {
    const float size = std::bit_cast<float>(largest);
    unit = size / 127.F;
    units = largest == 0 ? 0.F : 127.F / size;
    return true;
  }
  // The largest activation is at least 2^21 units and less than 2^22 units.
  const uint32_t exponent = largest >> 23;
  unit = largest == 0 ? 0.F : std::bit_cast<float>((exponent - 21) << 23);
  units = largest == 0 ? 0.F : std::bit_cast<float>((2 * 127 + 21 - exponent) << 23);
  return true;
}

// Returns false if find_unit returns false. With a single byte, replaces the values by the rounded values.
template <class V>
bool split_group(float* values, int count, SplitGroup<V::kBytes>& split) {
  uint32_t largest = 0;
  for (int k = 0; k < count; ++k)
    largest = std::max(largest, std::bit_cast<uint32_t>(values[k]) & 0x7FFFFFFFU);
  float units;
  if (!find_unit<V>(largest, split.unit, units)) return false;
  int32_t sums[V::kBytes] = {};
  for (int k = 0; k < count; ++k) {
    int32_t rest = std::bit_cast<int32_t>(std::fma(values[k], units, kWhole)) - std::bit_cast<int32_t>(kWhole);
    if constexpr (V::kBytes == 1) values[k] = split.unit * static_cast<float>(rest);
    for (int byte = V::kBytes - 1; byte >= 0; --byte) {
      const auto low = static_cast<int8_t>(rest);
      split.bytes[byte][k] = low;
      sums[byte] += low;
      rest = (rest - low) >> 8;
    }
  }
  std::copy_n(sums, V::kBytes, split.sums);
  return true;
}

// Returns the number of 32-bit operands that hold 8 k of `rows` rows, rounded up to a multiple of V::kOperandsPerLoad.
// An operand contains one byte of each of four k: the even k or the odd k, or for codes of 8 bits the first four or the
// last four k.
template <class V>
constexpr int operands_of(int rows) {
  return static_cast<int>(round_up(2 * V::kBytes * rows, V::kOperandsPerLoad));
}

template <class V>
constexpr int split_row_bytes() {
  return 4 * (kHeader<V::kBytes> * kMaxGroups + operands_of<V>(1) * kChunk / 8);
}

// Packs one row of a chunk. The headers [unit group][kHeader, rows] come first. The bytes follow as [k/8][half of the
// k][byte][rows], or with `odd_last` as [k/8][byte][rows][half of the k].
template <class V, bool odd_last = false>
bool pack_split(const PackRow& p) {
  constexpr int kBytes = V::kBytes;
  auto* header = static_cast<int32_t*>(p.out) + p.row;
  auto* to = static_cast<int32_t*>(p.out) + kMaxGroups * kHeader<kBytes> * p.rows;
  for (int begin = 0, end; begin < p.count; begin = end, header += kHeader<kBytes> * p.rows) {
    end = unit_end<V>(p, begin);
    SplitGroup<kBytes> split;
    if (!split_group<V>(p.values + begin, end - begin, split)) return false;
    header[0] = std::bit_cast<int32_t>(split.unit);
    for (int byte = 0; byte < kBytes; ++byte)
      header[(1 + byte) * p.rows] = split.sums[byte];
    for (int k = 0; k < end - begin; k += 8, to += operands_of<V>(p.rows)) {
      for (int odd = 0; odd < 2; ++odd) {
        for (int byte = 0; byte < kBytes; ++byte) {
          int8_t four[4];
          for (int i = 0; i < 4; ++i)
            four[i] = split.bytes[byte][k + (p.byte_codes ? i + 4 * odd : 2 * i + odd)];
          const int operand = byte * p.rows + p.row;
          std::memcpy(to + (odd_last ? 2 * operand + odd : odd * kBytes * p.rows + operand), four, sizeof four);
        }
      }
    }
  }
  return true;
}

}  // namespace marlin::cpu
