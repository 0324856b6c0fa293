// Compares both forms of the mLSTM with the recurrence in fp64, for every instruction set that this machine supports.
// Tensors end at unreadable pages, so that an access past their end crashes. Uses no torch.
#include <cstdlib>

#include "cpu_test_support.h"
#include "csrc/mlstm/cpu/api.h"

namespace marlin::test {
namespace {

using cpu::Isa;
using cpu::MlstmArguments;
using cpu::MlstmForm;

struct Sequence {
  int64_t H, S, DK, DV, chunk_size;
  ElementType type;
  bool initial;
};

struct SequenceTensors {
  Array q, k, v, i, f, C0, n0, m0, h, N, M, C, n, m;
};

Array random_array(std::mt19937& random, ElementType type, int64_t count, double mean = 0) {
  std::normal_distribution<double> normal(mean, 1);
  Array array(type, count);
  for (int64_t at = 0; at < count; ++at)
    array.set(at, normal(random));
  return array;
}

SequenceTensors make_tensors(std::mt19937& random, const Sequence& s) {
  constexpr ElementType kWide = ElementType::float32;
  const int64_t tokens = s.H * s.S;
  const int64_t heads = s.initial ? s.H : 0;
  return {random_array(random, s.type, tokens * s.DK),
          random_array(random, s.type, tokens * s.DK),
          random_array(random, s.type, tokens * s.DV),
          random_array(random, kWide, tokens),
          random_array(random, kWide, tokens, 2),
          random_array(random, kWide, heads * s.DK * s.DV),
          random_array(random, kWide, heads * s.DK),
          random_array(random, kWide, heads),
          Array(s.type, tokens * s.DV),
          Array(kWide, tokens),
          Array(kWide, tokens),
          Array(kWide, s.H * s.DK * s.DV),
          Array(kWide, s.H * s.DK),
          Array(kWide, s.H)};
}

// Collects the largest error and the largest expected value. The bound is relative to the largest expected value.
struct Error {
  double error = 0;
  double largest = 0;
  void add(double got, double want) {
    error = std::isnan(got) ? std::numeric_limits<double>::infinity() : std::max(error, std::fabs(got - want));
    largest = std::max(largest, std::fabs(want));
  }
  bool within(double bound) const { return error <= bound * largest; }
};

void compare(const SequenceTensors& t, const Sequence& s, const std::string& name) {
  Error numerator, state, stabiliser;
  for (int64_t head = 0; head < s.H; ++head) {
    std::vector<double> C(static_cast<size_t>(s.DK * s.DV)), n(static_cast<size_t>(s.DK));
    double m = s.initial ? t.m0.get(head) : 0;
    for (int64_t at = 0; s.initial && at < s.DK * s.DV; ++at)
      C[static_cast<size_t>(at)] = t.C0.get(head * s.DK * s.DV + at);
    for (int64_t at = 0; s.initial && at < s.DK; ++at)
      n[static_cast<size_t>(at)] = t.n0.get(head * s.DK + at);
    for (int64_t token = head * s.S; token < (head + 1) * s.S; ++token) {
      const double decayed = m - std::log1p(std::exp(-t.f.get(token)));
      const double next = std::max(decayed, t.i.get(token));
      const double forget = std::exp(decayed - next), input = std::exp(t.i.get(token) - next);
      m = next;
      double den = 0;
      std::vector<double> num(static_cast<size_t>(s.DV));
      for (int64_t d = 0; d < s.DK; ++d) {
        const double key = input * t.k.get(token * s.DK + d);
        const double query = t.q.get(token * s.DK + d) / std::sqrt(static_cast<double>(s.DK));
        double& own = n[static_cast<size_t>(d)];
        own = forget * own + key;
        den += query * own;
        for (int64_t e = 0; e < s.DV; ++e) {
          double& value = C[static_cast<size_t>(d * s.DV + e)];
          value = forget * value + key * t.v.get(token * s.DV + e);
          num[static_cast<size_t>(e)] += query * value;
        }
      }
      const double N = std::max(std::fabs(den), std::exp(-m));
      for (int64_t e = 0; e < s.DV; ++e)
        numerator.add(t.h.get(token * s.DV + e) * (t.N.get(token) + 1e-6), num[static_cast<size_t>(e)]);
      stabiliser.add(t.N.get(token), N);
      stabiliser.add(t.M.get(token), m);
    }
    for (int64_t at = 0; at < s.DK * s.DV; ++at)
      state.add(t.C.get(head * s.DK * s.DV + at), C[static_cast<size_t>(at)]);
    for (int64_t at = 0; at < s.DK; ++at)
      state.add(t.n.get(head * s.DK + at), n[static_cast<size_t>(at)]);
    stabiliser.add(t.m.get(head), m);
  }
  const bool narrow = s.type != ElementType::float32;
  expect(numerator.within(5e-5 + (narrow ? unit_roundoff(s.type) : 0)), [&] { return name + ": error of h"; });
  expect(state.within(1e-5), [&] { return name + ": error of C or n"; });
  expect(stabiliser.within(2e-4), [&] { return name + ": error of N, M or m"; });
}

void test_forms(Isa isa, int rounds) {
  std::mt19937 random(5);
  auto one_of = [&](std::initializer_list<int64_t> values) {
    return values.begin()[std::uniform_int_distribution<size_t>(0, values.size() - 1)(random)];
  };
  constexpr ElementType kTypes[] = {ElementType::float32, ElementType::float16, ElementType::bfloat16};
  for (int round = 0; round < rounds; ++round) {
    const Sequence s{one_of({1, 2, 3}),
                     one_of({1, 5, 16, 37, 64, 70}),
                     one_of({1, 7, 16, 33}),
                     one_of({1, 8, 31, 32, 65}),
                     one_of({16, 32, 64, 128}),
                     kTypes[round % 3],
                     round % 2 == 0};
    const SequenceTensors t = make_tensors(random, s);
    cpu::MlstmPlan plan =
        cpu::make_mlstm_plan({isa, false, 3}, {1, s.H, s.S, s.DK, s.DV, s.chunk_size}, /*wide=*/false);
    if (round % 4 == 1) plan.first_chunk = 4 * plan.chunk_size;
    for (const MlstmForm form : {MlstmForm::sequential, MlstmForm::chunkwise}) {
      MlstmArguments a{};
      a.B = 1, a.H = s.H, a.S = s.S, a.DK = s.DK, a.DV = s.DV, a.eps = 1e-6;
      a.q = {t.q.data(), s.type, 0, s.S * s.DK, s.DK};
      a.k = {t.k.data(), s.type, 0, s.S * s.DK, s.DK};
      a.v = {t.v.data(), s.type, 0, s.S * s.DV, s.DV};
      a.i = {t.i.data(), ElementType::float32, 0, s.S, 1};
      a.f = {t.f.data(), ElementType::float32, 0, s.S, 1};
      if (s.initial) a.in = {t.C0.data(), t.n0.data(), t.m0.data(), 1};
      a.out = {t.C.data(), t.n.data(), t.m.data(), 1};
      a.h = t.h.data(), a.N = t.N.data(), a.M = t.M.data();
      for (const Array* out : {&t.h, &t.N, &t.M, &t.C, &t.n, &t.m})
        std::memset(out->data(), 0xFF, static_cast<size_t>(out->count() * bytes_of(out->type())));  // NaN
      plan.form = form;
      if (form == MlstmForm::sequential) {
        cpu::mlstm_sequential(a, plan, loop(3));
      } else {
        cpu::mlstm_chunkwise(a, plan, loop(3));
      }
      compare(t, s,
              std::string(cpu::isa_name(isa)) + " " + cpu::to_string(plan) + " H=" + std::to_string(s.H) +
                  " S=" + std::to_string(s.S) + " DK=" + std::to_string(s.DK) + " DV=" + std::to_string(s.DV));
    }
  }
  std::printf("%s: mlstm, %d sequences in both forms\n", cpu::isa_name(isa), rounds);
}

void expect_plan(const std::string& got, const std::string& expected) {
  expect(got == expected, [&] { return "got plan '" + got + "', expected '" + expected + "'"; });
}

void test_plans() {
  auto plan = [](int64_t H, int64_t S, int64_t DK, int64_t DV, int64_t chunk_size, bool wide) {
    return cpu::to_string(cpu::make_mlstm_plan({Isa::portable, false, 8}, {1, H, S, DK, DV, chunk_size}, wide));
  };
  expect_plan(plan(2, 512, 64, 64, 0, false), "chunkwise chunk_size=32 first_chunk=32 strip=8 column_tasks=4");
  expect_plan(plan(8, 512, 256, 2048, 0, false), "chunkwise chunk_size=64 first_chunk=256 strip=8 column_tasks=1");
  expect_plan(plan(1, 512, 64, 16, 128, false), "chunkwise chunk_size=128 first_chunk=128 strip=8 column_tasks=2");
  expect_plan(plan(2, 1, 64, 64, 0, false), "sequential chunk_size=32 first_chunk=32 strip=8 column_tasks=4");
  expect_plan(plan(2, 512, 64, 64, 16, true), "sequential chunk_size=16 first_chunk=16 strip=8 column_tasks=4");
}

}  // namespace
}  // namespace marlin::test

int main(int argc, char** argv) {
  using marlin::cpu::Isa;
  marlin::test::test_plans();
  for (const Isa isa : marlin::cpu::detected().available) {
    // The AMX family is skipped, because it uses the mLSTM kernels of AVX-512.
    if (isa != Isa::amx) marlin::test::test_forms(isa, argc > 1 ? 12 * std::atoi(argv[1]) : 60);
  }
  return marlin::test::report();
}
