// Compares the functions of the layer operators with fp64, for every instruction set that this machine supports. Uses
// no torch.
#include <algorithm>
#include <vector>

#include "cpu_test_support.h"
#include "csrc/decoder/cpu/kernel_table.h"

namespace marlin::test {
namespace {

using cpu::Isa;

double exact(Activation activation, double g, double u, double limit, double alpha) {
  switch (activation) {
    case Activation::silu:
      return g / (1 + std::exp(-g)) * u;
    case Activation::gelu:
      return g * 0.5 * std::erfc(-g / std::sqrt(2.0)) * u;
    case Activation::gelu_tanh:
      return g / (1 + std::exp(-2 * std::sqrt(2 / 3.14159265358979323846) * (g + 0.044715 * g * g * g))) * u;
    case Activation::clamped_silu:
      g = std::min(g, limit);
      u = std::clamp(u, -limit, limit);
      return g / (1 + std::exp(-alpha * g)) * (u + 1);
    case Activation::limited_silu:
      g = std::min(g, limit);
      return g / (1 + std::exp(-g)) * std::clamp(u, -limit, limit);
  }
  return 0;
}

void test_activations(Isa isa) {
  constexpr float kLimit = 7, kAlpha = 1.702F;
  const cpu::DecoderFunctions& functions = cpu::decoder_functions(isa);
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 4);
  const float kSpecial[] = {0.F, -0.F, 1e4F, -1e4F, 88.5F, -88.5F, 1e30F, -1e30F, std::nanf(""), 1e-30F};
  for (const int count : {1, 7, 16, 33, 512}) {
    for (const auto activation : {Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::clamped_silu,
                                  Activation::limited_silu}) {
      alignas(64) float g[cpu::kActivationBlock] = {};
      alignas(64) float u[cpu::kActivationBlock] = {};
      float gates[cpu::kActivationBlock];
      for (int i = 0; i < count; ++i) {
        g[i] = gates[i] = i < static_cast<int>(std::size(kSpecial)) ? kSpecial[i] : normal(random);
        u[i] = normal(random);
      }
      functions.activate(activation, {.gate = g, .up = u, .out = g, .count = count, .limit = kLimit, .alpha = kAlpha});
      for (int i = 0; i < count; ++i) {
        const double want = exact(activation, gates[i], u[i], kLimit, kAlpha);
        // The bound of docs/use/operators.md is 16 fp32 roundings of this magnitude.
        const bool has_limit = activation == Activation::clamped_silu || activation == Activation::limited_silu;
        const double size =
            std::fabs(has_limit ? std::min(gates[i], kLimit) : gates[i]) * (std::fabs(static_cast<double>(u[i])) + 1);
        // For a huge gate, the bound is relative to the result, which is 0 if the gate is negative.
        const bool is_huge = std::fabs(gates[i]) > 1e9F;
        const double bound = is_huge ? 1e-6 * std::fabs(want) : std::ldexp(16.0, -24) * size;
        const bool agrees = std::isnan(gates[i]) ? std::isnan(g[i]) : std::fabs(g[i] - want) <= bound + 1e-30;
        expect(agrees, [&] {
          return std::string(cpu::isa_name(isa)) + " activation " + std::to_string(static_cast<int>(activation)) +
                 " of " + std::to_string(gates[i]) + ", " + std::to_string(u[i]) + ": got " + std::to_string(g[i]) +
                 ", expected " + std::to_string(want);
        });
      }
    }
  }
}

// Lengths around the number of elements that are added to separate sums, and around the blocks of the loop.
void test_rows(Isa isa) {
  const cpu::DecoderFunctions& functions = cpu::decoder_functions(isa);
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0, 4);
  for (const int count : {2, 30, 32, 34, 500, 512, 514, 1080}) {
    std::vector<float> x(count), y(count), z(count), out(count);
    for (auto* row : {&x, &y, &z})
      std::generate(row->begin(), row->end(), [&] { return normal(random); });
    const auto compare = [&](const char* what, int i, double got, double want, double size) {
      expect(std::fabs(got - want) <= std::ldexp(4.0, -24) * size, [&] {
        return std::string(cpu::isa_name(isa)) + " " + what + ", element " + std::to_string(i) + " of " +
               std::to_string(count) + ": got " + std::to_string(got) + ", expected " + std::to_string(want);
      });
    };
    double squares = 0;
    for (const float value : x)
      squares += static_cast<double>(value) * static_cast<double>(value);
    compare("sum_of_squares", 0, functions.sum_of_squares(x.data(), count), squares, 4 * squares);
    functions.add_rows(x.data(), y.data(), count, out.data());
    for (int i = 0; i < count; ++i)
      compare("add_rows", i, out[i], static_cast<double>(x[i]) + y[i], std::fabs(x[i]) + std::fabs(y[i]));
    functions.scale_row(x.data(), 0.3F, y.data(), count, out.data());
    for (int i = 0; i < count; ++i) {
      const double want = static_cast<double>(x[i]) * 0.3F * static_cast<double>(y[i]);
      compare("scale_row", i, out[i], want, std::fabs(want));
    }
    for (const bool interleaved : {false, true}) {
      const int pairs = count / 2;
      functions.rotate_row({x.data(), y.data(), z.data(), pairs, interleaved, out.data()});
      for (int i = 0; i < count; ++i) {
        const int other = interleaved ? i ^ 1 : (i + pairs) % count;
        const double one = static_cast<double>(x[i]) * y[i];
        const double two = static_cast<double>(x[other]) * z[i];
        compare("rotate_row", i, out[i], one + two, std::fabs(one) + std::fabs(two));
      }
    }
  }
  std::printf("%s: functions of the layer operators\n", cpu::isa_name(isa));
}

}  // namespace
}  // namespace marlin::test

int main() {
  using marlin::cpu::Isa;
  for (const Isa isa : marlin::cpu::detected().available)
    if (isa != Isa::amx) {  // AMX uses the functions of AVX-512
      marlin::test::test_activations(isa);
      marlin::test::test_rows(isa);
    }
  return marlin::test::report();
}
