// Tests dequantize and the repacks bit for bit, for every instruction set that this machine supports. Uses no torch.
#include <cstdlib>
#include <utility>

#include "cpu_test_support.h"

namespace marlin::test {
namespace {

using cpu::Isa;

float as_float32(double v) {
  return static_cast<float>(v);
}

// The reference evaluates the format table's formula in fp32, in the formula's order, and rounds the result once.
void check_dequantize(Isa isa, const Tensors& t) {
  const Case& c = t.c;
  Array out(c.a_type, c.K * c.N);
  const cpu::DequantizeArguments arguments{t.packed(), t.perm.empty() ? nullptr : t.perm.data(), out.data(), c.a_type};
  cpu::dequantize_on(isa, arguments, loop(3));
  for (int64_t k = 0; k < c.K; ++k) {
    for (int64_t n = 0; n < c.N; ++n) {
      const int64_t at = k / c.group_size * c.N + n;
      float w;
      if (c.format == WeightFormat::uint4 || c.format == WeightFormat::uint6 || c.format == WeightFormat::uint8) {
        w = as_float32(t.code(k, n) - t.zeros.get(at));
        w = as_float32(static_cast<double>(w) * t.scales.get(at));
      } else if (c.format == WeightFormat::uint4_bias) {
        w = as_float32(t.code(k, n) * t.scales.get(at));
        w = as_float32(static_cast<double>(w) + t.zeros.get(at));
      } else {
        w = as_float32(t.weight(k, n));
      }
      const int64_t row = t.perm.empty() ? k : t.perm[static_cast<size_t>(k)];
      const double got = out.get(row * c.N + n), want = rounded(w, c.a_type);
      const bool good = std::isnan(want) ? std::isnan(got) : got == want;
      expect(good, [&] {
        return std::string(cpu::isa_name(isa)) + " dequantize " + describe(c) + " at [" + std::to_string(k) + ", " +
               std::to_string(n) + "]: got " + std::to_string(got) + ", expected " + std::to_string(want);
      });
    }
  }
}

void test_dequantize(Isa isa, int rounds) {
  std::mt19937 random(11);
  for (const WeightFormat format : kReferenceFormats) {
    for (const ElementType out_type : kFloats) {
      for (int i = 0; i < rounds; ++i) {
        Case c = random_case(random, format, out_type, true);
        c.M = 1;
        Tensors t = make(c);
        if (i % 2 == 0 && has_coded_scales(format)) {
          for (int64_t s = 0; s < t.scales.count(); ++s)
            t.scales.set(s, static_cast<double>(s % 256));
        }
        check_dequantize(isa, t);
      }
    }
  }
  std::printf("%s: dequantize, %zu cases, bit for bit\n", cpu::isa_name(isa),
              rounds * std::size(kReferenceFormats) * 3);
}

// Tests a result that is large enough for streaming stores, and whose rows have every alignment.
void test_large_dequantize(Isa isa) {
  Case c;
  c.N = 4099;
  c.K = 264;
  c.group_size = 128;
  check_dequantize(isa, make(c));
  std::printf("%s: dequantize of %lld x %lld\n", cpu::isa_name(isa), static_cast<long long>(c.K),
              static_cast<long long>(c.N));
}

// Tests NaNs whose lower 16 bits are all set. Rounding to bf16 must not carry into the sign.
void test_nan_scales(Isa isa) {
  for (const ElementType out_type : kFloats) {
    Case c;
    c.a_type = out_type;
    c.K = 16;
    c.N = 40;
    c.group_size = 16;
    c.scales_type = ElementType::float32;
    const Tensors t = make(c);
    const uint32_t nan = 0x7FFFFFFFU;
    std::memcpy(t.scales.data() + 4 * 21, &nan, 4);
    check_dequantize(isa, t);
  }
}

void test_repack(Isa isa) {
  std::mt19937 random(3);
  for (const auto& [K, N] : std::vector<std::pair<int64_t, int64_t>>{
           {8, 1}, {24, 7}, {136, 40}, {264, 129}, {64, 8}, {32, 1000}, {1080, 70}}) {
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
    cpu::gptq_repack_on(isa, words.data(), nullptr, K, N, 4, out.data(), loop(3));
    expect(words == out, [&] { return "gptq_repack without a perm must copy the words"; });
    cpu::gptq_repack_on(isa, words.data(), perm.data(), K, N, 4, out.data(), loop(3));
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t n = 0; n < N; ++n) {
        const int64_t p = perm[static_cast<size_t>(k)];
        expect(nibble(out, k / 8, N, n, k % 8) == nibble(words, p / 8, N, n, p % 8),
               [&] { return "gptq_repack: row k of the result must be row perm[k] of the weight"; });
      }
    }
    cpu::transpose_words(words.data(), K / 8, N, out.data(), loop(3));
    for (int64_t r = 0; r < K / 8; ++r) {
      for (int64_t n = 0; n < N; ++n) {
        expect(out[static_cast<size_t>(n * (K / 8) + r)] == words[static_cast<size_t>(r * N + n)],
               [&] { return "transpose_words"; });
      }
    }
    if (N % 8 != 0) continue;
    static constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // nibble i of a word holds column 8c + kOrder[i]
    cpu::awq_repack(words.data(), K, N, out.data(), loop(3));
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t c = 0; c < N / 8; ++c) {
        for (int64_t i = 0; i < 8; ++i) {
          expect(nibble(out, k / 8, N, 8 * c + kOrder[i], k % 8) == nibble(words, k, N / 8, c, i),
                 [&] { return "awq_repack"; });
        }
      }
    }
    const int64_t G = K / 8;
    std::vector<uint8_t> zeros(static_cast<size_t>(G * N));
    cpu::awq_unpack_zeros(words.data(), G, N, zeros.data(), loop(2));
    for (int64_t i = 0; i < G * N; ++i) {
      expect(zeros[static_cast<size_t>(i / 8 * 8 + kOrder[i % 8])] ==
                 ((words[static_cast<size_t>(i / 8)] >> (4 * (i % 8))) & 15U),
             [&] { return "awq_unpack_zeros"; });
    }
    for (const StoredZeros stored :
         {StoredZeros::plain, StoredZeros::word, StoredZeros::masked, StoredZeros::unmasked}) {
      cpu::gptq_unpack_zeros(words.data(), G, N, stored, zeros.data(), loop(2));
      for (int64_t i = 0; i < G * N; ++i) {
        const uint32_t word = words[static_cast<size_t>(i / 8)];
        const uint32_t raw = (word >> (4 * (i % 8))) & 15U;
        uint32_t expected = raw;
        if (stored == StoredZeros::word) expected = ((word + 0x11111111U) >> (4 * (i % 8))) & 15U;
        if (stored == StoredZeros::masked) expected = (raw + 1) & 15U;
        if (stored == StoredZeros::unmasked) expected = raw + 1;
        expect(zeros[static_cast<size_t>(i)] == expected, [&] { return "gptq_unpack_zeros"; });
      }
    }
  }
  std::printf("%s: repack and unpack_zeros, bit for bit\n", cpu::isa_name(isa));
}

}  // namespace
}  // namespace marlin::test

int main(int argc, char** argv) {
  for (const marlin::cpu::Isa isa : marlin::cpu::detected().available) {
    marlin::test::test_dequantize(isa, argc > 1 ? std::atoi(argv[1]) : 10);
    marlin::test::test_large_dequantize(isa);
    marlin::test::test_nan_scales(isa);
    marlin::test::test_repack(isa);
  }
  return marlin::test::report();
}
