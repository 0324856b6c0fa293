// AVX512-VNNI dot products of bytes: activations as three planes of signed bytes (planes.h), codes as small
// unsigned whole numbers. Sums are exact in 32 bits, and four products cost one instruction. Activations that planes do
// not hold are left to the fp32 kernels.
#include "kernel_set.h"

#if defined(__x86_64__)

#include "planes.h"
#include "target.h"

MARLIN_TARGET(MARLIN_AVX512 ",avx512vnni")

#include "gemm_kernel.h"
#include "vec_avx512.h"

namespace marlin::cpu {

namespace {

// The same vectors under a name of their own: nothing here may share a symbol with code for plain AVX-512.
struct Avx512Vnni : Avx512 {};

using V = Avx512Vnni;

// Even and odd codes of packed words as unsigned bytes. A byte stands for (byte - offset) * unit.
template <Codes codes>
class Bytes {
 public:
  explicit Bytes(const float* values) : offset_(codes == Codes::e2m1 ? 12 : -static_cast<int>(values[0])) {
    if constexpr (codes == Codes::e2m1) {
      alignas(16) uint8_t doubled[16];
      for (int q = 0; q < 16; ++q)
        doubled[q] = static_cast<uint8_t>(2 * values[q] + 12);
      table_ = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(doubled)));
    }
  }
  int offset() const { return offset_; }
  static constexpr float unit = codes == Codes::e2m1 ? 0.5F : 1.F;
  template <int odd>
  [[gnu::always_inline]] __m512i decode(__m512i words) const {
    const __m512i nibbles = _mm512_and_si512(odd ? _mm512_srli_epi32(words, 4) : words, _mm512_set1_epi8(15));
    if constexpr (codes == Codes::e2m1) return _mm512_shuffle_epi8(table_, nibbles);
    return nibbles;
  }

 private:
  __m512i table_ = _mm512_setzero_si512();
  int offset_;
};

// GCC 12 spills half of 24 accumulators around the intrinsic, which made four rows 1.4 times slower.
[[gnu::always_inline]] inline void add_dots(__m512i& sum, __m512i codes, __m512i activations) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(activations));
}

// x: [segment][kHead, R], then [k/8][even and odd, plane, R].
template <Codes codes, int R, int C>
void planes_step(const Step& s) {
  const Bytes<codes> bytes(s.values);
  const uint32_t* words = s.words;
  const uint32_t* ahead = s.ahead;
  const auto* head = static_cast<const int32_t*>(s.x);
  const int32_t* x = head + kMaxSegments * kHead * R;
  ChunkSum<V, R, C> sum(s);
  for (int begin = 0, segment = 0; begin < s.k; begin += s.segment, ++segment, head += kHead * R) {
    const int end = begin + s.segment < s.k ? begin + s.segment : s.k;
    __m512i acc[kPlanes * R * C];
    unroll<V, kPlanes * R>([&](auto i) __attribute__((always_inline)) {
      const __m512i start = _mm512_set1_epi32(-bytes.offset() * head[R + i]);
      unroll<V, C>([&](auto c) __attribute__((always_inline)) { acc[i * C + c] = start; });
    });
    for (int k = begin; k < end; k += 8) {
      unroll<V, 2>([&](auto odd) __attribute__((always_inline)) {
        __m512i code[C];
        unroll<V, C>([&](auto c) __attribute__((always_inline)) {
          code[c] = bytes.template decode<odd>(V::load_words(words + c * V::width));
          if constexpr (odd == 0) __builtin_prefetch(ahead + c * V::width, 0, 2);
        });
        unroll<V, kPlanes * R>([&](auto i) __attribute__((always_inline)) {
          const __m512i activation = _mm512_set1_epi32(x[odd * kPlanes * R + i]);
          unroll<V, C>([&](auto c) __attribute__((always_inline)) { add_dots(acc[i * C + c], code[c], activation); });
        });
      });
      words += s.ld_words;
      ahead += s.ld_words;
      x += dots_of<1>(R);
    }
    __m512 total[R * C];
    unroll<V, R>([&](auto i) __attribute__((always_inline)) {
      const __m512 unit = V::set1(std::bit_cast<float>(head[i]) * Bytes<codes>::unit);
      unroll<V, C>([&](auto c) __attribute__((always_inline)) {
        auto plane = [&](int p) __attribute__((always_inline)) { return _mm512_cvtepi32_ps(acc[(p * R + i) * C + c]); };
        const __m512 low = V::fma(plane(1), V::set1(0x1p8F), plane(2));
        total[i * C + c] = V::mul(V::fma(plane(0), V::set1(0x1p16F), low), unit);
      });
    });
    add_segment<V, R, C>(s, segment, total, sum.target());
  }
  sum.finish();
}

// The k of 16 bytes as the dot products want them: even and odd ones of 8.
[[gnu::always_inline]] inline __m128i even_and_odd(__m512i values) {
  return _mm_shuffle_epi8(_mm512_cvtepi32_epi8(values),
                          _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
}

// What pack_planes packs, 16 activations at a time.
bool pack_rows(const PackRow& p) {
  auto* head = static_cast<int32_t*>(p.out) + p.row;
  int32_t* to = static_cast<int32_t*>(p.out) + kMaxSegments * kHead * p.rows + p.row;
  for (int begin = 0; begin < p.count; begin += p.segment, head += kHead * p.rows) {
    const int end = begin + p.segment < p.count ? begin + p.segment : p.count;
    const auto mask = [&](int k) { return static_cast<__mmask16>(end - k >= 16 ? 0xFFFF : 0xFF); };
    __m512i largest = _mm512_setzero_si512();
    for (int k = begin; k < end; k += 16) {
      const __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(mask(k), p.values + k));
      largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF)));
    }
    float unit, scale;
    if (!find_unit<V>(_mm512_reduce_max_epu32(largest), unit, scale)) return false;
    const __m512 units = _mm512_set1_ps(scale);
    __m512i sums[kPlanes] = {};
    for (int k = begin; k < end; k += 16) {
      __m512i rest = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(mask(k), p.values + k), units));
      alignas(16) int32_t dots[kPlanes][4];
      for (int plane = kPlanes - 1; plane >= 0; --plane) {
        const __m512i low = plane == 0 ? rest : _mm512_srai_epi32(_mm512_slli_epi32(rest, 24), 24);
        rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, low), 8);
        sums[plane] = _mm512_add_epi32(sums[plane], low);
        _mm_store_si128(reinterpret_cast<__m128i*>(dots[plane]), even_and_odd(low));
      }
      for (int eight = 0; eight < (end - k >= 16 ? 2 : 1); ++eight) {
        for (int odd = 0; odd < 2; ++odd) {
          for (int plane = 0; plane < kPlanes; ++plane, to += p.rows)
            *to = dots[plane][2 * eight + odd];
        }
      }
    }
    head[0] = std::bit_cast<int32_t>(unit);
    for (int plane = 0; plane < kPlanes; ++plane)
      head[(1 + plane) * p.rows] = _mm512_reduce_add_epi32(sums[plane]);
  }
  return true;
}

template <int max_rows, int C>
constexpr MatrixKernel kKernel = planes_kernel<max_rows>(
    C * V::width, planes_row_bytes<1>(), &pack_rows, []<Codes codes, int R>() { return &planes_step<codes, R, C>; });

constexpr PlanesKernels kPlanesKernels{kKernel<2, 4>, kKernel<4, 2>};

}  // namespace

const PlanesKernels* planes_kernels() {
  return &kPlanesKernels;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#elif !defined(__aarch64__)

namespace marlin::cpu {
const PlanesKernels* planes_kernels() {
  return nullptr;
}
}  // namespace marlin::cpu

#endif
