// Code between MARLIN_TARGET(features) and MARLIN_TARGET_END may use instructions that the baseline of x86 or Arm
// lacks. Such code runs only after capability() has found the features. It must not share a symbol with code outside,
// because the linker could keep only the copy with the additional instructions, for all callers. Therefore include
// headers that define functions, such as those of the standard library, before MARLIN_TARGET.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#include <algorithm>
#include <utility>

#include "csrc/cpu/kernels/kernel_table.h"

#define MARLIN_PRAGMA(text) _Pragma(#text)

#if defined(__clang__)
#define MARLIN_TARGET(features) \
  MARLIN_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define MARLIN_TARGET_END MARLIN_PRAGMA(clang attribute pop)
#elif defined(__x86_64__)
// GCC 12 warns about undefined operands inside its own intrinsics.
#define MARLIN_TARGET(features)                                 \
  MARLIN_PRAGMA(GCC diagnostic ignored "-Wmaybe-uninitialized") \
  MARLIN_PRAGMA(GCC diagnostic ignored "-Wuninitialized")       \
  MARLIN_PRAGMA(GCC target(features))
#define MARLIN_TARGET_END
#else
#define MARLIN_TARGET(features) MARLIN_PRAGMA(GCC target("arch=armv8.2-a+" features))
#define MARLIN_TARGET_END
#endif

#define MARLIN_AVX2 "avx2,fma,f16c"
#define MARLIN_AVX512 MARLIN_AVX2 ",avx512f,avx512bw,avx512dq,avx512vl"
