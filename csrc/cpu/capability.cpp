#include "csrc/cpu/capability.h"

#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "csrc/cpu/kernels/kernel_table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace marlin::cpu {

namespace {

constexpr Isa kAllIsas[] = {Isa::portable, Isa::avx2, Isa::avx512, Isa::amx, Isa::neon};

#if defined(__x86_64__)

struct Cpuid {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  explicit Cpuid(uint32_t leaf, uint32_t subleaf = 0) { __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx); }
};

// Returns XCR0, the set of registers that the operating system saves on a context switch. An instruction faults if it
// uses a register outside this set.
uint64_t enabled_state() {
  if ((Cpuid(1).ecx & bit_OSXSAVE) == 0) return 0;
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

// Linux grants the 8 KB of tile registers only to processes that ask for them (Documentation/arch/x86/xstate.rst).
bool request_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Detected detect() {
  Detected found;
  const uint64_t state = enabled_state();
  const bool ymm = (state & 0x6) == 0x6;
  const bool zmm = (state & 0xE6) == 0xE6;
  const bool tiles = (state & 0x60000) == 0x60000;
  const Cpuid one(1), seven(7), seven_one(7, 1), vendor(0);
  auto add = [&](bool present, const char* name) {
    if (present) found.features.emplace_back(name);
    return present;
  };
  const bool avx2 = add(ymm && (seven.ebx & bit_AVX2) != 0, "avx2");
  const bool fma = add(ymm && (one.ecx & bit_FMA) != 0, "fma");
  const bool f16c = add(ymm && (one.ecx & bit_F16C) != 0, "f16c");
  const bool f = add(zmm && (seven.ebx & bit_AVX512F) != 0, "avx512f");
  const bool bw = add(zmm && (seven.ebx & bit_AVX512BW) != 0, "avx512bw");
  const bool dq = add(zmm && (seven.ebx & bit_AVX512DQ) != 0, "avx512dq");
  const bool vl = add(zmm && (seven.ebx & bit_AVX512VL) != 0, "avx512vl");
  found.byte_dot = add(zmm && (seven.ecx & (1U << 11)) != 0, "avx512_vnni");
  // avx512_bf16 requires VBMI here, because its kernels look up 8-bit codes with VBMI. All of AMD's CPUs with bf16 have
  // VBMI.
  const bool vbmi = add(zmm && (seven.ecx & (1U << 1)) != 0, "avx512_vbmi");
  const bool bf16 = add(vbmi && (seven_one.eax & (1U << 5)) != 0, "avx512_bf16");
  const bool amx =
      add(tiles && (seven.edx & (1U << 24)) != 0, "amx_tile") && add((seven.edx & (1U << 22)) != 0, "amx_bf16");
  if (avx2 && fma && f16c) found.available.push_back(Isa::avx2);
  if (found.available.size() == 2 && f && bw && dq && vl) found.available.push_back(Isa::avx512);
  if (found.available.size() == 3 && amx && bf16 && amx_kernels(1) != nullptr && request_tiles()) {
    found.available.push_back(Isa::amx);
  }
  // AMD's cores start two bf16 dot products per cycle. Intel's cores run bf16 dot products at half the rate of fp32
  // multiply-adds.
  found.fast_bf16_dot = bf16 && vendor.ebx == signature_AMD_ebx;
  return found;
}

#elif defined(__aarch64__)

struct ArmFeatures {
  bool dotprod = false, bf16 = false, i8mm = false;
  ArmFeatures() {
#if defined(__linux__)
    dotprod = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
    bf16 = (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0;
    i8mm = (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#elif defined(__APPLE__)
    auto has = [](const char* name) {
      int value = 0;
      size_t size = sizeof value;
      return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
    };
    dotprod = has("hw.optional.arm.FEAT_DotProd");
    bf16 = has("hw.optional.arm.FEAT_BF16");
    i8mm = has("hw.optional.arm.FEAT_I8MM");
#endif
  }
};

Detected detect() {
  Detected found;
  found.features.emplace_back("asimd");
  auto add = [&](bool present, const char* name) {
    if (present) found.features.emplace_back(name);
    return present;
  };
  const ArmFeatures arm;
  found.byte_dot = add(arm.dotprod, "dotprod");
  found.fast_bf16_dot = add(arm.bf16, "bf16");
  found.byte_matrix = add(arm.i8mm, "i8mm") && found.byte_dot;
  if (kernels_of(Isa::neon) != nullptr) found.available.push_back(Isa::neon);
  return found;
}

#else

Detected detect() {
  return {};
}

#endif

std::string names(const std::vector<Isa>& isas) {
  std::string list;
  for (const Isa isa : isas)
    list += (list.empty() ? "" : ", ") + std::string(isa_name(isa));
  return list;
}

Capability choose() {
  constexpr const char* kVariable = "TORCH_MARLIN_METAL_CPU_ISA";
  const Detected& found = detected();
  Capability chosen{found.available.back(), "the widest family that this CPU and operating system offer",
                    found.features, found.available};
  const char* forced = std::getenv(kVariable);
  if (forced == nullptr || *forced == '\0') return chosen;
  for (const Isa isa : found.available) {
    if (std::string(isa_name(isa)) == forced) {
      chosen.isa = isa;
      chosen.reason = std::string("forced by ") + kVariable;
      return chosen;
    }
  }
  bool known = false;
  for (const Isa isa : kAllIsas)
    known = known || std::string(isa_name(isa)) == forced;
  throw std::runtime_error(std::string(kVariable) + ": expected one of " + names(found.available) + ", got '" + forced +
                           (known ? "', which this machine does not have" : "', which is not a known family"));
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
    case Isa::amx:
      return "amx";
    case Isa::neon:
      return "neon";
    default:
      return "portable";
  }
}

const Detected& detected() {
  static const Detected found = detect();
  return found;
}

const Capability& capability() {
  static const Capability chosen = choose();
  return chosen;
}

}  // namespace marlin::cpu
