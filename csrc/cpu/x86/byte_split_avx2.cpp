// Byte products of AVX2: activations as three planes of signed bytes, codes as unsigned bytes, two products
// summed in 16 bits by one instruction. Those sums are moved to 32 bits before they can overflow.
#include "kernel_set.h"

#if defined(__x86_64__)

#include "planes.h"
#include "target.h"

MARLIN_TARGET(MARLIN_AVX2)

#include "gemm_kernel.h"
#include "vec_avx2.h"

namespace marlin::cpu {

namespace {

// The same vectors under a name of their own: nothing here may share a symbol with the fp32 kernels.
struct Avx2Planes : Avx2 {};

using V = Avx2Planes;

// Even and odd codes of packed words as unsigned bytes. A byte stands for (byte - offset) * unit.
template <Codes codes>
class Bytes {
 public:
  explicit Bytes(const float* values) : offset_(codes == Codes::e2m1 ? 12 : -static_cast<int>(values[0])) {
    if constexpr (codes == Codes::e2m1) {
      alignas(16) uint8_t doubled[16];
      for (int q = 0; q < 16; ++q)
        doubled[q] = static_cast<uint8_t>(2 * values[q] + 12);
      table_ = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(doubled)));
    }
  }
  int offset() const { return offset_; }
  static constexpr float unit = codes == Codes::e2m1 ? 0.5F : 1.F;
  // Words whose products 16 bits hold: 4 products of at most 15 * 128 or 24 * 128 each.
  static constexpr int words = codes == Codes::e2m1 ? 2 : 4;
  template <int odd>
  [[gnu::always_inline]] __m256i decode(__m256i word) const {
    const __m256i nibbles = _mm256_and_si256(odd ? _mm256_srli_epi32(word, 4) : word, _mm256_set1_epi8(15));
    if constexpr (codes == Codes::e2m1) return _mm256_shuffle_epi8(table_, nibbles);
    return nibbles;
  }

 private:
  __m256i table_ = _mm256_setzero_si256();
  int offset_;
};

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
    __m256i acc[kPlanes * R * C];
    unroll<V, kPlanes * R>([&](auto i) __attribute__((always_inline)) {
      const __m256i start = _mm256_set1_epi32(-bytes.offset() * head[R + i]);
      unroll<V, C>([&](auto c) __attribute__((always_inline)) { acc[i * C + c] = start; });
    });
    for (int k = begin; k < end;) {
      __m256i pairs[kPlanes * R * C];
      unroll<V, kPlanes * R * C>([&](auto i) __attribute__((always_inline)) { pairs[i] = _mm256_setzero_si256(); });
      const int last = k + 8 * Bytes<codes>::words < end ? k + 8 * Bytes<codes>::words : end;
      for (; k < last; k += 8) {
        __builtin_prefetch(ahead, 0, 2);
        unroll<V, C>([&](auto c) __attribute__((always_inline)) {
          const __m256i word = V::load_words(words + c * V::width);
          const __m256i even = bytes.template decode<0>(word), odd = bytes.template decode<1>(word);
          unroll<V, kPlanes * R>([&](auto i) __attribute__((always_inline)) {
            const __m256i product = _mm256_add_epi16(_mm256_maddubs_epi16(even, _mm256_set1_epi32(x[i])),
                                                     _mm256_maddubs_epi16(odd, _mm256_set1_epi32(x[kPlanes * R + i])));
            pairs[i * C + c] = _mm256_add_epi16(pairs[i * C + c], product);
          });
        });
        words += s.ld_words;
        ahead += s.ld_words;
        x += dots_of<1>(R);
      }
      unroll<V, kPlanes * R * C>([&](auto i) __attribute__((always_inline)) {
        acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(pairs[i], _mm256_set1_epi16(1)));
      });
    }
    __m256 total[R * C];
    unroll<V, R * C>([&](auto i) __attribute__((always_inline)) {
      auto plane = [&](int p) __attribute__((always_inline)) { return _mm256_cvtepi32_ps(acc[p * R * C + i]); };
      const __m256 low = V::fma(plane(1), V::set1(0x1p8F), plane(2));
      const float unit = std::bit_cast<float>(head[i / C]) * Bytes<codes>::unit;
      total[i] = V::mul(V::fma(plane(0), V::set1(0x1p16F), low), V::set1(unit));
    });
    add_segment<V, R, C>(s, segment, total, sum.target());
  }
  sum.finish();
}

template <int max_rows, int C>
constexpr MatrixKernel kKernel =
    planes_kernel<max_rows>(C * V::width, planes_row_bytes<1>(), &pack_planes<V, 1>,
                            []<Codes codes, int R>() { return &planes_step<codes, R, C>; });

}  // namespace

const MatrixKernel* avx2_planes_kernel() {
  return &kKernel<1, 4>;
}

}  // namespace marlin::cpu

MARLIN_TARGET_END

#else

namespace marlin::cpu {
const MatrixKernel* avx2_planes_kernel() {
  return nullptr;
}
}  // namespace marlin::cpu

#endif
