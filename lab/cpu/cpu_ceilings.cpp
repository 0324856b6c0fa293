// Measures this machine's peak rates: bytes read per second, fp32 operations per second, and product instructions per
// second. cpu_ceilings.py compiles this file for the machine. The clock starts when all threads are ready.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

// Returns the seconds from the moment when all threads are ready until the last thread is done.
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

// The number of independent chains of multiply-adds, more than any core needs. A core needs the latency in clocks times
// the number of its multiply-add units.
constexpr int kChains = 16;
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

#if defined(__x86_64__) && defined(__linux__)

// Executes an instruction on independent registers, all of them zero.
#define MARLIN_FOUR(instruction, r, a, b, c, d)                                                                     \
  instruction " %%" r "14, %%" r "15, %%" r a "\n\t" instruction " %%" r "14, %%" r "15, %%" r b "\n\t" instruction \
              " %%" r "14, %%" r "15, %%" r c "\n\t" instruction " %%" r "14, %%" r "15, %%" r d "\n\t"
#define MARLIN_TWELVE(instruction, r)                                                                      \
  asm volatile(MARLIN_FOUR(instruction, r, "0", "1", "2", "3") MARLIN_FOUR(                                \
                   instruction, r, "4", "5", "6", "7") MARLIN_FOUR(instruction, r, "8", "9", "10", "11"):: \
                   : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11")
#define MARLIN_TILES(instruction)                                                                        \
  asm volatile(instruction " %tmm4, %tmm5, %tmm0\n\t" instruction " %tmm4, %tmm5, %tmm1\n\t" instruction \
                           " %tmm4, %tmm5, %tmm2\n\t" instruction " %tmm4, %tmm5, %tmm3")

// Configures tiles of `rows` rows, and returns false if the system refuses their registers.
bool begin_tiles(int rows) {
  constexpr long kPermit = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kPermit, kTileData) != 0) return false;
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 5; ++tile)
    config.rows[tile] = static_cast<uint8_t>(rows);
  config.rows[5] = static_cast<uint8_t>(rows);  // activations
  config.rows[4] = 16;                          // codes
  asm volatile("ldtilecfg %0" ::"m"(config));
  asm volatile(
      "tilezero %tmm0\n\ttilezero %tmm1\n\ttilezero %tmm2\n\ttilezero %tmm3\n\ttilezero %tmm4\n\ttilezero %tmm5");
  return true;
}

// Executes an instruction kind (KINDS of cpu_ceilings.py) at least `count` times.
void execute(int kind, int rows, int64_t count) {
  asm volatile("vzeroall" ::: "xmm14", "xmm15");
  if (kind >= 5 && !begin_tiles(rows)) return;
  for (int64_t i = 0; i < count; i += kind < 5 ? 12 : 4) {
    if (kind == 0) MARLIN_TWELVE("vfmadd231ps", "ymm");
    if (kind == 1) MARLIN_TWELVE("vfmadd231ps", "zmm");
    if (kind == 2) MARLIN_TWELVE("vpmaddubsw", "ymm");
    if (kind == 3) MARLIN_TWELVE("vpdpbusd", "zmm");
    if (kind == 4) MARLIN_TWELVE("vdpbf16ps", "zmm");
    if (kind == 5) MARLIN_TILES("tdpbf16ps");
    if (kind == 6) MARLIN_TILES("tdpbssd");
  }
  if (kind >= 5) asm volatile("tilerelease");
}

#endif

std::atomic<uint64_t> sink;  // The results are stored here, so that the compiler does not remove the work.

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
  // The chains start with different values that the compiler does not know. Otherwise it would compute only one chain.
  volatile float seed = 1.F;
  float start[kChains];
  for (int i = 0; i < kChains; ++i)
    start[i] = seed / static_cast<float>(i + 2);
  const double time = seconds(threads, [&](int) {
    sink += static_cast<uint64_t>(multiply_add(start, kRounds, std::make_integer_sequence<int, kChains>{}));
  });
  return 2.0 * threads * kRounds * kTurns * kChains * (kBytes / 4) / time;
}

#if defined(__x86_64__) && defined(__linux__)
// Returns how many instructions of a kind (KINDS of cpu_ceilings.py) the threads execute per second. `rows` is the
// height of a tile.
double instruction_rate(int kind, int threads, int rows) {
  const int64_t count = kind < 5 ? 10'000'000 : 1'000'000;
  return threads * double(count) / seconds(threads, [&](int) { execute(kind, rows, count); });
}
#endif
}
