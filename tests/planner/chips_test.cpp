// Compares the table of chips with published figures, and tests how the chip of a GPU is found.
#include <cmath>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>

#include "csrc/planner/chips.h"
#include "csrc/planner/device.h"
#include "plan_checks.h"

using namespace marlin;

namespace {

void check_chips() {
  // fp32 TFLOP/s, as published by applegpuinfo and Apple.
  const std::map<std::string, double> tflops{
      {"M1", 2.617},    {"M1 Pro", 5.308}, {"M1 Max", 10.617}, {"M1 Ultra", 21.233}, {"M2", 3.579},
      {"M2 Pro", 6.8},  {"M2 Max", 13.6},  {"M2 Ultra", 27.2}, {"M3", 3.5},          {"M3 Pro", 6.4},
      {"M3 Max", 14.1}, {"M3 Ultra", 28},  {"M4", 4.0},        {"M4 Pro", 8.1},      {"M4 Max", 16.1},
      {"M5", 4.1},      {"M5 Pro", 8.2},   {"M5 Max", 16.4}};
  expect(tflops.size() + 1 == kChips.size(), "every chip except the A18 Pro has a published figure in this test");
  for (const Chip& chip : kChips) {
    subject = chip.name;
    const GpuFamily& family = family_of(chip);
    expect(family.number == chip.family, "family_of gives the chip's family");
    expect(find_chip(chip.name) == &chip && find_chip("Apple " + std::string(chip.name)) == &chip,
           "a chip is found by its name");
    expect(chip.fewest_cores <= chip.cores, "fewest_cores is at most cores");
    expect(chip.dram_fraction.value > 0.5 && chip.dram_fraction.value <= 1, "dram_fraction is between 0.5 and 1");
    expect(dram_bytes_per_second(chip, chip.fewest_cores) <= dram_bytes_per_second(chip, chip.cores),
           "fewer cores do not get more bandwidth");
    if (chip.name == "A18 Pro") continue;
    expect_close(family.fp32_flop_per_clock.value * chip.cores * chip.clock_ghz.value / 1000,
                 tflops.at(std::string(chip.name)), 0.02, "TFLOP/s");
  }
  subject = "chips";
  expect(find_chip("M4 Ultra") == nullptr && find_chip("") == nullptr && find_chip("m1") == nullptr,
         "an unknown name finds no chip");
  expect(dram_bytes_per_second(*find_chip("M3 Max"), 30) == 300e9, "bandwidth of an M3 Max with 30 cores");
  expect(dram_bytes_per_second(*find_chip("M3 Max"), 40) == 400e9, "bandwidth of an M3 Max with 40 cores");
}

void check_gpu_device() {
  subject = "gpu_device";
  unsetenv("TORCH_MARLIN_METAL_GPU");
  const GpuDevice known = gpu_device("Apple M1 Max", 24);
  expect(known.chip->name == "M1 Max" && known.cores == 24, "a known name gives its chip");
  const GpuDevice unknown = gpu_device("Apple M9 Max", 40);
  expect(unknown.chip->name == "M3 Max" && unknown.cores == 40,
         "an unknown name gives the oldest chip with as many cores");
  expect(gpu_device("Apple M9 Max", 40, 10).chip->name == "M5 Max",
         "an unknown name gives a chip of the family that Metal reports");
  expect(gpu_device("Apple M9 Max", 40, 12).chip->name == "M5 Max",
         "an unknown family gives a chip of the newest known family");
  expect(gpu_device("Apple M5 Ultra", 80, 10).cores == 80, "an unknown chip keeps its number of cores");
  expect(gpu_device("Apple Paravirtual device", 0, 7).chip->name == "M1",
         "the family gives the chip if no number of cores is reported");
  expect(gpu_device("Apple A18 Pro", 5, 9).chip->name == "A18 Pro", "a Mac can have a phone's chip");
  expect(gpu_device("softmetal", 8).chip->name == "M1", "the software Metal device counts as an M1");
  expect(gpu_device("", 0).cores == 1, "a device has at least one core");
  setenv("TORCH_MARLIN_METAL_GPU", "M2 Pro", 1);
  expect(gpu_device("Apple M1 Max", 24).chip->name == "M2 Pro" && gpu_device("x", 1).cores == 19,
         "the environment variable names the chip");
  setenv("TORCH_MARLIN_METAL_GPU", "M99", 1);
  try {
    gpu_device("Apple M1", 8);
    expect(false, "no error for M99");
  } catch (const std::invalid_argument& error) {
    const std::string text = error.what();
    expect(text.find("TORCH_MARLIN_METAL_GPU") == 0 && text.find("'M99'") != std::string::npos,
           "the error names the variable and its value: " + text);
  }
  unsetenv("TORCH_MARLIN_METAL_GPU");
}

void check_decode_limits() {
  subject = "decode_limits";
  unsetenv("TORCH_MARLIN_METAL_DECODE_MB");
  expect(gpu_device("Apple M1", 8).decodes == DecodeLimits{0, 256 << 20}, "only rounded may decode by default");
  setenv("TORCH_MARLIN_METAL_DECODE_MB", "72", 1);
  const DecodeLimits both{72 << 20, 72 << 20};
  expect(gpu_device("Apple M1", 8).decodes == both && gpu_device("x", 8).decodes == both, "MiB");
  for (const char* value : {"-1", "1.5", "1e9", "yes", "99999999999999999999"}) {
    setenv("TORCH_MARLIN_METAL_DECODE_MB", value, 1);
    try {
      gpu_device("Apple M1", 8);
      expect(false, std::string("no error for ") + value);
    } catch (const std::invalid_argument& error) {
      const std::string text = error.what();
      expect(text.find("TORCH_MARLIN_METAL_DECODE_MB: expected MiB") == 0 && text.find(value) != std::string::npos,
             "the error names the variable and its value: " + text);
    }
  }
  unsetenv("TORCH_MARLIN_METAL_DECODE_MB");
}

}  // namespace

int main(int argc, char** argv) {
  return test::run_cases(
      {{"chips", check_chips}, {"gpu device", check_gpu_device}, {"decode limits", check_decode_limits}}, argc, argv);
}
