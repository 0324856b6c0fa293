#include "csrc/planner/device.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace marlin {

namespace {

constexpr const char* kOverride = "TORCH_MARLIN_METAL_GPU";
constexpr const char* kDecode = "TORCH_MARLIN_METAL_DECODE_MB";
constexpr uint64_t kMostMegabytes = 1U << 20;

std::atomic<MetalSystem (*)()> system_reader{nullptr};

uint32_t difference(const Chip& chip, uint32_t cores) {
  return std::max(chip.cores, cores) - std::min(chip.cores, cores);
}

std::string text(const Version& version) {
  return std::to_string(version.major) + "." + std::to_string(version.minor);
}

// macOS 26 reports version 16 to a program that was linked with the SDK of macOS 15 or older (cpython issue 135675,
// dotnet/runtime pull request 116536). Here that program is usually the Python interpreter.
Version real(Version macos) {
  if (macos.major == 16) macos.major = 26;
  return macos;
}

}  // namespace

std::string tensor_refusal(const MetalSystem& system) {
  const MetalSystem& oldest = kTensorSystem;
  if (system.family < oldest.family) {
    const std::string found = system.family == 0 ? "no Apple family" : "family Apple" + std::to_string(system.family);
    return "tensor units came with the M5 (GPU family Apple" + std::to_string(oldest.family) +
           "), and this GPU is of " + found;
  }
  if (const Version macos = real(system.macos); macos < oldest.macos)
    return "it needs macOS " + text(oldest.macos) + ", and this is macOS " + text(macos);
  if (system.language < oldest.language) {
    return "it needs version " + text(oldest.language) + " of Metal's language, and this build of the package has " +
           text(system.language);
  }
  return "";
}

GpuDevice gpu_device(std::string_view name, uint32_t cores, uint32_t family) {
  const char* wanted = std::getenv(kOverride);
  if (wanted != nullptr && *wanted != '\0') {
    const Chip* chip = find_chip(wanted);
    if (chip == nullptr) {
      std::string known;
      for (const Chip& row : kChips)
        known.append(known.empty() ? "" : ", ").append(row.name);
      throw std::invalid_argument(std::string(kOverride) + ": expected one of " + known + ", got '" + wanted + "'");
    }
    return {.cores = chip->cores, .chip = chip, .decodes = decode_limits()};
  }
  const Chip* chip = find_chip(name);
  if (chip == nullptr) {
    uint32_t newest = 0;
    for (const Chip& row : kChips) {
      if (row.family <= family) newest = std::max(newest, row.family);
    }
    for (const Chip& row : kChips) {
      if (newest != 0 && row.family != newest) continue;
      if (chip == nullptr || difference(row, cores) < difference(*chip, cores)) chip = &row;
    }
  }
  return {.cores = std::max(cores, 1U), .chip = chip, .decodes = decode_limits()};
}

DecodeLimits decode_limits() {
  const char* value = std::getenv(kDecode);
  if (value == nullptr || *value == '\0') return {};
  const std::string_view wanted = value;
  uint64_t megabytes = 0;
  const auto [end, error] = std::from_chars(wanted.data(), wanted.data() + wanted.size(), megabytes);
  if (error != std::errc() || end != wanted.data() + wanted.size() || megabytes > kMostMegabytes) {
    throw std::invalid_argument(std::string(kDecode) + ": expected MiB as a whole number of at most " +
                                std::to_string(kMostMegabytes) + ", got '" + value + "'");
  }
  return {megabytes << 20U, megabytes << 20U};
}

void set_system(GpuDevice& device, const MetalSystem& system) {
  device.system = system;
  device.tensor_units = tensor_refusal(system).empty();
}

void set_system_reader(MetalSystem (*reader)()) {
  system_reader = reader;
}

MetalSystem this_system() {
  MetalSystem (*const reader)() = system_reader;
  return reader == nullptr ? MetalSystem{} : reader();
}

}  // namespace marlin
