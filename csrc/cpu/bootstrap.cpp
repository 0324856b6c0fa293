// Plain scalar kernels, in place until the vectorised ones land: delete this file with their first commit.
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "capability.h"
#include "kernels.h"

namespace marlin::cpu {
namespace {
float half_to_float(uint16_t h) {
  _Float16 f;
  std::memcpy(&f, &h, 2);
  return static_cast<float>(f);
}
float load(const void* p, ElementType t, int64_t i) {
  switch (t) {
    case ElementType::float16:
      return half_to_float(static_cast<const uint16_t*>(p)[i]);
    case ElementType::bfloat16: {
      uint32_t b = static_cast<uint32_t>(static_cast<const uint16_t*>(p)[i]) << 16;
      float f;
      std::memcpy(&f, &b, 4);
      return f;
    }
    case ElementType::float32:
      return static_cast<const float*>(p)[i];
    default:
      return static_cast<const uint8_t*>(p)[i];
  }
}
void store(void* p, ElementType t, int64_t i, float f) {
  if (t == ElementType::float32) {
    static_cast<float*>(p)[i] = f;
    return;
  }
  if (t == ElementType::float16) {
    static_cast<_Float16*>(p)[i] = static_cast<_Float16>(f);
    return;
  }
  uint32_t b;
  std::memcpy(&b, &f, 4);
  b = std::isnan(f) ? 0x7FC00000u : b + 0x7FFFu + ((b >> 16) & 1);
  static_cast<uint16_t*>(p)[i] = static_cast<uint16_t>(b >> 16);
}
float e4m3(uint8_t c) {
  int e = (c >> 3) & 15, m = c & 7;
  if ((c & 0x7F) == 0x7F) return NAN;
  float v = e == 0 ? std::ldexp(static_cast<float>(m), -9) : std::ldexp(1.0F + m / 8.0F, e - 7);
  return c & 0x80 ? -v : v;
}
float weight(const PackedWeight& w, int64_t k, int64_t n) {
  int q = (w.words[k / 8 * w.N + n] >> (4 * (k % 8))) & 15;
  int64_t g = k / w.group_size * w.N + n;
  float gs = w.global_scale ? w.global_scale[n * w.global_scale_stride] : 1.0F;
  switch (w.format) {
    case WeightFormat::uint4b8:
      return (q - 8) * load(w.scales, w.scales_type, g);
    case WeightFormat::uint4:
      return (q - load(w.zeros, w.zeros_type, g)) * load(w.scales, w.scales_type, g);
    case WeightFormat::uint4_bias:
      return q * load(w.scales, w.scales_type, g) + load(w.zeros, w.zeros_type, g);
    case WeightFormat::float4_e2m1:
      return kE2M1Values[q] * load(w.scales, w.scales_type, g);
    case WeightFormat::nvfp4:
      return kE2M1Values[q] * (e4m3(static_cast<const uint8_t*>(w.scales)[g]) * gs);
    case WeightFormat::mxfp4: {
      int c = static_cast<const uint8_t*>(w.scales)[g];
      return c == 255 ? NAN : kE2M1Values[q] * std::ldexp(1.0F, c - 127);
    }
    default:
      return w.lut[q] * load(w.scales, w.scales_type, g);
  }
}
}  // namespace
const Capability& capability() {
  static const Capability c{Isa::portable, "scalar kernels", {}, {Isa::portable}};
  return c;
}
const char* isa_name(Isa) {
  return "portable";
}
void gemm(const GemmArguments& x, const Parallel& parallel, Float32Precision) {
  const PackedWeight& w = x.weight;
  parallel.run(w.N, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> column(w.K);
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t k = 0; k < w.K; ++k)
        column[k] = weight(w, k, n);
      for (int64_t m = 0; m < x.M; ++m) {
        double sum = 0;
        for (int64_t k = 0; k < w.K; ++k)
          sum += static_cast<double>(load(x.a, x.a_type, m * x.a_row_stride + (x.perm ? x.perm[k] : k))) * column[k];
        if (x.bias) sum += load(x.bias, x.bias_type, n);
        store(x.out, x.a_type, m * w.N + n, static_cast<float>(sum));
      }
    }
  });
}
void dequantize(const DequantizeArguments& x, const Parallel&) {
  const PackedWeight& w = x.weight;
  for (int64_t k = 0; k < w.K; ++k)
    for (int64_t n = 0; n < w.N; ++n)
      store(x.out, x.out_type, (x.perm ? x.perm[k] : k) * w.N + n, weight(w, k, n));
}
void gptq_repack(const uint32_t* q, const int32_t* perm, int64_t K, int64_t N, uint32_t* out, const Parallel&) {
  for (int64_t r = 0; r < K / 8; ++r)
    for (int64_t n = 0; n < N; ++n) {
      uint32_t word = 0;
      for (int j = 0; j < 8; ++j) {
        int64_t k = perm ? perm[r * 8 + j] : r * 8 + j;
        word |= ((q[k / 8 * N + n] >> (4 * (k % 8))) & 15u) << (4 * j);
      }
      out[r * N + n] = word;
    }
}
static constexpr int kNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};
void awq_repack(const uint32_t* q, int64_t K, int64_t N, uint32_t* out, const Parallel&) {
  for (int64_t r = 0; r < K / 8; ++r)
    for (int64_t n = 0; n < N; ++n) {
      uint32_t word = 0;
      for (int j = 0; j < 8; ++j)
        word |= ((q[(r * 8 + j) * (N / 8) + n / 8] >> (4 * kNibble[n % 8])) & 15u) << (4 * j);
      out[r * N + n] = word;
    }
}
void gptq_unpack_zeros(const uint32_t* q, int64_t G, int64_t N, int version, ZerosRule rule, uint8_t* out,
                       const Parallel&) {
  for (int64_t i = 0; i < G * N / 8; ++i) {
    uint32_t word = q[i] + (version == 1 && rule == ZerosRule::word ? 0x11111111u : 0u);
    for (int j = 0; j < 8; ++j) {
      uint32_t z = (word >> (4 * j)) & 15u;
      if (version == 1 && rule != ZerosRule::word) z += 1;
      out[i * 8 + j] = static_cast<uint8_t>(rule == ZerosRule::masked ? z & 15u : z);
    }
  }
}
void awq_unpack_zeros(const uint32_t* q, int64_t G, int64_t N, uint8_t* out, const Parallel&) {
  for (int64_t i = 0; i < G * N; ++i)
    out[i] = static_cast<uint8_t>((q[i / 8] >> (4 * kNibble[i % 8])) & 15u);
}
}  // namespace marlin::cpu
