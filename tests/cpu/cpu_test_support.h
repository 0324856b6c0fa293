// Test data and an fp64 reference for the CPU kernels. Both are written from the definitions of the formats and call no
// conversion or table of the code under test.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "csrc/gemm/cpu/gemm.h"
#include "tests/support/expect.h"

namespace marlin::test {

using cpu::GemmArguments;
using cpu::PackedWeight;

inline int bytes_of(ElementType type) {
  return type == ElementType::float32 ? 4 : type == ElementType::uint8 ? 1 : 2;
}

struct FloatFormat {
  int mantissa_bits;  // not counting the implicit leading 1
  int min_exponent;   // the exponent of the smallest normal number
  int max_exponent;   // the exponent of the largest finite number
};

inline FloatFormat format_of(ElementType type) {
  if (type == ElementType::float16) return {10, -14, 15};
  if (type == ElementType::bfloat16) return {7, -126, 127};
  return {23, -126, 127};
}

inline double unit_roundoff(ElementType type) {
  return std::ldexp(1.0, -format_of(type).mantissa_bits - 1);
}
inline double smallest(ElementType type) {
  return std::ldexp(1.0, format_of(type).min_exponent - format_of(type).mantissa_bits);
}
inline double largest(ElementType type) {
  const FloatFormat f = format_of(type);
  return std::ldexp(2.0 - std::ldexp(1.0, -f.mantissa_bits), f.max_exponent);
}

// Returns 2^exponent for a normal result. std::ldexp takes several times as long, and tests decode millions of numbers.
inline double power(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

// Returns v rounded to nearest even, as the bits of a 16-bit type.
inline uint16_t encode16(double v, ElementType type) {
  const FloatFormat f = format_of(type);
  const int exponent_bits = 15 - f.mantissa_bits;
  const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
  const auto infinity = static_cast<uint16_t>(((1 << exponent_bits) - 1) << f.mantissa_bits);
  if (std::isnan(v)) return static_cast<uint16_t>(infinity | (1 << (f.mantissa_bits - 1)));
  v = std::fabs(v);
  if (std::isinf(v)) return static_cast<uint16_t>(sign | infinity);
  if (v == 0) return sign;
  int exponent = std::max(std::ilogb(v), f.min_exponent);
  const double steps = std::nearbyint(v * power(f.mantissa_bits - exponent));
  const double bits = steps + (exponent - f.min_exponent) * power(f.mantissa_bits);
  return static_cast<uint16_t>(sign | (bits >= infinity ? infinity : static_cast<uint16_t>(bits)));
}

inline double decode16(uint16_t bits, ElementType type) {
  const FloatFormat f = format_of(type);
  const int exponent = (bits & 0x7FFF) >> f.mantissa_bits;
  const int mantissa = bits & ((1 << f.mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << (15 - f.mantissa_bits)) - 1) {
    return mantissa != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * mantissa * power(f.min_exponent - f.mantissa_bits);
  return sign * (mantissa + (1 << f.mantissa_bits)) * power(exponent - 1 + f.min_exponent - f.mantissa_bits);
}

// An array that ends where an unreadable page begins. A kernel that accesses memory past the end crashes, even if it is
// compiled without sanitizers. In general, the first element is not aligned for vectors.
class Array {
 public:
  Array() = default;
  Array(ElementType type, int64_t count) : type_(type), count_(count) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t bytes = static_cast<size_t>(count * bytes_of(type));
    const size_t used = (bytes + page - 1) / page * page;
    void* block = mmap(nullptr, used + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED || mprotect(static_cast<char*>(block) + used, page, PROT_NONE) != 0) throw std::bad_alloc();
    block_ = {static_cast<char*>(block), [size = used + page](char* p) { munmap(p, size); }};
    data_ = block_.get() + (used - bytes);
  }
  ElementType type() const { return type_; }
  int64_t count() const { return count_; }
  bool empty() const { return count_ == 0; }
  char* data() const { return data_; }
  double get(int64_t i) const {
    const char* at = data() + i * bytes_of(type_);
    if (type_ == ElementType::uint8) return static_cast<uint8_t>(*at);
    if (type_ == ElementType::float32) {
      float f;
      std::memcpy(&f, at, 4);
      return f;
    }
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return decode16(bits, type_);
  }
  void set(int64_t i, double v) {
    char* at = data() + i * bytes_of(type_);
    if (type_ == ElementType::uint8) {
      *at = static_cast<char>(static_cast<uint8_t>(v));
    } else if (type_ == ElementType::float32) {
      const auto f = static_cast<float>(v);
      std::memcpy(at, &f, 4);
    } else {
      const uint16_t bits = encode16(v, type_);
      std::memcpy(at, &bits, 2);
    }
  }

 private:
  ElementType type_ = ElementType::float32;
  int64_t count_ = 0;
  std::shared_ptr<char> block_;
  char* data_ = nullptr;
};

inline double rounded(double v, ElementType type) {
  return type == ElementType::float32 ? static_cast<double>(static_cast<float>(v)) : decode16(encode16(v, type), type);
}

inline double e2m1(int code) {
  static constexpr double kMagnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code & 8) != 0 ? -kMagnitude[code & 7] : kMagnitude[code & 7];
}

inline double e4m3(int code) {
  const double sign = (code & 0x80) != 0 ? -1.0 : 1.0;
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  if ((code & 0x7F) == 0x7F) return std::nan("");
  return sign * (exponent == 0 ? mantissa * power(-9) : (8 + mantissa) * power(exponent - 10));
}

inline double e8m0(int code) {
  return code == 255 ? std::nan("") : power(code - 127);
}

struct Case {
  WeightFormat format = WeightFormat::uint4b8;
  int64_t M = 1, N = 1, K = 8, group_size = 8;
  ElementType a_type = ElementType::float32;
  ElementType scales_type = ElementType::float16;
  ElementType zeros_type = ElementType::uint8;
  ElementType bias_type = ElementType::float32;
  bool with_bias = false;
  bool with_perm = false;
  int global_scale = 0;     // 0 for none, 1 for a scalar, 2 for one per column
  int64_t row_stride = -1;  // -1 means K
  bool positive = false;
  uint32_t seed = 0;
  bool rounds = false;  // allows rounded weights
};

inline int64_t bits_of_code(WeightFormat format) {
  const bool four = format == WeightFormat::uint4b8 || format == WeightFormat::uint4 ||
                    format == WeightFormat::uint4_bias || format == WeightFormat::float4_e2m1 ||
                    format == WeightFormat::nvfp4 || format == WeightFormat::mxfp4 || format == WeightFormat::lut4;
  return four ? 4 : format == WeightFormat::uint5b16 ? 5 : format == WeightFormat::uint6 ? 6 : 8;
}

// The number of k in a word of the second plane, or 0 without a second plane.
inline int64_t high_word_k(WeightFormat format) {
  return bits_of_code(format) == 5 ? 32 : bits_of_code(format) == 6 ? 16 : 0;
}

struct Tensors {
  Case c;
  Array a, words, high, scales, zeros, global_scale, lut, bias;
  std::vector<int32_t> perm;
  int64_t row_stride = 0;

  int code(int64_t k, int64_t n) const {
    const int64_t bits = bits_of_code(c.format) == 8 ? 8 : 4, codes = 32 / bits;
    uint32_t word;
    std::memcpy(&word, words.data() + (k / codes * c.N + n) * 4, 4);
    return static_cast<int>((word >> (bits * (k % codes))) & ((1U << bits) - 1)) + 16 * upper(k, n);
  }
  // Returns the upper bits of the code, which are in the second plane (docs/formats/formats.md).
  int upper(int64_t k, int64_t n) const {
    if (high_word_k(c.format) == 0) return 0;
    static constexpr int kFive[] = {0, 4, 1, 5, 16, 20, 17, 21}, kFiveBlocks[] = {0, 2, 8, 10};
    static constexpr int kSix[] = {0, 4, 2, 6, 16, 20, 18, 22}, kSixBlocks[] = {0, 8};
    uint32_t word;
    std::memcpy(&word, high.data() + (k / high_word_k(c.format) * c.N + n) * 4, 4);
    return bits_of_code(c.format) == 5 ? static_cast<int>(word >> (kFiveBlocks[k / 8 % 4] + kFive[k % 8]) & 1U)
                                       : static_cast<int>(word >> (kSixBlocks[k / 8 % 2] + kSix[k % 8]) & 3U);
  }
  double activation(int64_t m, int64_t k) const {
    return a.get(m * row_stride + (perm.empty() ? k : perm[static_cast<size_t>(k)]));
  }
  std::vector<double> activations() const {
    std::vector<double> x(static_cast<size_t>(c.M * c.K));
    for (int64_t i = 0; i < c.M * c.K; ++i)
      x[static_cast<size_t>(i)] = activation(i / c.K, i % c.K);
    return x;
  }
  // Returns the exact weight. Sets *magnitude to the magnitude of the weight in the error bound.
  double weight(int64_t k, int64_t n, double* magnitude = nullptr) const {
    const int64_t at = k / c.group_size * c.N + n;
    const int q = code(k, n);
    double w = 0, size = -1;
    switch (c.format) {
      case WeightFormat::uint4b8:
        w = (q - 8) * scales.get(at);
        break;
      case WeightFormat::uint8b128:
      case WeightFormat::uint5b16: {
        const int offset = c.format == WeightFormat::uint5b16 ? 16 : 128;
        w = (q - offset) * scales.get(at);
        // Kernels with byte dot products sum raw codes and subtract the offset later.
        size = std::fabs(scales.get(at)) * (q + offset);
        break;
      }
      case WeightFormat::float8_e4m3:
        w = e4m3(q) * scales.get(at);
        break;
      case WeightFormat::mxfp8:
        w = e4m3(q) * e8m0(static_cast<int>(scales.get(at)));
        break;
      case WeightFormat::uint4:
      case WeightFormat::uint6:
      case WeightFormat::uint8:
        w = (q - zeros.get(at)) * scales.get(at);
        size = std::fabs(scales.get(at)) * (q + std::fabs(zeros.get(at)));
        break;
      case WeightFormat::uint4_bias:
      case WeightFormat::uint8_bias:
        w = q * scales.get(at) + zeros.get(at);
        size = std::fabs(q * scales.get(at)) + std::fabs(zeros.get(at));
        break;
      case WeightFormat::float4_e2m1:
        w = e2m1(q) * scales.get(at);
        break;
      case WeightFormat::nvfp4: {
        double global = 1;
        if (c.global_scale != 0) global = global_scale.get(c.global_scale == 1 ? 0 : n);
        w = e2m1(q) * static_cast<double>(static_cast<float>(e4m3(static_cast<int>(scales.get(at))) * global));
        break;
      }
      case WeightFormat::mxfp4:
        w = e2m1(q) * e8m0(static_cast<int>(scales.get(at)));
        break;
      case WeightFormat::lut4:
        w = lut.get(q) * scales.get(at);
        break;
      default:  // is not in kReferenceFormats
        w = std::nan("");
    }
    if (magnitude != nullptr) *magnitude = size < 0 ? std::fabs(w) : size;
    return w;
  }

  PackedWeight packed() const {
    return {c.format,
            c.K,
            c.N,
            c.group_size,
            reinterpret_cast<const uint32_t*>(words.data()),
            reinterpret_cast<const uint32_t*>(high.data()),
            scales.data(),
            scales.type(),
            zeros.data(),
            zeros.type(),
            nullptr,
            nullptr,
            ElementType::float32,
            reinterpret_cast<const float*>(global_scale.data()),
            c.global_scale == 2 ? 1 : 0,
            reinterpret_cast<const float*>(lut.data())};
  }
  GemmArguments arguments(void* out) const {
    GemmArguments made{packed(),    c.M,         a.data(), c.a_type, row_stride, perm.empty() ? nullptr : perm.data(),
                       bias.data(), bias.type(), out};
    made.rounds = c.rounds;
    return made;
  }
};

inline Tensors make(const Case& c) {
  std::mt19937 random(c.seed);
  std::normal_distribution<double> normal;
  auto below = [&](uint32_t n) { return static_cast<int>(random() % n); };
  Tensors t;
  t.c = c;
  t.row_stride = c.row_stride < 0 ? c.K : c.row_stride;
  const int64_t groups = (c.K + c.group_size - 1) / c.group_size;
  t.a = Array(c.a_type, (c.M - 1) * t.row_stride + c.K);
  for (int64_t i = 0; i < t.a.count(); ++i)
    t.a.set(i, c.positive ? std::fabs(normal(random)) : normal(random));
  t.words = Array(ElementType::float32, c.K / (bits_of_code(c.format) == 8 ? 4 : 8) * c.N);
  if (const int64_t rows = high_word_k(c.format); rows != 0) {
    t.high = Array(ElementType::float32, (c.K + rows - 1) / rows * c.N);
    for (int64_t i = 0; i < t.high.count(); ++i) {
      const auto word = static_cast<uint32_t>(random());
      std::memcpy(t.high.data() + 4 * i, &word, 4);
    }
  }
  const bool has_nan_codes = c.format == WeightFormat::float8_e4m3 || c.format == WeightFormat::mxfp8;
  for (int64_t i = 0; i < t.words.count(); ++i) {
    uint32_t word = static_cast<uint32_t>(random());
    for (uint32_t shift = 0; shift < 32 && has_nan_codes; shift += 8) {
      if (((word >> shift) & 0x7FU) == 0x7FU) word ^= 1U << shift;  // 448 instead of NaN
    }
    std::memcpy(t.words.data() + 4 * i, &word, 4);
  }
  const bool coded =
      c.format == WeightFormat::nvfp4 || c.format == WeightFormat::mxfp4 || c.format == WeightFormat::mxfp8;
  t.scales = Array(coded ? ElementType::uint8 : c.scales_type, groups * c.N);
  for (int64_t i = 0; i < t.scales.count(); ++i) {
    if (c.format == WeightFormat::nvfp4) {
      t.scales.set(i, below(127) | (c.positive ? 0 : below(2) * 128));
    } else if (c.format == WeightFormat::mxfp4 || c.format == WeightFormat::mxfp8) {
      t.scales.set(i, (c.format == WeightFormat::mxfp8 ? 112 : 120) + below(16));  // fp16 holds the products
    } else {
      t.scales.set(i, (0.5 + below(1000) / 1000.0) / 16 * (c.positive || below(8) != 0 ? 1 : -1));
    }
  }
  const bool has_bias = c.format == WeightFormat::uint4_bias || c.format == WeightFormat::uint8_bias;
  const bool has_zeros =
      c.format == WeightFormat::uint4 || c.format == WeightFormat::uint6 || c.format == WeightFormat::uint8;
  if (has_bias || has_zeros) {
    t.zeros = Array(has_bias && c.zeros_type == ElementType::uint8 ? ElementType::float16 : c.zeros_type, groups * c.N);
    for (int64_t i = 0; i < t.zeros.count(); ++i) {
      t.zeros.set(i, t.zeros.type() == ElementType::uint8 ? below(17) : 8 + 4 * normal(random));
    }
  }
  if (c.format == WeightFormat::nvfp4 && c.global_scale != 0) {
    t.global_scale = Array(ElementType::float32, c.global_scale == 1 ? 1 : c.N);
    for (int64_t i = 0; i < t.global_scale.count(); ++i)
      t.global_scale.set(i, 0.003 + below(1000) * 1e-6);
  }
  if (c.format == WeightFormat::lut4) {
    t.lut = Array(ElementType::float32, 16);
    for (int64_t i = 0; i < 16; ++i)
      t.lut.set(i, c.seed % 2 == 0 ? normal(random) : rounded(normal(random), ElementType::bfloat16));
  }
  if (c.with_bias) {
    t.bias = Array(c.bias_type, c.N);
    for (int64_t i = 0; i < c.N; ++i)
      t.bias.set(i, normal(random));
  }
  if (c.with_perm) {
    t.perm.resize(static_cast<size_t>(c.K));
    for (size_t i = 0; i < t.perm.size(); ++i)
      t.perm[i] = static_cast<int32_t>(i);
    for (size_t i = t.perm.size() - 1; i > 0; --i)
      std::swap(t.perm[i], t.perm[random() % (i + 1)]);
  }
  return t;
}

// Returns a loop that divides its range as at::parallel_for would. It runs the parts one after the other, except under
// ThreadSanitizer, where each part has its own thread.
inline cpu::Parallel loop(int threads) {
  return {threads, [threads](int64_t count, int64_t grain, const cpu::Body& body) {
            const int64_t step = std::max(grain, (count + threads - 1) / threads);
#if defined(__SANITIZE_THREAD__)
            std::vector<std::thread> running;
            for (int64_t i = 0; i < count; i += step)
              running.emplace_back([&body, i, end = std::min(count, i + step)] { body(i, end); });
            for (std::thread& thread : running)
              thread.join();
#else
            for (int64_t i = 0; i < count; i += step)
              body(i, std::min(count, i + step));
#endif
          }};
}

inline std::string describe(const Case& c) {
  auto name = [](ElementType t) {
    static constexpr const char* kNames[] = {"fp16", "bf16", "fp32", "u8"};
    return std::string(kNames[static_cast<int>(t)]);
  };
  return std::string(marlin::name(c.format)) + " M=" + std::to_string(c.M) + " N=" + std::to_string(c.N) +
         " K=" + std::to_string(c.K) + " group=" + std::to_string(c.group_size) + " a=" + name(c.a_type) +
         " scales=" + name(c.scales_type) + " zeros=" + name(c.zeros_type) + (c.with_bias ? " bias" : "") +
         (c.with_perm ? " perm" : "") + " global=" + std::to_string(c.global_scale) +
         " row_stride=" + std::to_string(c.row_stride) + " seed=" + std::to_string(c.seed);
}

// The formats of Tensors::weight(). Kernels treat formats of the same kinds of codes and scales alike, so these are
// enough here; the tests in Python test all formats.
inline constexpr WeightFormat kReferenceFormats[] = {
    WeightFormat::uint4b8, WeightFormat::uint4, WeightFormat::uint4_bias, WeightFormat::float4_e2m1,
    WeightFormat::nvfp4,   WeightFormat::mxfp4, WeightFormat::lut4,       WeightFormat::uint8b128,
    WeightFormat::uint8,   WeightFormat::mxfp8, WeightFormat::uint5b16,   WeightFormat::uint6};

inline constexpr ElementType kFloats[] = {ElementType::float16, ElementType::bfloat16, ElementType::float32};

inline Case random_case(std::mt19937& random, WeightFormat format, ElementType a_type, bool small) {
  auto pick = [&](auto... v) {
    const int64_t values[] = {v...};
    return values[random() % (sizeof...(v))];
  };
  Case c;
  c.format = format;
  c.a_type = a_type;
  c.M = pick(1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17, 33, 64, 100);
  c.N = pick(1, 7, 24, 31, 64, 100, 129, 200);
  c.K = pick(8, 16, 24, 40, 72, 136, 200, 264, 520, 1000);
  if (small) c.M = std::min<int64_t>(c.M, 17);
  c.group_size = pick(16, 32, 64, 128, 256, c.K);
  if (fixed_group_size(format) != 0) c.group_size = fixed_group_size(format);
  if (c.group_size > c.K) c.group_size = c.K;
  c.scales_type = kFloats[random() % 3];
  c.zeros_type = static_cast<ElementType>(random() % 4);
  c.bias_type = kFloats[random() % 3];
  c.with_bias = random() % 2 != 0;
  c.with_perm = random() % 3 == 0;
  c.global_scale = format == WeightFormat::nvfp4 ? static_cast<int>(random() % 3) : 0;
  c.row_stride = pick(-1, -1, -1, 0, c.K + 3);
  c.positive = random() % 4 == 0;
  c.seed = random();
  return c;
}

}  // namespace marlin::test
