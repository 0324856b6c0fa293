// The table of Apple's GPUs: the figures of each chip, and a source for each figure. The planner, the profiler and the
// docs use this table.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace marlin {

struct Figure {
  double value;
  std::string_view source;
};

// A source of figures. For example, apple(400) is a Figure with the value 400 and the source `apple`.
struct Source {
  std::string_view citation;
  constexpr Figure operator()(double value) const { return {value, citation}; }
};

namespace sources {
inline constexpr Source apple{"Apple's specification"};
inline constexpr Source metal_benchmarks{"the metal-benchmarks project, measured on M1 Max and A14"};
inline constexpr Source applegpuinfo{"the applegpuinfo project, device database"};
inline constexpr Source as_en{"the as-en project, measured on M1"};
inline constexpr Source stream{
    "STREAM in Metal (arXiv:2502.05317; Beischl, Evaluating Apple Silicon for Data Processing)"};
inline constexpr Source decode_slope{
    "decoding of a 7B model in q8_0 and in q4_0: difference of bytes over difference of time (llama.cpp discussion "
    "4167)"};
inline constexpr Source prompt_rate{
    "prompts of a 7B model in llama.cpp (discussion 4167) and MLX's 4-bit products (pull request 3863, issue 3584), "
    "compared with the counted instructions of their kernels (lab/published/published.py)"};
inline constexpr Source small_reads{
    "gathered 4-bit products of 38 MB on an M3 Ultra (mlx issue 4246), and whole tokens in llama.cpp discussion 4167"};
inline constexpr Source a19_test{"published measurement of an A19 of five cores"};
inline constexpr Source tensor_rate{
    "MLX's dense fp16 product on the tensor units of an M5 of ten cores, 15.4 TFLOP/s (mlx issue 3925), at the "
    "assumed clock of 1.6 GHz"};
inline constexpr Source derived{"derived from Apple's figures"};
inline constexpr Source assumed{"assumed: taken over from the nearest GPU that has a figure"};
}  // namespace sources

// The figures of a GPU family, per core (except dram_latency_ns). Clocks are clocks of the GPU. A fused multiply-add
// counts as two flop.
//   most_threads                   the largest number of resident threads
//   matrix_clocks_fp16, _fp32      clocks of one scheduler for an 8x8x8 simdgroup_multiply_accumulate of fp16 or fp32:
//                                  at least 16, because M1 to M4 compute its 512 multiply-adds on the 32 lanes' pipes
//   tensor_clocks_fp16             clocks of the tensor units for 512 multiply-adds of fp16 or bfloat; 0 if the family
//                                  has no tensor units
//   matrix_overlap                 a core issues instructions while its matrix unit computes: the fraction of the
//                                  shorter of the two times that this overlap hides
#define MARLIN_FAMILY_FIGURES(X) \
  X(schedulers)                  \
  X(fp32_flop_per_clock)         \
  X(fp16_flop_per_clock)         \
  X(matrix_clocks_fp16)          \
  X(matrix_clocks_fp32)          \
  X(tensor_clocks_fp16)          \
  X(matrix_overlap)              \
  X(half_registers)              \
  X(most_threads)                \
  X(threadgroup_bytes)           \
  X(l1_bytes)                    \
  X(l1_bytes_per_clock)          \
  X(l2_bytes_per_clock)          \
  X(instruction_cache_bytes)     \
  X(dram_latency_ns)

struct GpuFamily {
  uint32_t number;  // Apple<number> of the Metal feature tables
  bool has_bfloat;  // bfloat arithmetic in hardware
#define MARLIN_FIGURE_FIELD(field) Figure field;
  MARLIN_FAMILY_FIGURES(MARLIN_FIGURE_FIELD)
};

// Apple8 has the core of Apple7 at another clock, so most of its figures are those of Apple7. From Apple9 on,
// registers, threadgroup memory and L1 share one memory, which the GPU divides at run time. The size of this memory is
// not published, so the rows of these families have Apple7's sizes. Apple10 is the first family with tensor units.
inline constexpr auto kGpuFamilies = [] {
  using namespace sources;
  return std::array<GpuFamily, 4>{{
      {7, false, metal_benchmarks(4), metal_benchmarks(256), metal_benchmarks(256), metal_benchmarks(17),
       metal_benchmarks(18), apple(0), prompt_rate(0.3), metal_benchmarks(106496), metal_benchmarks(3072),
       metal_benchmarks(61440), metal_benchmarks(8192), metal_benchmarks(64), metal_benchmarks(32),
       metal_benchmarks(12288), as_en(311)},
      {8, false, metal_benchmarks(4), metal_benchmarks(256), metal_benchmarks(256), assumed(17), assumed(18), apple(0),
       prompt_rate(0.3), assumed(106496), assumed(3072), assumed(61440), assumed(8192), assumed(64), assumed(32),
       assumed(12288), assumed(311)},
      {9, true, assumed(4), derived(256), derived(256), assumed(17), assumed(18), apple(0), prompt_rate(0.7),
       assumed(106496), assumed(3072), assumed(61440), assumed(8192), assumed(64), assumed(32), assumed(12288),
       assumed(311)},
      {10, true, assumed(4), a19_test(256), a19_test(436), assumed(17), assumed(18), tensor_rate(4.26),
       prompt_rate(0.8), assumed(106496), assumed(3072), assumed(61440), assumed(8192), assumed(64), assumed(32),
       assumed(12288), assumed(311)},
  }};
}();

// The figures of a chip.
//   dram_gbs                 peak bandwidth of the version with all cores, in 10^9 bytes per second
//   dram_gbs_fewest_cores    peak bandwidth of all versions with fewer cores, in 10^9 bytes per second
//   dram_fraction            the fraction of the peak bandwidth that reads reach
//   small_read_share         weights of less than 50 MB are read at this fraction of the rate of large weights; below
//                            1 on chips that consist of two dies
#define MARLIN_CHIP_FIGURES(X) \
  X(clock_ghz)                 \
  X(dram_gbs)                  \
  X(dram_gbs_fewest_cores)     \
  X(dram_fraction)             \
  X(small_read_share)          \
  X(l2_kb)                     \
  X(slc_mb)

struct Chip {
  std::string_view name;
  uint32_t family;
  uint32_t cores;  // number of cores if none is disabled
  uint32_t fewest_cores;
  MARLIN_CHIP_FIGURES(MARLIN_FIGURE_FIELD)
#undef MARLIN_FIGURE_FIELD
};

inline constexpr auto kChips = [] {
  using namespace sources;
  return std::array<Chip, 19>{{
      {"M1", 7, 8, 7, metal_benchmarks(1.278), applegpuinfo(68.25), applegpuinfo(68.25), stream(0.88), small_reads(1),
       metal_benchmarks(768), metal_benchmarks(8)},
      {"M1 Pro", 7, 16, 14, metal_benchmarks(1.296), applegpuinfo(204.8), applegpuinfo(204.8), decode_slope(0.92),
       small_reads(1), metal_benchmarks(256), metal_benchmarks(24)},
      {"M1 Max", 7, 32, 24, metal_benchmarks(1.296), applegpuinfo(409.6), applegpuinfo(409.6), decode_slope(0.94),
       small_reads(1), metal_benchmarks(512), metal_benchmarks(48)},
      {"M1 Ultra", 7, 64, 48, metal_benchmarks(1.296), applegpuinfo(819.2), applegpuinfo(819.2), decode_slope(0.84),
       small_reads(0.8), metal_benchmarks(1024), metal_benchmarks(96)},
      {"M2", 8, 10, 8, metal_benchmarks(1.398), applegpuinfo(102.4), applegpuinfo(102.4), stream(0.89), small_reads(1),
       metal_benchmarks(1536), metal_benchmarks(8)},
      {"M2 Pro", 8, 19, 16, metal_benchmarks(1.398), applegpuinfo(204.8), applegpuinfo(204.8), decode_slope(0.90),
       small_reads(1), metal_benchmarks(512), metal_benchmarks(24)},
      {"M2 Max", 8, 38, 30, metal_benchmarks(1.398), apple(400), apple(400), decode_slope(0.94), small_reads(1),
       metal_benchmarks(1024), metal_benchmarks(48)},
      {"M2 Ultra", 8, 76, 60, metal_benchmarks(1.398), apple(800), apple(800), decode_slope(0.93), small_reads(0.8),
       assumed(2048), assumed(96)},
      {"M3", 9, 10, 8, derived(1.38), apple(100), apple(100), stream(0.92), small_reads(1), assumed(1536), assumed(8)},
      {"M3 Pro", 9, 18, 14, derived(1.38), apple(150), apple(150), decode_slope(0.89), small_reads(1), assumed(512),
       assumed(24)},
      {"M3 Max", 9, 40, 30, derived(1.38), apple(400), apple(300), decode_slope(0.98), small_reads(1), assumed(1024),
       assumed(48)},
      {"M3 Ultra", 9, 80, 60, derived(1.38), apple(819), apple(819), stream(0.90), small_reads(0.8), assumed(2048),
       assumed(96)},
      {"M4", 9, 10, 8, derived(1.58), apple(120), apple(120), stream(0.83), small_reads(1), assumed(1536), assumed(8)},
      {"M4 Pro", 9, 20, 16, derived(1.58), apple(273), apple(273), stream(0.91), small_reads(1), assumed(512),
       assumed(24)},
      {"M4 Max", 9, 40, 32, derived(1.58), apple(546), apple(410), decode_slope(0.93), small_reads(1), assumed(1024),
       assumed(48)},
      // A18 Pro is the chip of the MacBook of 2026. Apple publishes the memory bandwidth and the number of cores, but
      // not the clock.
      {"A18 Pro", 9, 5, 5, assumed(1.58), apple(60), apple(60), assumed(0.83), small_reads(1), assumed(1536),
       assumed(8)},
      {"M5", 10, 10, 8, assumed(1.6), apple(153), apple(153), decode_slope(0.81), small_reads(1), assumed(1536),
       assumed(8)},
      {"M5 Pro", 10, 20, 16, assumed(1.6), apple(307), apple(307), decode_slope(0.95), small_reads(1), assumed(512),
       assumed(24)},
      {"M5 Max", 10, 40, 32, assumed(1.6), apple(614), apple(460), decode_slope(0.93), small_reads(1), assumed(1024),
       assumed(48)},
  }};
}();

constexpr const GpuFamily& family_of(const Chip& chip) {
  for (const GpuFamily& family : kGpuFamilies) {
    if (family.number == chip.family) return family;
  }
  return kGpuFamilies.back();
}

// Returns the chip with this name, with or without the prefix "Apple ", or null if the table does not list the chip.
constexpr const Chip* find_chip(std::string_view name) {
  constexpr std::string_view maker = "Apple ";
  if (name.starts_with(maker)) name.remove_prefix(maker.size());
  for (const Chip& chip : kChips) {
    if (chip.name == name) return &chip;
  }
  return nullptr;
}

constexpr double dram_bytes_per_second(const Chip& chip, uint32_t cores) {
  return 1e9 * (cores < chip.cores ? chip.dram_gbs_fewest_cores : chip.dram_gbs).value;
}

}  // namespace marlin
