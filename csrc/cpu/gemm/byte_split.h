// Activations as planes of signed bytes: whole numbers of 23 bits in units of a power of two that the largest of a
// segment fixes. What is rounded, by at most 2^-22 of the largest, is an activation below 2^-11 (fp16) or 2^-14 (bf16)
// of it, and the last bits of fp32 ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernel_set.h"

namespace marlin::cpu {

inline constexpr int kPlanes = 3;
inline constexpr int kHead = kPlanes + 1;         // numbers a row and segment: the unit, and the sum of each plane
inline constexpr int kMaxSegments = kChunk / 16;  // the least group is 16, unless it is all of K

// value[k] = unit * (bytes[0][k] * 2^16 + bytes[1][k] * 2^8 + bytes[2][k])
struct Planes {
  float unit;
  int32_t sums[kPlanes];
  int8_t bytes[kPlanes][kChunk];
};

// The unit of a segment and the units in 1, from the bits of its largest magnitude. False where that is not finite or
// lies outside 2^-100 .. 2^120. Here and below V keeps instances for different instruction sets apart.
template <class V>
bool find_unit(uint32_t largest, float& unit, float& units) {
  constexpr uint32_t kLeast = (127U - 100U) << 23, kBeyond = (127U + 120U) << 23;
  if (largest != 0 && (largest < kLeast || largest >= kBeyond)) return false;
  // 2^21 units or more and fewer than 2^22 make the largest.
  const uint32_t exponent = largest >> 23;
  unit = largest == 0 ? 0.F : std::bit_cast<float>((exponent - 21) << 23);
  units = largest == 0 ? 0.F : std::bit_cast<float>((2 * 127 + 21 - exponent) << 23);
  return true;
}

// False where find_unit is.
template <class V>
bool split_planes(const float* values, int count, Planes& planes) {
  uint32_t largest = 0;
  for (int k = 0; k < count; ++k)
    largest = std::max(largest, std::bit_cast<uint32_t>(values[k]) & 0x7FFFFFFFU);
  float units;
  if (!find_unit<V>(largest, planes.unit, units)) return false;
  int32_t sums[kPlanes] = {};
  for (int k = 0; k < count; ++k) {
    constexpr float kWhole = 0x1.8p23F;  // added, it leaves the nearest whole number in the lower bits
    const int32_t whole = std::bit_cast<int32_t>(values[k] * units + kWhole) - std::bit_cast<int32_t>(kWhole);
    const auto low = static_cast<int8_t>(whole);
    const int32_t rest = (whole - low) >> 8;
    const auto middle = static_cast<int8_t>(rest);
    const auto high = static_cast<int8_t>((rest - middle) >> 8);
    planes.bytes[0][k] = high;
    planes.bytes[1][k] = middle;
    planes.bytes[2][k] = low;
    sums[0] += high;
    sums[1] += middle;
    sums[2] += low;
  }
  std::copy_n(sums, kPlanes, planes.sums);
  return true;
}

// 32-bit operands of `rows` rows and 8 k, even and odd k of each plane, in whole vectors.
template <int vector>
constexpr int dots_of(int rows) {
  return (2 * kPlanes * rows + vector - 1) / vector * vector;
}

template <int vector>
constexpr int planes_row_bytes() {
  return 4 * (kHead * kMaxSegments + dots_of<vector>(1) * kChunk / 8);
}

// To [segment][kHead, rows], then [k/8][even and odd, plane, rows].
template <class V, int vector>
bool pack_planes(const PackRow& p) {
  auto* head = static_cast<int32_t*>(p.out) + p.row;
  auto* to = static_cast<int32_t*>(p.out) + kMaxSegments * kHead * p.rows + p.row;
  for (int begin = 0; begin < p.count; begin += p.segment, head += kHead * p.rows) {
    const int count = std::min(p.segment, p.count - begin);
    Planes planes;
    if (!split_planes<V>(p.values + begin, count, planes)) return false;
    head[0] = std::bit_cast<int32_t>(planes.unit);
    for (int plane = 0; plane < kPlanes; ++plane)
      head[(1 + plane) * p.rows] = planes.sums[plane];
    for (int k = 0; k < count; k += 8, to += dots_of<vector>(p.rows)) {
      for (int odd = 0; odd < 2; ++odd) {
        for (int plane = 0; plane < kPlanes; ++plane) {
          int8_t four[4];
          for (int i = 0; i < 4; ++i)
            four[i] = planes.bytes[plane][k + 2 * i + odd];
          std::memcpy(to + (odd * kPlanes + plane) * p.rows, four, sizeof four);
        }
      }
    }
  }
  return true;
}

// step_of gives the step for the codes and the number of rows it is instantiated for.
template <int max_rows, class StepOf>
constexpr MatrixKernel planes_kernel(int strip, int row_bytes, bool (*pack)(const PackRow&), StepOf step_of) {
  MatrixKernel kernel{};
  kernel.strip = strip;
  kernel.min_rows = 1;
  kernel.max_rows = max_rows;
  kernel.row_unit = 1;
  kernel.row_bytes = row_bytes;
  kernel.pack = pack;
  auto fill = [&]<Codes codes, int... i>(std::integer_sequence<int, i...>) {
    ((kernel.step[static_cast<size_t>(codes)][static_cast<size_t>(1 + i)] =
          step_of.template operator()<codes, 1 + i>()),
     ...);
  };
  fill.template operator()<Codes::integer>(std::make_integer_sequence<int, max_rows>{});
  fill.template operator()<Codes::e2m1>(std::make_integer_sequence<int, max_rows>{});
  return kernel;
}

}  // namespace marlin::cpu
