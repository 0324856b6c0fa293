// Tests products near the limits of fp32's range. Their activations, scales and codes would overflow or vanish if a
// kernel used a format with a smaller range for intermediate values.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu_gemm_checks.h"

namespace marlin::test {

inline Case case_of(WeightFormat format, int64_t M, ElementType a_type) {
  Case c;
  c.format = format;
  c.M = M;
  c.N = 20;
  c.K = 136;
  c.group_size = format == WeightFormat::mxfp4 ? 32 : 64;
  c.a_type = a_type;
  c.scales_type = ElementType::float32;
  return c;
}

// Checks gemm with a larger bound: each of the K products may lose 2^-149, because fp32 subnormals may be flushed.
inline double check_size(const Machine& machine, const Tensors& t, Precision precision, const std::string& what) {
  return check_gemm(machine, t, precision, {.absolute = static_cast<double>(t.c.K) * 0x1p-149, .what = what});
}

// Tests tiny and huge activations with tiny scales. All activations are 0 except those with k % every == first.
inline double check_range(const Machine& machine, const Activations& activations, WeightFormat format, int64_t M,
                          double size, int every, int first) {
  const Case c = case_of(format, M, activations.type);
  const Tensors made = make(c);
  Tensors t = make(c);
  for (int64_t i = 0; i < t.a.count(); ++i)
    t.a.set(i, i % c.K % every == first ? size * made.a.get(i) : 0);
  if (format == WeightFormat::mxfp4) {
    for (int64_t i = 0; i < t.scales.count(); ++i)
      t.scales.set(i, 50 + static_cast<double>(i % 3));
  }
  return check_size(machine, t, activations.precision, "activations of size " + std::to_string(std::log10(size)));
}

// Tests table entries that bf16 can and cannot represent. The activations have two magnitudes, so that products of bf16
// parts are subnormal in some cases and normal in others. Only one activation in 32, or one in a row, is not 0, because
// a larger product would hide the error of a product that was flushed to 0.
inline void test_small_codes(const Machine& machine) {
  constexpr double kSmallParts = 1 + 0x1.cp-21;
  for (const double size : {0x1p-30, 0x1p-20, 0x1p-6, 0x1p-4, 1.0}) {
    for (const double code : {1.0, 1 / 3.0, kSmallParts}) {
      for (const Activations& activations : kActivations) {
        if (activations.type == ElementType::float16) continue;  // fp16 cannot represent such numbers
        for (const auto& [M, least] : {std::pair{3, 0x1p-100}, std::pair{17, 0x1p-100}, std::pair{17, 0x1p-96}}) {
          for (const int every : {32, 136}) {
            const Case c = case_of(WeightFormat::lut4, M, activations.type);
            Tensors t = make(c);
            const double values[] = {kSmallParts, 1 + 0x1.01p-10, -1.25 - 0x1.01p-12};
            for (int64_t i = 0; i < t.a.count(); ++i)
              t.a.set(i, i % c.K % every == 7 ? least * values[i % 3] : 0);
            for (int i = 0; i < 16; ++i)
              t.lut.set(i, size * code * (i + 1));
            check_size(machine, t, activations.precision, "table of size " + std::to_string(std::log10(size)));
          }
        }
      }
    }
  }
}

// A column that contains the code of an infinite table entry must become infinite. A column that contains the code of a
// NaN entry must become NaN.
inline void test_non_finite_codes(const Machine& machine) {
  for (const Activations& activations : kActivations) {
    for (const int64_t M : {1, 17}) {
      for (const int infinite : {0, 1, 15}) {
        const int nan = (infinite + 1) % 16, finite = 5;
        Case c = case_of(WeightFormat::lut4, M, activations.type);
        c.N = 3;
        c.positive = true;
        Tensors t = make(c);
        for (int i = 0; i < 16; ++i)
          t.lut.set(i, 1 / 3.0);
        t.lut.set(infinite, std::numeric_limits<double>::infinity());
        t.lut.set(nan, std::nan(""));
        for (int64_t i = 0; i < t.words.count(); ++i) {
          const int codes[] = {finite, infinite, nan};
          const uint32_t word = 0x11111111U * (i < c.N ? static_cast<uint32_t>(codes[i % c.N]) : uint32_t{finite});
          std::memcpy(t.words.data() + 4 * i, &word, 4);
        }
        const Array out = run(machine, t, activations.precision);
        for (int64_t m = 0; m < M; ++m) {
          expect(std::isfinite(out.get(3 * m)) && std::isinf(out.get(3 * m + 1)) && std::isnan(out.get(3 * m + 2)),
                 [&] { return name(machine) + " " + describe(c) + ": columns with an infinite or a NaN table entry"; });
        }
      }
    }
  }
}

// Tests each E4M3 code. Zeros, subnormal codes and NaN are alone among normal codes, because e4m3_row.h decodes normal
// codes in another way. Ten other codes are in one product, in one row of every seventh column. The activations of all
// other rows are 0, so that an error of a code is compared with the code's own size.
inline void test_every_e4m3_code(const Machine& machine) {
  const auto is_nan = [](int code) { return (code & 0x7F) == 0x7F; };
  const auto is_normal = [&](int code) { return (code & 0x78) != 0 && !is_nan(code); };
  std::vector<std::vector<int>> products;
  for (int code = 0; code < 256; ++code) {
    const bool joins = is_normal(code) && !products.empty() && is_normal(products.back().back());
    if (!joins || products.back().size() == 10) products.emplace_back();
    products.back().push_back(code);
  }
  for (const ElementType a_type : kFloats) {
    Case c = case_of(WeightFormat::float8_e4m3, 1, a_type);
    c.N = 75;
    Tensors t = make(c);
    char* bytes = t.words.data();
    for (int64_t i = 0; i < 4 * t.words.count(); ++i)
      if ((bytes[i] & 0x78) == 0) bytes[i] |= 0x08;
    const std::vector<char> normal(bytes, bytes + 4 * t.words.count());
    for (size_t p = 0; p < products.size(); ++p) {
      const int64_t k = static_cast<int64_t>(5 * p) % c.K, column = static_cast<int64_t>(11 * p);
      for (int64_t i = 0; i < c.K; ++i)
        t.a.set(i, i == k ? 1.5 : 0);
      for (size_t i = 0; i < products[p].size(); ++i)
        bytes[(k / 4 * c.N + (column + static_cast<int64_t>(7 * i)) % c.N) * 4 + k % 4] =
            static_cast<char>(products[p][i]);
      const int code = products[p].front();
      if (!is_nan(code)) {
        check_gemm(machine, t, Precision::highest, {.what = "codes from " + std::to_string(code)});
      } else {
        const Array out = run(machine, t);
        for (int64_t i = 0; i < c.N; ++i)
          expect(std::isnan(out.get(i)) == (i == column % c.N),
                 [&] { return name(machine) + " " + describe(c) + ": a NaN code, column " + std::to_string(i); });
      }
      std::copy(normal.begin(), normal.end(), bytes);
    }
  }
}

// Tests scale codes over the whole range of mxfp4 or mxfp8, with activations that are too small for AMX tiles and with
// larger ones.
inline void test_every_coded_scale(const Machine& machine, WeightFormat format) {
  for (const Activations& activations : kActivations) {
    for (int code = 0; code < 255; code += code < 240 ? 6 : 1) {
      for (const int exponent : {-99, std::clamp(26 - code, -68, 90)}) {
        Case c = case_of(format, 33, activations.type);
        c.K = 72;
        Tensors t = make(c);
        const double size = c.a_type == ElementType::float16 ? 0x1p-12 : std::ldexp(1.0, exponent);
        for (int64_t i = 0; i < t.a.count(); ++i)
          t.a.set(i, i % 24 == 5 ? size * (1 + 0x1.01p-10) : 0);
        for (int64_t i = 0; i < t.scales.count(); ++i)
          t.scales.set(i, code);
        check_size(machine, t, activations.precision, "scale code " + std::to_string(code));
      }
    }
  }
}

inline void test_range(const Machine& machine) {
  double worst = 0;
  for (const Activations& activations : kActivations) {
    for (const double size : {1e-45, 1e-39, 1e-33, 1e-20, 1e-7, 1e4, 1e30}) {
      if (activations.type == ElementType::float16 && (size > 1e5 || size < 1e-7)) continue;
      for (const int64_t M : {1, 9, 33}) {
        for (const WeightFormat format : {WeightFormat::uint4b8, WeightFormat::mxfp4}) {
          for (const auto& [every, first] : {std::pair{3, 0}, std::pair{32, 5}, std::pair{32, 20}})
            worst = std::max(worst, check_range(machine, activations, format, M, size, every, first));
        }
      }
    }
  }
  std::printf("%s: activations of 1e-45 to 1e30, largest error %.3f of the arithmetic bound\n", name(machine).c_str(),
              worst);
}

}  // namespace marlin::test
