// Runs gemm as on a machine that the test describes, and compares the result with fp64.
#pragma once

#include <algorithm>
#include <array>

#include "cpu_plan_support.h"
#include "cpu_test_support.h"

namespace marlin::test {

using cpu::Isa;
using cpu::Machine;
using cpu::Precision;

inline std::string name(const Machine& machine) {
  return std::string(cpu::isa_name(machine.isa)) + (machine.fast_bf16_dot ? "+bf16" : "") +
         (machine.byte_dot ? "+bytes" : "") + (machine.byte_matrix ? "+matrix" : "") +
         " threads=" + std::to_string(machine.threads);
}

inline Array run(const Machine& machine, const Tensors& t, Precision precision = Precision::highest) {
  Array out(t.c.a_type, t.c.M * t.c.N);
  std::memset(out.data(), 0x5A, static_cast<size_t>(out.count() * bytes_of(t.c.a_type)));
  cpu::gemm_on(machine, t.arguments(out.data()), loop(machine.threads), precision);
  return out;
}

inline bool same_bits(const Array& a, const Array& b) {
  return std::memcmp(a.data(), b.data(), static_cast<size_t>(a.count() * bytes_of(a.type()))) == 0;
}

// The type of the activations, and the precision setting, which only affects fp32.
struct Activations {
  ElementType type;
  Precision precision = Precision::highest;
};
inline constexpr Activations kActivations[] = {{ElementType::float16},
                                               {ElementType::bfloat16},
                                               {ElementType::float32},
                                               {ElementType::float32, Precision::reduced}};

inline cpu::CpuPlan plan_of(const Machine& machine, const Tensors& t, Precision precision) {
  return cpu::make_plan(machine, cpu::problem_of(t.arguments(nullptr), precision));
}

// Returns the arithmetic error that the bound allows, as a fraction of sum_k size(a_k) |w_k|. The error is larger if
// weights are rounded, or if fp32 activations are split into two bf16 parts, which keep 16 of 24 bits. The single part
// of "int8" keeps 8 bits.
inline double error_unit(const cpu::CpuPlan& plan, const Tensors& t) {
  if (cpu::rounds(plan.kernel)) return unit_roundoff(ElementType::bfloat16) + 16 * 0x1p-24;
  if (plan.kernel == cpu::CpuKernel::amx && plan.parts == 1 && t.c.a_type != ElementType::bfloat16) return 0x1p-8;
  return t.c.a_type == ElementType::float32 && plan.parts == 2 ? 0x1p-17 : 16 * 0x1p-24;
}

// Returns size(a_k) as [M, K]: the magnitude of each activation, or the largest magnitude in its group.
inline std::vector<double> sizes(const Tensors& t, bool of_group) {
  std::vector<double> size = t.activations();
  for (double& x : size)
    x = std::fabs(x);
  if (!of_group) return size;
  for (auto row = size.begin(); row != size.end(); row += t.c.K) {
    for (int64_t k = 0; k < t.c.K; k += t.c.group_size) {
      const auto begin = row + k, end = row + std::min(k + t.c.group_size, t.c.K);
      std::fill(begin, end, *std::max_element(begin, end));
    }
  }
  return size;
}

// Returns the activations [M, K] after rounding to 8 bits, by the rule of docs/use/operators.md.
inline std::vector<double> rounded(const Tensors& t) {
  std::vector<double> x = t.activations();
  for (auto row = x.begin(); row != x.end(); row += t.c.K) {
    for (int64_t group = 0; group < t.c.K; group += t.c.group_size) {
      const int64_t group_end = std::min(group + t.c.group_size, t.c.K);
      for (int64_t k = group; k < group_end; k += 32) {
        const auto begin = row + k, end = row + std::min(k + 32, group_end);
        float largest = 0;
        for (auto at = begin; at != end; ++at)
          largest = std::max(largest, static_cast<float>(std::fabs(*at)));
        const double unit = largest / 127.F, units = largest == 0 ? 0 : 127.F / largest;
        std::transform(begin, end, begin, [&](double value) { return unit * std::nearbyint(value * units); });
      }
    }
  }
  return x;
}

// Loosens the bound of check_gemm.
struct Allowance {
  double absolute = 0;            // is added to the bound
  bool largest_of_group = false;  // takes size(a_k) from the largest activation of a group, also for 16 bits
  std::string what;               // names the case in failures
};

// The reference computes several sums at the same time: in a single sum, each addition would wait for the one before.
constexpr int64_t kRowsAtOnce = 4;

// Adds the products of rows m to m + kRowsAtOnce - 1 of x [M, K] and a column y to `start`. Rows at or beyond M repeat
// the last row. The function is not sanitized, because it would take most of the time of a sanitized run.
[[gnu::no_sanitize("address"), gnu::no_sanitize("undefined")]] inline std::array<double, kRowsAtOnce> sums_of_rows(
    int64_t m, double start, const Case& c, const double* x, const double* y) {
  const double* a = x + m * c.K;
  const double* b = x + std::min(m + 1, c.M - 1) * c.K;
  const double* d = x + std::min(m + 2, c.M - 1) * c.K;
  const double* e = x + std::min(m + 3, c.M - 1) * c.K;
  double sum_a = start, sum_b = start, sum_d = start, sum_e = start;
  for (int64_t k = 0; k < c.K; ++k) {
    sum_a += a[k] * y[k];
    sum_b += b[k] * y[k];
    sum_d += d[k] * y[k];
    sum_e += e[k] * y[k];
  }
  return {sum_a, sum_b, sum_d, sum_e};
}

// Checks gemm against the bound of docs/use/operators.md. For 16-bit activations, the byte_split kernels get a tighter
// bound: the random activations of a group are so similar in size that these kernels represent them exactly. Returns
// the largest error, minus the rounding of the output, divided by the arithmetic term of the bound.
inline double check_gemm(const Machine& machine, const Tensors& t, Precision precision = Precision::highest,
                         const Allowance& allowance = {}) {
  const Case& c = t.c;
  const Array out = run(machine, t, precision);
  const cpu::CpuPlan plan = plan_of(machine, t, precision);
  const double unit = error_unit(plan, t);
  const bool int8 = cpu::is_int8(plan.kernel);
  const std::vector<double> x = int8 ? rounded(t) : t.activations();
  const std::vector<double> x_size = sizes(
      t, int8 || (cpu::is_byte_split(plan.kernel) && (c.a_type == ElementType::float32 || allowance.largest_of_group)));
  std::vector<double> weight(static_cast<size_t>(c.K)), size(static_cast<size_t>(c.K));
  std::array<double, kRowsAtOnce> exact{}, sums{};
  double worst = 0;
  for (int64_t n = 0; n < c.N; ++n) {
    for (int64_t k = 0; k < c.K; ++k) {
      const auto i = static_cast<size_t>(k);
      weight[i] = t.weight(k, n, &size[i]);
    }
    const double start = t.bias.empty() ? 0 : t.bias.get(n);
    for (int64_t m = 0; m < c.M; ++m) {
      const auto j = static_cast<size_t>(m % kRowsAtOnce);
      if (j == 0) {
        exact = sums_of_rows(m, start, c, x.data(), weight.data());
        sums = sums_of_rows(m, std::fabs(start), c, x_size.data(), size.data());
      }
      const double y = exact[j], sum = sums[j];
      const double got = out.get(m * c.N + n);
      const double slack = unit * sum + allowance.absolute;
      const double bound = unit_roundoff(c.a_type) * std::fabs(y) + smallest(c.a_type) + slack;
      const double edge = largest(c.a_type) * (1 + unit_roundoff(c.a_type));
      bool good = std::fabs(got - y) <= bound;
      if (std::isinf(got)) good = std::fabs(y) + slack >= edge && std::signbit(got) == std::signbit(y);
      if (std::fabs(y) - slack > edge) good = std::isinf(got) && std::signbit(got) == std::signbit(y);
      const double rounding = unit_roundoff(c.a_type) * std::fabs(y) + smallest(c.a_type);
      if (std::isfinite(got)) worst = std::max(worst, (std::fabs(got - y) - rounding) / slack);
      expect(good, [&] {
        return name(machine) + " " + allowance.what + " " + describe(c) + " at [" + std::to_string(m) + ", " +
               std::to_string(n) + "]: got " + std::to_string(got) + ", expected " + std::to_string(y) + " +- " +
               std::to_string(bound);
      });
    }
  }
  expect(same_bits(out, run(machine, t, precision)),
         [&] { return name(machine) + " " + describe(c) + ": the second run gave different bits"; });
  return worst;
}

}  // namespace marlin::test
