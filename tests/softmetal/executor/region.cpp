#include "region.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace softmetal {

void Cell::add_read(const Access& access) {
  const Access& last = read[0];
  if (last.group == access.group && last.thread == access.thread) {
    read[0] = access;
    return;
  }
  if (last.group != 0) {
    if (last.group != access.group) read[3] = last;
    if (last.group != access.group || last.simdgroup() != access.simdgroup()) read[2] = last;
    read[1] = last;
  }
  read[0] = access;
}

Pages::Pages(uint64_t bytes) : data_(nullptr), bytes_(bytes + 64) {
  data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data_ == MAP_FAILED) {
    std::fprintf(stderr, "softmetal: no memory for checked mode\n");
    std::abort();
  }
}

Pages::~Pages() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Region::Region(char* start, uint64_t bytes, bool is_threadgroup, bool is_tracked, uint32_t first_granule)
    : start(start),
      bytes(bytes),
      is_threadgroup(is_threadgroup),
      is_tracked(is_tracked),
      granule(first_granule),
      flags(bytes),
      cells_(is_tracked ? (bytes / first_granule + 1) * sizeof(Cell) : 0) {}

Cell* Region::cells(uint64_t offset, uint32_t size, uint32_t* count) {
  uint32_t wanted = granule;
  while ((offset | size) & (wanted - 1)) wanted /= 2;
  if (wanted != granule) {
    Pages finer((bytes / wanted + 1) * sizeof(Cell));
    auto* from = static_cast<Cell*>(cells_.data());
    auto* to = static_cast<Cell*>(finer.data());
    for (uint64_t i = 0; i < bytes / wanted; ++i) {
      const Cell& cell = from[i * wanted / granule];
      if (cell.write.group != 0 || cell.read[0].group != 0) to[i] = cell;
    }
    cells_ = std::move(finer);
    granule = wanted;
  }
  *count = size / granule;
  return static_cast<Cell*>(cells_.data()) + offset / granule;
}

void Region::forget() { std::memset(flags.data(), 0, bytes); }

}  // namespace softmetal
