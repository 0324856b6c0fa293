// Measures the best rates of this machine: bytes read per second, and fp32 operations per second. cpu_ceilings.py
// compiles this file for the machine. The clock starts when all threads are ready.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
using Floats = float __attribute__((vector_size(kBytes)));
using Words = uint64_t __attribute__((vector_size(kBytes), aligned(8)));

// Returns the seconds from when all threads are ready until the last one is done.
template <class Work>
double seconds(int threads, Work work) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) {
    others.emplace_back([&, thread] {
      ++ready;
      while (!go) {
      }
      work(thread);
    });
  }
  while (ready != threads - 1) {
  }
  const auto begin = std::chrono::steady_clock::now();
  go = true;
  work(0);
  for (std::thread& other : others)
    other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Reads eight streams at the same time, because one stream does not keep enough memory requests of a core in flight.
uint64_t read(const char* data, size_t bytes) {
  constexpr size_t kStreams = 8, kStep = 4 * kBytes;
  const size_t part = bytes / kStreams / kStep * kStep;
  Words sums[4] = {};
  for (size_t i = 0; i < part; i += kStep) {
    for (size_t stream = 0; stream < kStreams; ++stream) {
      const auto* at = reinterpret_cast<const Words*>(data + stream * part + i);
      for (int j = 0; j < 4; ++j)
        sums[j] |= at[j];
    }
  }
  const Words all = sums[0] | sums[1] | sums[2] | sums[3];
  uint64_t result = 0;
  for (int j = 0; j < kBytes / 8; ++j)
    result |= all[j];
  return result;
}

constexpr int kChains = 16;  // independent chains: more than latency times multiply-add units of any core
constexpr int kTurns = 4096;

template <int... i>
float multiply_add(const float* start, int64_t rounds, std::integer_sequence<int, i...>) {
  const Floats x = Floats{} + start[0], y = Floats{} + start[1];
  Floats sums[kChains] = {Floats{} + start[i]...};
  for (int64_t turn = 0; turn < rounds * kTurns; ++turn) {
    ((sums[i] = sums[i] * x + y), ...);
  }
  Floats all = Floats{};
  ((all += sums[i]), ...);
  float result = 0;
  for (int j = 0; j < kBytes / 4; ++j)
    result += all[j];
  return result;
}

std::atomic<uint64_t> sink;  // uses the results, so that the compiler keeps the work

}  // namespace

extern "C" {

double stream_read(const void* data, size_t bytes, int threads) {
  const size_t part = bytes / static_cast<size_t>(threads);
  return seconds(threads, [&](int thread) {
    sink += read(static_cast<const char*>(data) + static_cast<size_t>(thread) * part, part);
  });
}

// Returns the floating-point operations per second; a multiply-add counts as two.
double fp32_peak(int threads) {
  constexpr int64_t kRounds = 4096;
  // The chains start with different values that the compiler does not know; otherwise it would compute only one.
  volatile float seed = 1.F;
  float start[kChains];
  for (int i = 0; i < kChains; ++i)
    start[i] = seed / static_cast<float>(i + 2);
  const double time = seconds(threads, [&](int) {
    sink += static_cast<uint64_t>(multiply_add(start, kRounds, std::make_integer_sequence<int, kChains>{}));
  });
  return 2.0 * threads * kRounds * kTurns * kChains * (kBytes / 4) / time;
}
}
