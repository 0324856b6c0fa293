// Asks the operating system to back the memory of large weights with huge pages.
#pragma once

#include <cstdint>

#include "csrc/core/math.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace marlin::cpu {

inline constexpr int64_t kHugePage = int64_t{2} << 20;  // on x86-64, and on arm64 with 4 KB pages

// Advises Linux to back the memory [data, data + bytes) with huge pages. Call it before you fill the memory, because
// pages that exist already are not changed. A kernel reads 16 rows of words at the same time, and each row of a wide
// weight lies in a different page of 4 KB. With huge pages, a core translates fewer addresses. The advice covers only
// huge pages that lie completely within the range, so the process never uses more memory. The system may ignore it.
inline void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data));
  const int64_t begin = round_up(address, kHugePage);
  const int64_t end = (address + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), static_cast<size_t>(end - begin), MADV_HUGEPAGE);
#endif
}

}  // namespace marlin::cpu
