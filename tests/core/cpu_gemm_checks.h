// gemm on a machine that a test names, and its result against fp64.
#pragma once

#include <algorithm>

#include "cpu_test_support.h"

namespace marlin::test {

using cpu::Float32Precision;
using cpu::Isa;
using cpu::Machine;

inline std::string name(const Machine& machine) {
  return std::string(cpu::isa_name(machine.isa)) + (machine.fast_bf16_dot ? "+bf16" : "") +
         (machine.byte_dot ? "+bytes" : "") + " threads=" + std::to_string(machine.threads);
}

inline Array run(const Machine& machine, const Tensors& t, Float32Precision precision = Float32Precision::highest) {
  Array out(t.c.a_type, t.c.M * t.c.N);
  std::memset(out.data(), 0x5A, static_cast<size_t>(out.count() * bytes_of(t.c.a_type)));
  cpu::gemm_on(machine, t.arguments(out.data()), loop(machine.threads), precision);
  return out;
}

inline bool same_bits(const Array& a, const Array& b) {
  return std::memcmp(a.data(), b.data(), static_cast<size_t>(a.count() * bytes_of(a.type()))) == 0;
}

// Fp32 activations in two bf16 parts, which hold 16 of their 24 bits.
inline bool loses_bits(const Machine& machine, const Tensors& t, Float32Precision precision) {
  return t.c.a_type == ElementType::float32 &&
         cpu::make_plan(machine, cpu::problem_of(t.arguments(nullptr), precision)).parts == 2;
}

// The design's bound. Returns the largest share of its arithmetic term that was used, output rounding taken off.
inline double check_gemm(const Machine& machine, const Tensors& t,
                         Float32Precision precision = Float32Precision::highest) {
  const Case& c = t.c;
  const Array out = run(machine, t, precision);
  const double unit = loses_bits(machine, t, precision) ? 0x1p-17 : 16 * 0x1p-24;
  const std::vector<double> x = t.activations();
  std::vector<double> weight(static_cast<size_t>(c.K)), size(static_cast<size_t>(c.K));
  double worst = 0;
  for (int64_t n = 0; n < c.N; ++n) {
    for (int64_t k = 0; k < c.K; ++k) {
      const auto i = static_cast<size_t>(k);
      weight[i] = t.weight(k, n, &size[i]);
    }
    for (int64_t m = 0; m < c.M; ++m) {
      double y = t.bias.empty() ? 0 : t.bias.get(n);
      double sum = std::fabs(y);
      for (int64_t k = 0; k < c.K; ++k) {
        const double xk = x[static_cast<size_t>(m * c.K + k)];
        y += xk * weight[static_cast<size_t>(k)];
        sum += std::fabs(xk) * size[static_cast<size_t>(k)];
      }
      const double got = out.get(m * c.N + n);
      const double slack = unit * sum;
      const double bound = unit_roundoff(c.a_type) * std::fabs(y) + smallest(c.a_type) + slack;
      const double edge = largest(c.a_type) * (1 + unit_roundoff(c.a_type));
      bool good = std::fabs(got - y) <= bound;
      if (std::isinf(got)) good = std::fabs(y) + slack >= edge && std::signbit(got) == std::signbit(y);
      if (std::fabs(y) - slack > edge) good = std::isinf(got) && std::signbit(got) == std::signbit(y);
      const double rounding = unit_roundoff(c.a_type) * std::fabs(y) + smallest(c.a_type);
      if (std::isfinite(got)) worst = std::max(worst, (std::fabs(got - y) - rounding) / slack);
      expect(good, [&] {
        return name(machine) + " " + describe(c) + " at [" + std::to_string(m) + ", " + std::to_string(n) + "]: got " +
               std::to_string(got) + ", expected " + std::to_string(y) + " +- " + std::to_string(bound);
      });
    }
  }
  expect(same_bits(out, run(machine, t, precision)),
         [&] { return name(machine) + " " + describe(c) + ": the second run gave other bits"; });
  return worst;
}

}  // namespace marlin::test
