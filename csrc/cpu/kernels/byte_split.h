// Splits each activation into three signed bytes, which together hold an integer of 23 bits. The unit of the integers
// is a power of two that depends on the largest activation of the segment. The error is at most 2^-22 of that largest
// activation. fp32 activations therefore lose low bits. A 16-bit activation loses bits only if it is smaller than 2^-11
// (fp16) or 2^-14 (bf16) of the largest.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "csrc/cpu/kernels/kernel_table.h"

namespace marlin::cpu {

inline constexpr int kSplitBytes = 3;
// Each row of a segment has a header of four numbers: the unit, and the sums over k of the first, second and third
// byte.
inline constexpr int kSegmentHeader = kSplitBytes + 1;
inline constexpr int kMaxSegments = kChunk / 16;  // the smallest group is 16, unless K itself is smaller

// value[k] = unit * (bytes[0][k] * 2^16 + bytes[1][k] * 2^8 + bytes[2][k])
struct SplitSegment {
  float unit;
  int32_t sums[kSplitBytes];
  int8_t bytes[kSplitBytes][kChunk];
};

// Sets `unit` to the unit of a segment and `units` to 1 / unit. `largest` holds the bits of the segment's largest
// magnitude. Returns false if that magnitude is not finite or lies outside 2^-100 .. 2^120. Here and below, the
// template argument V gives the instances for different instruction sets different symbols.
template <class V>
bool find_unit(uint32_t largest, float& unit, float& units) {
  constexpr uint32_t kMin = (127U - 100U) << 23, kEnd = (127U + 120U) << 23;
  if (largest != 0 && (largest < kMin || largest >= kEnd)) return false;
  // The largest activation is at least 2^21 units and less than 2^22.
  const uint32_t exponent = largest >> 23;
  unit = largest == 0 ? 0.F : std::bit_cast<float>((exponent - 21) << 23);
  units = largest == 0 ? 0.F : std::bit_cast<float>((2 * 127 + 21 - exponent) << 23);
  return true;
}

// Returns false if find_unit does.
template <class V>
bool split_segment(const float* values, int count, SplitSegment& split) {
  uint32_t largest = 0;
  for (int k = 0; k < count; ++k)
    largest = std::max(largest, std::bit_cast<uint32_t>(values[k]) & 0x7FFFFFFFU);
  float units;
  if (!find_unit<V>(largest, split.unit, units)) return false;
  int32_t sums[kSplitBytes] = {};
  for (int k = 0; k < count; ++k) {
    constexpr float kWhole = 0x1.8p23F;  // adding this leaves the nearest integer in the low bits
    const int32_t whole = std::bit_cast<int32_t>(values[k] * units + kWhole) - std::bit_cast<int32_t>(kWhole);
    const auto low = static_cast<int8_t>(whole);
    const int32_t rest = (whole - low) >> 8;
    const auto middle = static_cast<int8_t>(rest);
    const auto high = static_cast<int8_t>((rest - middle) >> 8);
    split.bytes[0][k] = high;
    split.bytes[1][k] = middle;
    split.bytes[2][k] = low;
    sums[0] += high;
    sums[1] += middle;
    sums[2] += low;
  }
  std::copy_n(sums, kSplitBytes, split.sums);
  return true;
}

// Returns the number of 32-bit operands that hold 8 k of `rows` rows, rounded up to a multiple of `operands_per_load`.
// An operand holds one of the three bytes of each of four k: the even or the odd k or, for codes of 8 bits, the first
// or the last four.
template <int operands_per_load>
constexpr int operands_of(int rows) {
  return static_cast<int>(round_up(2 * kSplitBytes * rows, operands_per_load));
}

template <int operands_per_load>
constexpr int split_row_bytes() {
  return 4 * (kSegmentHeader * kMaxSegments + operands_of<operands_per_load>(1) * kChunk / 8);
}

// Packs one row of a chunk. The headers come first, [segment][kSegmentHeader, rows]; the bytes follow,
// [k/8][half of the k][byte][rows], or with `odd_last` [k/8][byte][rows][half of the k].
template <class V, int operands_per_load, bool odd_last = false>
bool pack_split(const PackRow& p) {
  auto* header = static_cast<int32_t*>(p.out) + p.row;
  auto* to = static_cast<int32_t*>(p.out) + kMaxSegments * kSegmentHeader * p.rows;
  for (int begin = 0; begin < p.count; begin += p.segment, header += kSegmentHeader * p.rows) {
    const int count = std::min(p.segment, p.count - begin);
    SplitSegment split;
    if (!split_segment<V>(p.values + begin, count, split)) return false;
    header[0] = std::bit_cast<int32_t>(split.unit);
    for (int byte = 0; byte < kSplitBytes; ++byte)
      header[(1 + byte) * p.rows] = split.sums[byte];
    for (int k = 0; k < count; k += 8, to += operands_of<operands_per_load>(p.rows)) {
      for (int odd = 0; odd < 2; ++odd) {
        for (int byte = 0; byte < kSplitBytes; ++byte) {
          int8_t four[4];
          for (int i = 0; i < 4; ++i)
            four[i] = split.bytes[byte][k + (p.byte_codes ? i + 4 * odd : 2 * i + odd)];
          const int operand = byte * p.rows + p.row;
          std::memcpy(to + (odd_last ? 2 * operand + odd : odd * kSplitBytes * p.rows + operand), four, sizeof four);
        }
      }
    }
  }
  return true;
}

}  // namespace marlin::cpu
