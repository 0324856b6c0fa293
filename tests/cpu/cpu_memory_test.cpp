// Makes each allocation of a call fail in turn. The call must throw std::bad_alloc, and later calls must be right. Uses
// no torch. The output and the exit code are like those of cpu_kernels_test.cpp.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <new>
#include <thread>

#include "cpu_gemm_checks.h"
#include "csrc/mlstm/cpu/api.h"

namespace {

// The number of allocations of this thread that succeed before one fails. If it is negative, all succeed.
thread_local int64_t allocations_left = -1;

void* allocate(std::size_t size, std::size_t alignment) {
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  const std::size_t rounded = (std::max<std::size_t>(size, 1) + alignment - 1) / alignment * alignment;
  void* block = std::aligned_alloc(alignment, rounded);
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

}  // namespace

void* operator new(std::size_t size) {
  return allocate(size, alignof(std::max_align_t));
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment));
}
// Not inlined, because GCC 12 for aarch64 would warn about free() of memory from operator new.
[[gnu::noinline]] void operator delete(void* block) noexcept {
  std::free(block);
}
[[gnu::noinline]] void operator delete(void* block, std::size_t) noexcept {
  std::free(block);
}
[[gnu::noinline]] void operator delete(void* block, std::align_val_t) noexcept {
  std::free(block);
}
[[gnu::noinline]] void operator delete(void* block, std::size_t, std::align_val_t) noexcept {
  std::free(block);
}

namespace marlin::test {
namespace {

using Bytes = std::vector<char>;
using Call = std::function<Bytes()>;

Bytes copied(const void* data, size_t size) {
  const char* bytes = static_cast<const char*>(data);
  return {bytes, bytes + size};
}

// For each n, runs the smaller call, then the larger call with its n-th allocation failing, and then both again. Each n
// runs in a new thread, because a thread keeps its working memory and later calls would allocate less.
void fail_each_allocation(const std::string& what, const Call& smaller, const Call& larger) {
  const Bytes small_result = smaller(), large_result = larger();
  int64_t failed = 0;
  for (bool more = true; more;) {
    std::thread([&] {
      const auto same = [&](const char* when) {
        expect(smaller() == small_result, [&] { return what + ": the smaller call gave another result " + when; });
      };
      same("before a failure");
      allocations_left = failed;
      try {
        larger();
        more = false;
      } catch (const std::bad_alloc&) {
        ++failed;
      }
      allocations_left = -1;
      same("after a failure");
      expect(larger() == large_result, [&] { return what + ": the larger call gave another result after a failure"; });
    }).join();
  }
  expect(failed > 0, [&] { return what + ": nothing was allocated"; });
  std::printf("%s: %lld allocations failed in turn\n", what.c_str(), static_cast<long long>(failed));
}

Call product(const Machine& machine, const Tensors& t, Precision precision) {
  return [machine, t, precision] {
    const Array out = run(machine, t, precision);
    return copied(out.data(), static_cast<size_t>(out.count() * bytes_of(out.type())));
  };
}

void test_gemm(const Machine& machine, const Activations& activations, WeightFormat format) {
  Case c;
  c.format = format;
  c.a_type = activations.type;
  c.group_size = fixed_group_size(format) != 0 ? fixed_group_size(format) : 32;
  c.K = 264;
  c.N = 40;
  c.M = 2;
  Case large = c;
  large.M = 70;
  large.N = 136;
  large.K = 1032;
  fail_each_allocation(name(machine) + " gemm " + describe(large), product(machine, make(c), activations.precision),
                       product(machine, make(large), activations.precision));
}

void test_weights(Isa isa) {
  const auto repack = [isa](int64_t K, int64_t N) -> Call {
    return [=] {
      std::vector<uint32_t> words(static_cast<size_t>(K / 8 * N)), out(words.size());
      for (size_t i = 0; i < words.size(); ++i)
        words[i] = static_cast<uint32_t>(i * 2654435761U);
      std::vector<int32_t> perm(static_cast<size_t>(K));
      for (size_t i = 0; i < perm.size(); ++i)
        perm[i] = static_cast<int32_t>(perm.size() - 1 - i);
      cpu::gptq_repack_on(isa, words.data(), perm.data(), K, N, 4, out.data(), loop(2));
      return copied(out.data(), out.size() * sizeof(uint32_t));
    };
  };
  const auto dequantize = [isa](int64_t K, int64_t N) -> Call {
    Case c;
    c.format = WeightFormat::uint4;
    c.K = K;
    c.N = N;
    c.group_size = 32;
    return [isa, t = make(c)] {
      Bytes out(static_cast<size_t>(t.c.K * t.c.N) * sizeof(float));
      cpu::dequantize_on(isa, {t.packed(), nullptr, out.data(), ElementType::float32}, loop(2));
      return out;
    };
  };
  fail_each_allocation(cpu::isa_name(isa) + std::string(" gptq_repack"), repack(64, 24), repack(640, 520));
  fail_each_allocation(cpu::isa_name(isa) + std::string(" dequantize"), dequantize(64, 24), dequantize(640, 520));
}

Call mlstm(const Machine& machine, int64_t S, int64_t D) {
  return [=] {
    const auto count = static_cast<size_t>(S * D);
    std::vector<float> x(count), gates(static_cast<size_t>(S), 0.5F), h(count);
    for (size_t i = 0; i < count; ++i)
      x[i] = static_cast<float>(i % 17) / 16.0F;
    cpu::MlstmArguments a{};
    a.B = a.H = 1;
    a.S = S;
    a.DK = a.DV = D;
    a.q = a.k = a.v = {x.data(), ElementType::float32, S * D, S * D, D};
    a.i = a.f = {gates.data(), ElementType::float32, S, S, 1};
    a.h = h.data();
    std::vector<float> C(static_cast<size_t>(D * D)), n(static_cast<size_t>(D)), m(1);
    a.out = {C.data(), n.data(), m.data(), 1};
    cpu::mlstm_chunkwise(a, cpu::make_mlstm_plan(machine, {1, 1, S, D, D, 16}, false), loop(2));
    return copied(h.data(), count * sizeof(float));
  };
}

}  // namespace
}  // namespace marlin::test

int main() {
  using namespace marlin::test;
  for (const Isa isa : marlin::cpu::detected().available) {
    const bool dot = marlin::cpu::detected().fast_bf16_dot, byte_dot = marlin::cpu::detected().byte_dot;
    const Machine machine{isa, dot, 2, byte_dot};
    for (const Activations& activations : kActivations) {
      for (const marlin::WeightFormat format : {marlin::WeightFormat::uint4, marlin::WeightFormat::nvfp4})
        test_gemm(machine, activations, format);
    }
    test_weights(isa);
    fail_each_allocation(name(machine) + " mlstm", mlstm(machine, 20, 8), mlstm(machine, 70, 48));
  }
  return report();
}
