// The CPU kernels against fp64, for every family of instructions that this machine has. No torch. Prints one line a
// group of checks, "FAILED ..." for each failure, and exits with 1 if there was any.
#include <algorithm>
#include <cstdlib>
#include <set>
#include <stdexcept>

#include "cpu_test_support.h"

namespace marlin::test {
namespace {

using cpu::Float32Precision;
using cpu::Isa;
using cpu::Machine;

int failures = 0;
int64_t checks = 0;

void expect(bool condition, const std::string& what) {
  ++checks;
  if (condition) return;
  if (++failures <= 20) std::printf("FAILED %s\n", what.c_str());
}

constexpr ElementType kFloats[] = {ElementType::float16, ElementType::bfloat16, ElementType::float32};

std::string name(const Machine& machine) {
  return std::string(cpu::isa_name(machine.isa)) + (machine.fast_bf16_dot ? "+bf16" : "") +
         " threads=" + std::to_string(machine.threads);
}

Array run(const Machine& machine, const Tensors& t) {
  Array out(t.c.a_type, t.c.M * t.c.N);
  std::memset(out.data(), 0x5A, static_cast<size_t>(out.count() * bytes_of(t.c.a_type)));
  cpu::gemm_on(machine, t.arguments(out.data()), loop(machine.threads), Float32Precision::highest);
  return out;
}

bool same_bits(const Array& a, const Array& b) {
  return std::memcmp(a.data(), b.data(), static_cast<size_t>(a.count() * bytes_of(a.type()))) == 0;
}

// The design's bound. Returns the largest share of its arithmetic term that was used, output rounding taken off.
double check_gemm(const Machine& machine, const Case& c) {
  const Tensors t = make(c);
  const Array out = run(machine, t);
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
        const double x = t.activation(m, k);
        y += x * weight[static_cast<size_t>(k)];
        sum += std::fabs(x) * size[static_cast<size_t>(k)];
      }
      const double got = out.get(m * c.N + n);
      const double slack = 16 * 0x1p-24 * sum;
      const double bound = unit_roundoff(c.a_type) * std::fabs(y) + smallest(c.a_type) + slack;
      const double edge = largest(c.a_type) * (1 + unit_roundoff(c.a_type));
      bool good = std::fabs(got - y) <= bound;
      if (std::isinf(got)) good = std::fabs(y) + slack >= edge && std::signbit(got) == std::signbit(y);
      if (std::fabs(y) - slack > edge) good = std::isinf(got) && std::signbit(got) == std::signbit(y);
      const double rounding = unit_roundoff(c.a_type) * std::fabs(y) + smallest(c.a_type);
      if (std::isfinite(got)) worst = std::max(worst, (std::fabs(got - y) - rounding) / slack);
      expect(good, name(machine) + " " + describe(c) + " at [" + std::to_string(m) + ", " + std::to_string(n) +
                       "]: got " + std::to_string(got) + ", expected " + std::to_string(y) + " +- " +
                       std::to_string(bound));
    }
  }
  expect(same_bits(out, run(machine, t)), name(machine) + " " + describe(c) + ": the second run gave other bits");
  return worst;
}

Case random_case(std::mt19937& random, WeightFormat format, ElementType a_type, bool small) {
  auto pick = [&](auto... v) {
    const int64_t values[] = {v...};
    return values[random() % (sizeof...(v))];
  };
  Case c;
  c.format = format;
  c.a_type = a_type;
  c.M = pick(1, 2, 3, 4, 5, 8, 13, 16, 17, 33, 64, 100);
  c.N = pick(1, 7, 24, 31, 64, 100, 129, 200);
  c.K = pick(8, 16, 24, 40, 72, 136, 200, 264, 520, 1000);
  if (small) c.M = std::min<int64_t>(c.M, 17);
  c.group_size = pick(16, 32, 64, 128, 256, c.K);
  if (info(format).fixed_group_size != 0) c.group_size = info(format).fixed_group_size;
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

void test_gemm(const Machine& machine, int rounds, bool small) {
  std::mt19937 random(7);
  double worst = 0;
  for (const WeightFormatInfo& format : kWeightFormats) {
    for (const ElementType a_type : kFloats) {
      for (int i = 0; i < rounds; ++i) {
        worst = std::max(worst, check_gemm(machine, random_case(random, format.format, a_type, small)));
      }
    }
  }
  std::printf("%s: gemm, %d random cases, largest error %.3f of the arithmetic bound\n", name(machine).c_str(),
              rounds * kWeightFormatCount * 3, worst);
}

// Nothing cancels: a long chain of additions would show.
void test_long_k(const Machine& machine) {
  double worst = 0;
  for (const ElementType a_type : kFloats) {
    for (const int64_t group_size : {16, 128, 16384}) {
      for (const int64_t M : {1, 5}) {
        Case c;
        c.format = group_size == 16 ? WeightFormat::nvfp4 : WeightFormat::uint4;
        c.M = M;
        c.N = 33;
        c.K = 16384;
        c.group_size = group_size;
        c.a_type = a_type;
        c.positive = true;
        worst = std::max(worst, check_gemm(machine, c));
      }
    }
  }
  std::printf("%s: gemm, K = 16384, all positive, largest error %.3f of the arithmetic bound\n", name(machine).c_str(),
              worst);
}

// More rows than are packed at once, and more than a block of results; 513 would leave a pass of one row.
void test_many_rows(const Machine& machine) {
  double worst = 0;
  for (const int64_t M : {513, 1030}) {
    Case c;
    c.M = M;
    c.N = 70;
    c.K = 136;
    c.group_size = 64;
    c.a_type = ElementType::bfloat16;
    worst = std::max(worst, check_gemm(machine, c));
  }
  std::printf("%s: gemm, M = 513 and 1030, largest error %.3f of the arithmetic bound\n", name(machine).c_str(), worst);
}

void test_overflow(const Machine& machine) {
  Case c;
  c.M = 3;
  c.N = 40;
  c.K = 512;
  c.group_size = 128;
  c.a_type = ElementType::float16;
  c.format = WeightFormat::uint4_bias;
  c.zeros_type = ElementType::float32;
  Tensors t = make(c);
  for (int64_t i = 0; i < t.a.count(); ++i)
    t.a.set(i, 60000);
  const Array out = run(machine, t);
  for (int64_t i = 0; i < out.count(); ++i)
    expect(std::isinf(out.get(i)), name(machine) + ": fp16 overflow is inf");
}

// A non-finite activation spoils its row and no other, a non-finite scale its column and no other.
void test_non_finite(const Machine& machine) {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  for (const WeightFormatInfo& format : kWeightFormats) {
    for (const ElementType a_type : kFloats) {
      for (const int64_t M : {2, 15}) {
        for (const double bad : {nan, inf, -inf}) {
          Case c;
          c.format = format.format;
          c.M = M;
          c.N = 45;
          c.K = 200;
          c.group_size = format.fixed_group_size != 0 ? format.fixed_group_size : 32;
          c.a_type = a_type;
          c.zeros_type = ElementType::float16;
          Tensors t = make(c);
          t.a.set(1 * c.K + 77, bad);
          const Array out = run(machine, t);
          for (int64_t m = 0; m < M; ++m) {
            for (int64_t n = 0; n < c.N; ++n) {
              const double y = out.get(m * c.N + n);
              const bool good = m != 1 ? std::isfinite(y) : std::isnan(bad) ? std::isnan(y) : !std::isfinite(y);
              expect(good, name(machine) + " " + describe(c) + ": activation " + std::to_string(bad) + " gave " +
                               std::to_string(y) + " in row " + std::to_string(m));
            }
          }
          const bool coded = info(format.format).scale_coding != ScaleCoding::floating;
          if (coded && !std::isnan(bad)) continue;
          Tensors u = make(c);
          const double code = format.format == WeightFormat::nvfp4 ? (c.M == 2 ? 0x7F : 0xFF) : 0xFF;
          u.scales.set(2 * c.N + 9, coded ? code : bad);
          const Array scaled = run(machine, u);
          for (int64_t m = 0; m < M; ++m) {
            for (int64_t n = 0; n < c.N; ++n) {
              const double y = scaled.get(m * c.N + n);
              const bool good = n != 9 ? std::isfinite(y) : std::isnan(bad) ? std::isnan(y) : !std::isfinite(y);
              expect(good, name(machine) + " " + describe(c) + ": scale " + std::to_string(bad) + " gave " +
                               std::to_string(y) + " in column " + std::to_string(n));
            }
          }
        }
      }
    }
  }
  std::printf("%s: NaN and inf\n", name(machine).c_str());
}

// Tiny and huge activations, where a narrower intermediate format would lose them.
void test_range(const Machine& machine) {
  double worst = 0;
  for (const ElementType a_type : kFloats) {
    for (const double size : {1e-45, 1e-39, 1e-33, 1e-20, 1e-7, 1e4, 1e30}) {
      if (a_type == ElementType::float16 && (size > 1e5 || size < 1e-7)) continue;
      for (const int64_t M : {1, 9}) {
        Case c;
        c.M = M;
        c.N = 40;
        c.K = 136;
        c.group_size = 64;
        c.a_type = a_type;
        c.scales_type = ElementType::float32;
        const Tensors made = make(c);
        Tensors t = make(c);
        for (int64_t i = 0; i < t.a.count(); ++i)
          t.a.set(i, i % 3 == 0 ? size * made.a.get(i) : 0);
        const Array out = run(machine, t);
        for (int64_t m = 0; m < c.M; ++m) {
          for (int64_t n = 0; n < c.N; ++n) {
            double y = 0, sum = 0;
            for (int64_t k = 0; k < c.K; ++k) {
              y += t.activation(m, k) * t.weight(k, n);
              sum += std::fabs(t.activation(m, k) * t.weight(k, n));
            }
            // fp32 subnormals on the way are worth an ulp each.
            const double slack = 16 * 0x1p-24 * sum + static_cast<double>(c.K) * 0x1p-149;
            const double bound = unit_roundoff(a_type) * std::fabs(y) + smallest(a_type) + slack;
            const double got = out.get(m * c.N + n);
            if (std::fabs(y) + slack > largest(a_type)) continue;
            worst =
                std::max(worst, (std::fabs(got - y) - unit_roundoff(a_type) * std::fabs(y) - smallest(a_type)) / slack);
            expect(std::fabs(got - y) <= bound,
                   name(machine) + " activations of size " + std::to_string(std::log10(size)) + ": " + describe(c));
          }
        }
      }
    }
  }
  std::printf("%s: activations of 1e-45 to 1e30, largest error %.3f of the arithmetic bound\n", name(machine).c_str(),
              worst);
}

// Other ranges of rows or columns must not change a result unless K is split.
void test_partition(const Isa isa, bool bf16) {
  Case c;
  c.M = 40;
  c.N = 600;
  c.K = 264;
  c.group_size = 32;
  c.a_type = ElementType::bfloat16;
  const Tensors t = make(c);
  const Array one = run({isa, bf16, 1}, t);
  for (const int threads : {2, 3, 4}) {
    expect(same_bits(one, run({isa, bf16, threads}, t)),
           std::string(cpu::isa_name(isa)) + ": the number of threads changed the bits without a split of K");
  }
}

float as_float32(double v) {
  return static_cast<float>(v);
}

// In fp32, in the order of the table, then one rounding: compared bit for bit.
void test_dequantize(Isa isa, int rounds) {
  std::mt19937 random(11);
  for (const WeightFormatInfo& format : kWeightFormats) {
    for (const ElementType out_type : kFloats) {
      for (int i = 0; i < rounds; ++i) {
        Case c = random_case(random, format.format, out_type, true);
        c.M = 1;
        Tensors t = make(c);
        if (i % 2 == 0 && format.scale_coding != ScaleCoding::floating) {
          for (int64_t s = 0; s < t.scales.count(); ++s)
            t.scales.set(s, static_cast<double>(s % 256));
        }
        Array out(out_type, c.K * c.N);
        const cpu::DequantizeArguments arguments{t.packed(), t.perm.empty() ? nullptr : t.perm.data(), out.data(),
                                                 out_type};
        cpu::dequantize_on(isa, arguments, loop(3));
        for (int64_t k = 0; k < c.K; ++k) {
          for (int64_t n = 0; n < c.N; ++n) {
            const int64_t at = k / c.group_size * c.N + n;
            float w;
            if (c.format == WeightFormat::uint4) {
              w = as_float32(t.code(k, n) - t.zeros.get(at));
              w = as_float32(static_cast<double>(w) * t.scales.get(at));
            } else if (c.format == WeightFormat::uint4_bias) {
              w = as_float32(t.code(k, n) * t.scales.get(at));
              w = as_float32(static_cast<double>(w) + t.zeros.get(at));
            } else {
              w = as_float32(t.weight(k, n));
            }
            Array expected(out_type, 1);
            expected.set(0, w);
            const int64_t row = t.perm.empty() ? k : t.perm[static_cast<size_t>(k)];
            const double got = out.get(row * c.N + n), want = expected.get(0);
            const bool good = std::isnan(want) ? std::isnan(got) : got == want;
            expect(good, std::string(cpu::isa_name(isa)) + " dequantize " + describe(c) + " at [" + std::to_string(k) +
                             ", " + std::to_string(n) + "]: got " + std::to_string(got) + ", expected " +
                             std::to_string(want));
          }
        }
      }
    }
  }
  std::printf("%s: dequantize, %d cases, bit for bit\n", cpu::isa_name(isa), rounds * kWeightFormatCount * 3);
}

void test_repack() {
  std::mt19937 random(3);
  for (const auto& [K, N] : std::vector<std::pair<int64_t, int64_t>>{{8, 1}, {24, 7}, {136, 40}, {264, 129}, {64, 8}}) {
    std::vector<uint32_t> words(static_cast<size_t>(K / 8 * N)), out(words.size());
    for (uint32_t& w : words)
      w = static_cast<uint32_t>(random());
    auto nibble = [&](const std::vector<uint32_t>& from, int64_t row, int64_t stride, int64_t column, int64_t at) {
      return (from[static_cast<size_t>(row * stride + column)] >> (4 * at)) & 15U;
    };
    std::vector<int32_t> perm(static_cast<size_t>(K));
    for (size_t i = 0; i < perm.size(); ++i)
      perm[i] = static_cast<int32_t>(i);
    for (size_t i = perm.size() - 1; i > 0; --i)
      std::swap(perm[i], perm[random() % (i + 1)]);
    cpu::gptq_repack(words.data(), nullptr, K, N, out.data(), loop(3));
    expect(words == out, "gptq_repack without perm copies");
    cpu::gptq_repack(words.data(), perm.data(), K, N, out.data(), loop(3));
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t n = 0; n < N; ++n) {
        const int64_t p = perm[static_cast<size_t>(k)];
        expect(nibble(out, k / 8, N, n, k % 8) == nibble(words, p / 8, N, n, p % 8), "gptq_repack row by perm");
      }
    }
    if (N % 8 != 0) continue;
    static constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // nibble i of a word holds column 8c + kOrder[i]
    cpu::awq_repack(words.data(), K, N, out.data(), loop(3));
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t c = 0; c < N / 8; ++c) {
        for (int64_t i = 0; i < 8; ++i) {
          expect(nibble(out, k / 8, N, 8 * c + kOrder[i], k % 8) == nibble(words, k, N / 8, c, i), "awq_repack");
        }
      }
    }
    const int64_t G = K / 8;
    std::vector<uint8_t> zeros(static_cast<size_t>(G * N));
    cpu::awq_unpack_zeros(words.data(), G, N, zeros.data(), loop(2));
    for (int64_t i = 0; i < G * N; ++i) {
      expect(zeros[static_cast<size_t>(i / 8 * 8 + kOrder[i % 8])] ==
                 ((words[static_cast<size_t>(i / 8)] >> (4 * (i % 8))) & 15U),
             "awq_unpack_zeros");
    }
    for (const cpu::ZerosRule rule : {cpu::ZerosRule::word, cpu::ZerosRule::masked, cpu::ZerosRule::unmasked}) {
      for (const int version : {1, 2}) {
        cpu::gptq_unpack_zeros(words.data(), G, N, version, rule, zeros.data(), loop(2));
        for (int64_t i = 0; i < G * N; ++i) {
          const uint32_t word = words[static_cast<size_t>(i / 8)];
          const uint32_t raw = (word >> (4 * (i % 8))) & 15U;
          uint32_t expected = raw;
          if (version == 1 && rule == cpu::ZerosRule::word) expected = ((word + 0x11111111U) >> (4 * (i % 8))) & 15U;
          if (version == 1 && rule == cpu::ZerosRule::masked) expected = (raw + 1) & 15U;
          if (version == 1 && rule == cpu::ZerosRule::unmasked) expected = raw + 1;
          expect(zeros[static_cast<size_t>(i)] == expected, "gptq_unpack_zeros");
        }
      }
    }
  }
  std::printf("repack and unpack_zeros, bit for bit\n");
}

void test_empty(const Machine& machine) {
  Tensors t = make(Case{});
  GemmArguments arguments = t.arguments(nullptr);
  arguments.M = 0;
  cpu::gemm_on(machine, arguments, loop(2), Float32Precision::highest);
  expect(true, "M = 0");
}

int run_all(int rounds) {
  for (const Isa isa : cpu::detected().available) {
    for (const bool bf16 : {false, true}) {
      if (bf16 && !(cpu::detected().fast_bf16_dot && isa >= Isa::avx512)) continue;
      const Machine machine{isa, bf16, 2};
      test_empty(machine);
      test_gemm(machine, rounds, false);
      test_gemm({isa, bf16, 16}, std::max(rounds / 4, 1), true);
      test_long_k(machine);
      test_many_rows(machine);
      test_overflow(machine);
      test_non_finite(machine);
      test_range(machine);
      test_partition(isa, bf16);
    }
    test_dequantize(isa, std::max(rounds / 4, 2));
  }
  test_repack();
  std::printf("%lld checks, %d failed\n", static_cast<long long>(checks), failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace marlin::test

int main(int argc, char** argv) {
  try {
    if (argc > 1 && std::strcmp(argv[1], "capability") == 0) {
      const marlin::cpu::Capability& found = marlin::cpu::capability();
      std::printf("%s: %s; available:", marlin::cpu::isa_name(found.isa), found.reason.c_str());
      for (const marlin::cpu::Isa isa : found.available)
        std::printf(" %s", marlin::cpu::isa_name(isa));
      std::printf("\n");
      return 0;
    }
    return marlin::test::run_all(argc > 1 ? std::atoi(argv[1]) : 40);
  } catch (const std::exception& error) {
    std::printf("FAILED %s\n", error.what());
    return 1;
  }
}
