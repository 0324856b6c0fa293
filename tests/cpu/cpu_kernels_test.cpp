// Compares the CPU kernels with fp64, for every instruction set that this machine supports. Uses no torch. Prints a
// line per group of checks and "FAILED ..." for each failure. Exits with 1 if there was a failure.
#include <algorithm>
#include <cstdlib>
#include <set>
#include <stdexcept>

#include "cpu_gemm_checks.h"
#include "cpu_range_checks.h"
#include "csrc/cpu/kernels/kernel_table.h"

namespace marlin::test {
namespace {

void test_gemm(const Machine& machine, int rounds, bool small) {
  std::mt19937 random(7);
  double worst = 0;
  for (const WeightFormat format : kReferenceFormats) {
    for (const ElementType a_type : kFloats) {
      for (int i = 0; i < rounds; ++i) {
        worst = std::max(worst, check_gemm(machine, make(random_case(random, format, a_type, small))));
      }
    }
  }
  std::printf("%s: gemm, %zu random cases, largest error %.3f of the arithmetic bound\n", name(machine).c_str(),
              rounds * std::size(kReferenceFormats) * 3, worst);
}

void test_reduced(const Machine& machine, int rounds) {
  std::mt19937 random(11);
  double worst = 0;
  int cases = 0, parts = 0, bytes = 0;
  for (const WeightFormat format : kReferenceFormats) {
    for (int i = 0; i < rounds; ++i) {
      const Tensors t = make(random_case(random, format, ElementType::float32, false));
      worst = std::max(worst, check_gemm(machine, t, Precision::reduced));
      const cpu::CpuPlan plan = plan_of(machine, t, Precision::reduced);
      parts += plan.parts == 2 ? 1 : 0;
      bytes += cpu::is_byte_split(plan.kernel) ? 1 : 0;
      ++cases;
    }
  }
  const std::string taken = std::to_string(parts) + " in two bf16 parts, " + std::to_string(bytes) + " in three bytes";
  expect((parts > 0) == (machine.isa == Isa::amx), [&] { return name(machine) + ": reduced fp32: " + taken; });
  // CPUs with AMX or AVX2 use the byte_split kernels only for the smallest numbers of rows.
  if (machine.isa != Isa::amx && machine.isa != Isa::avx2) {
    expect((bytes > 0) == machine.byte_dot, [&] { return name(machine) + ": reduced fp32: " + taken; });
  }
  std::printf("%s: gemm, reduced fp32 precision, %d random cases, %s, largest error %.3f of the bound\n",
              name(machine).c_str(), cases, taken.c_str(), worst);
}

// Compares products of 8-bit activations with products of rounded activations, for each number of rows of a block.
void test_int8(const Machine& machine) {
  std::mt19937 random(13);
  double worst = 0;
  int cases = 0;
  for (const WeightFormat format : kReferenceFormats) {
    if (!cpu::has_int8(machine, format)) continue;
    for (int64_t M = 1; M <= 9; ++M) {
      Case c = random_case(random, format, kFloats[M % 3], false);
      c.M = M;
      const Tensors t = make(c);
      worst = std::max(worst, check_gemm(machine, t, Precision::int8));
      const bool is_int8 = cpu::is_int8(plan_of(machine, t, Precision::int8).kernel);
      expect(is_int8 || M == 1, [&] { return name(machine) + ": " + describe(c) + ": activations were not rounded"; });
      ++cases;
    }
  }
  if (machine.isa == Isa::amx && machine.byte_dot) {
    Case c;
    c.M = 12;
    c.K = c.group_size = 128;
    c.a_type = ElementType::float32;
    const Tensors t = make(c);
    check_gemm(machine, t, Precision::int8);
    expect(plan_of(machine, t, Precision::int8).parts == 1, [&] { return name(machine) + ": int8: several parts"; });
  }
  const bool wanted = machine.isa == Isa::neon ? machine.byte_dot : machine.isa != Isa::portable;
  expect(wanted == (cases > 0), [&] { return name(machine) + ": int8: " + std::to_string(cases) + " cases"; });
  std::printf("%s: gemm, activations of 8 bits, %d cases, largest error %.3f of the bound\n", name(machine).c_str(),
              cases, worst);
}

// Tests M = 1 to 25. A kernel with blocks of up to 12 rows divides these rows into one, two or three blocks.
void test_every_m(const Machine& machine) {
  double worst = 0;
  for (const Activations& activations : kActivations) {
    for (int64_t M = 1; M <= 25; ++M) {
      Case c;
      c.M = M;
      c.N = 33;
      c.K = 72;
      c.group_size = 32;
      c.a_type = activations.type;
      worst = std::max(worst, check_gemm(machine, make(c), activations.precision));
    }
  }
  std::printf("%s: gemm, M = 1 to 25, largest error %.3f of the arithmetic bound\n", name(machine).c_str(), worst);
}

// Tests long K with positive numbers only. Rounding errors then do not cancel, and a long chain of additions would
// exceed the bound.
void test_long_k(const Machine& machine) {
  double worst = 0;
  for (const Activations& activations : kActivations) {
    for (const int64_t group_size : {16, 128, 16384}) {
      for (const int64_t M : {1, 5}) {
        if ((group_size == 128) == (M == 1)) continue;
        Case c;
        c.format = group_size == 16 ? WeightFormat::nvfp4 : WeightFormat::uint4;
        c.M = M;
        c.N = 17;
        c.K = 16384;
        c.group_size = group_size;
        c.a_type = activations.type;
        c.positive = true;
        worst = std::max(worst, check_gemm(machine, make(c), activations.precision));
      }
    }
  }
  std::printf("%s: gemm, K = 16384, all positive, largest error %.3f of the arithmetic bound\n", name(machine).c_str(),
              worst);
}

// Tests one row with half chunks of K, which the planner chooses for AMD's CPUs. Every CPU with AVX-512 and VNNI can
// run them. The last chunk has only 8 elements of K. Only the largest K is sliced.
void test_half_chunks(Machine machine) {
  if (machine.isa != Isa::avx512 || !machine.byte_dot) return;
  machine.fast_bf16_dot = true;
  struct Row {
    WeightFormat format;
    int64_t K, group_size;
    ElementType a_type;
  };
  using enum ElementType;
  for (const auto& [format, K, group_size, a_type] : {Row{WeightFormat::uint4b8, 200, 128, bfloat16},
                                                      {WeightFormat::uint4, 200, 16, float16},
                                                      {WeightFormat::uint4_bias, 264, 264, bfloat16},
                                                      {WeightFormat::nvfp4, 72, 16, float16},
                                                      {WeightFormat::uint4, 1032, 128, bfloat16}}) {
    Case c;
    c.format = format;
    c.M = 1;
    c.N = 4133;
    c.K = K;
    c.group_size = group_size;
    c.a_type = a_type;
    c.with_perm = group_size == 128;
    const Tensors t = make(c);
    expect(plan_of(machine, t, Precision::highest).chunk == cpu::kChunk / 2,
           [&] { return name(machine) + " " + describe(c) + ": expected half chunks, got whole chunks"; });
    check_gemm(machine, t);
  }
}

// Tests more rows than one pass packs, and more rows than a block of results holds. The passes of 513 rows must be
// nearly equal, because otherwise one pass would have a single row.
void test_large_m(const Machine& machine) {
  double worst = 0;
  for (const int64_t M : {513, 1030}) {
    Case c;
    c.M = M;
    c.N = 34;
    c.K = 136;
    c.group_size = 64;
    c.a_type = ElementType::bfloat16;
    worst = std::max(worst, check_gemm(machine, make(c)));
  }
  // With so many rows, some kernels share decoded codes between blocks of rows.
  for (const auto format : {WeightFormat::uint4, WeightFormat::lut4, WeightFormat::uint8b128, WeightFormat::mxfp8}) {
    Case c;
    c.format = format;
    c.M = 61;
    c.N = 34;
    c.K = 160;
    c.group_size = 32;
    c.a_type = ElementType::bfloat16;
    worst = std::max(worst, check_gemm(machine, make(c)));
  }
  for (const auto format : {WeightFormat::uint4b8, WeightFormat::uint4, WeightFormat::uint4_bias, WeightFormat::nvfp4,
                            WeightFormat::lut4, WeightFormat::uint6, WeightFormat::uint8b128, WeightFormat::mxfp8}) {
    Case c;
    c.format = format;
    c.M = 131;
    c.N = 45;
    c.K = 152;
    c.group_size = format == WeightFormat::nvfp4 ? 16 : 32;
    c.a_type = ElementType::bfloat16;
    c.with_bias = c.with_perm = c.rounds = true;
    c.global_scale = format == WeightFormat::nvfp4 ? 2 : 0;
    worst = std::max(worst, check_gemm(machine, make(c)));
    const bool fast = machine.isa == Isa::amx || (machine.isa == Isa::avx512 && machine.fast_bf16_dot);
    expect(cpu::rounds(plan_of(machine, make(c), Precision::highest).kernel) == fast,
           [&] { return name(machine) + " " + describe(c) + ": weights are rounded on other machines than expected"; });
  }
  std::printf("%s: gemm, M = 61, 131, 513 and 1030, largest error %.3f of the arithmetic bound\n",
              name(machine).c_str(), worst);
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
    expect(std::isinf(out.get(i)), [&] { return name(machine) + ": an fp16 overflow must give inf"; });
}

// A non-finite activation changes only its row, a non-finite scale only its column.
void test_non_finite(const Machine& machine) {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  for (const WeightFormat format : kReferenceFormats) {
    for (const Activations& activations : kActivations) {
      for (const int64_t M : {2, 15, 33}) {
        Case c;
        c.format = format;
        c.M = M;
        c.N = 45;
        c.K = 200;
        c.group_size = fixed_group_size(format) != 0 ? fixed_group_size(format) : 32;
        c.a_type = activations.type;
        c.zeros_type = ElementType::float16;
        Tensors t = make(c), u = make(c);
        for (const double bad : {nan, inf, -inf}) {
          t.a.set(1 * c.K + 77, bad);
          const Array out = run(machine, t, activations.precision);
          for (int64_t m = 0; m < M; ++m) {
            for (int64_t n = 0; n < c.N; ++n) {
              const double y = out.get(m * c.N + n);
              const bool good = m != 1 ? std::isfinite(y) : std::isnan(bad) ? std::isnan(y) : !std::isfinite(y);
              expect(good, [&] {
                return name(machine) + " " + describe(c) + ": activation " + std::to_string(bad) + " gave " +
                       std::to_string(y) + " in row " + std::to_string(m);
              });
            }
          }
          const bool coded = has_coded_scales(format);
          if (coded && !std::isnan(bad)) continue;
          const double code = format == WeightFormat::nvfp4 ? (c.M == 2 ? 0x7F : 0xFF) : 0xFF;
          u.scales.set(2 * c.N + 9, coded ? code : bad);
          const Array scaled = run(machine, u, activations.precision);
          for (int64_t m = 0; m < M; ++m) {
            for (int64_t n = 0; n < c.N; ++n) {
              const double y = scaled.get(m * c.N + n);
              const bool good = n != 9 ? std::isfinite(y) : std::isnan(bad) ? std::isnan(y) : !std::isfinite(y);
              expect(good, [&] {
                return name(machine) + " " + describe(c) + ": scale " + std::to_string(bad) + " gave " +
                       std::to_string(y) + " in column " + std::to_string(n);
              });
            }
          }
        }
      }
    }
  }
  std::printf("%s: NaN and inf\n", name(machine).c_str());
}

// Makes one activation in 32 larger than its neighbours by a factor of 2^4 to 2^24, because byte_split rounds relative
// to the largest activation of a group.
void test_outliers(const Machine& machine) {
  double worst = 0;
  for (const Activations& activations : kActivations) {
    for (const WeightFormat format : {WeightFormat::uint4b8, WeightFormat::uint4, WeightFormat::mxfp4}) {
      for (const int64_t M : {1, 5}) {
        Case c;
        c.format = format;
        c.M = M;
        c.N = 40;
        c.K = 264;
        c.group_size = 32;
        c.a_type = activations.type;
        Tensors t = make(c);
        for (int64_t i = 0; i < t.a.count(); ++i)
          t.a.set(i, t.a.get(i) * (i % 32 == 7 ? 1 : std::ldexp(1.0, -4 - static_cast<int>(i / 32 % 21))));
        const Allowance allowance{.largest_of_group = true, .what = "outliers"};
        worst = std::max(worst, check_gemm(machine, t, activations.precision, allowance));
      }
    }
  }
  std::printf("%s: outliers, largest error %.3f of the arithmetic bound\n", name(machine).c_str(), worst);
}

// Makes every product of bytes as large as possible: the middle byte of 1 + 2^-6 is -128, and codes are 15 or 6.
// The fp32 number 2 - 2^-23 rounds up, which gives the largest high byte, 64.
void test_largest_bytes(const Machine& machine) {
  for (const Activations& activations : kActivations) {
    for (const WeightFormat format : {WeightFormat::uint4, WeightFormat::uint6, WeightFormat::float4_e2m1}) {
      for (const int64_t M : {1, 2, 5}) {
        Case c;
        c.format = format;
        c.M = M;
        c.N = 33;
        c.K = 256;
        c.group_size = 128;
        c.a_type = activations.type;
        Tensors t = make(c);
        std::memset(t.words.data(), format == WeightFormat::float4_e2m1 ? 0x77 : 0xFF,
                    static_cast<size_t>(c.K / 8 * c.N * 4));
        if (t.high.count() != 0) std::memset(t.high.data(), 0xFF, static_cast<size_t>(t.high.count() * 4));
        for (const double value : {1 + 0x1p-6, 2 - 0x1p-23}) {
          for (int64_t i = 0; i < t.a.count(); ++i)
            t.a.set(i, value);
          check_gemm(machine, t, activations.precision);
        }
      }
    }
  }
}

// Dividing rows or columns differently must not change a result, unless K is split.
void test_partition(Machine machine) {
  Case c;
  c.M = 40;
  c.N = 600;
  c.K = 264;
  c.group_size = 32;
  c.a_type = ElementType::bfloat16;
  const Tensors t = make(c);
  machine.threads = 1;
  const Array one = run(machine, t);
  for (const int threads : {2, 3, 4}) {
    machine.threads = threads;
    expect(same_bits(one, run(machine, t)),
           [&] { return name(machine) + ": the number of threads changed the bits, although K is not split"; });
  }
}

void test_empty(const Machine& machine) {
  Tensors t = make(Case{});
  GemmArguments arguments = t.arguments(nullptr);
  arguments.M = 0;
  cpu::gemm_on(machine, arguments, loop(2), Precision::highest);
  expect(true, [&] { return "M = 0 must not crash"; });
}

void run_tests(const Machine& machine, int rounds) {
  Machine wide = machine;
  wide.threads = 16;
  test_empty(machine);
  test_gemm(machine, rounds, false);
  test_gemm(wide, std::max(rounds / 4, 1), true);
  test_reduced(machine, std::max(rounds / 2, 1));
  test_int8(machine);
  test_every_m(machine);
  test_long_k(machine);
  test_half_chunks(machine);
  test_large_m(machine);
  test_overflow(machine);
  test_non_finite(machine);
  test_range(machine);
  test_small_codes(machine);
  for (const WeightFormat format : {WeightFormat::mxfp4, WeightFormat::mxfp8})
    test_every_coded_scale(machine, format);
  test_non_finite_codes(machine);
  test_every_e4m3_code(machine);
  test_outliers(machine);
  test_largest_bytes(machine);
  test_partition(machine);
}

// Tests every family that this CPU has, with and without each kind of dot product.
int run_all(int rounds) {
  for (const Isa isa : cpu::detected().available) {
    const bool wide = isa == Isa::avx512 || isa == Isa::amx || isa == Isa::neon;
    const bool dot = wide && cpu::detected().fast_bf16_dot, byte_dot = wide && cpu::detected().byte_dot;
    const std::set<std::pair<bool, bool>> features{{false, false}, {dot, false}, {false, byte_dot}, {dot, byte_dot}};
    for (const auto& [bf16, bytes] : features)
      run_tests({isa, bf16, 2, bytes}, rounds);
    if (isa == Isa::neon && cpu::detected().byte_matrix) run_tests({isa, false, 2, true, true}, rounds);
  }
  return report();
}

// Tests the machine that the operators would use on this CPU.
int run_best(int rounds) {
  const cpu::Detected& found = cpu::detected();
  run_tests({found.available.back(), found.fast_bf16_dot, 2, found.byte_dot, found.byte_matrix}, rounds);
  return report();
}

// Tests AMX on any CPU with AVX-512. Only the program that emulates tiles may call this.
int run_tiles(int rounds) {
  run_tests({Isa::amx, false, 2, cpu::detected().byte_dot}, rounds);
  return report();
}

}  // namespace
}  // namespace marlin::test

int main(int argc, char** argv) {
  try {
    if (argc > 1 && std::strcmp(argv[1], "capability") == 0) {
      const marlin::cpu::Capability& found = marlin::cpu::capability();
      std::printf("%s: %s; features:", marlin::cpu::isa_name(found.isa), found.reason.c_str());
      for (const std::string& feature : found.features)
        std::printf(" %s", feature.c_str());
      std::printf("; available:");
      for (const marlin::cpu::Isa isa : found.available)
        std::printf(" %s", marlin::cpu::isa_name(isa));
      std::printf("\n");
      return 0;
    }
    if (argc > 2 && std::strcmp(argv[2], "best") == 0) return marlin::test::run_best(std::atoi(argv[1]));
    if (argc > 2 && std::strcmp(argv[2], "tiles") == 0) return marlin::test::run_tiles(std::atoi(argv[1]));
    return marlin::test::run_all(argc > 1 ? std::atoi(argv[1]) : 40);
  } catch (const std::exception& error) {
    std::printf("FAILED %s\n", error.what());
    return 1;
  }
}
