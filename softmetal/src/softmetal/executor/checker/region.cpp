#include "checker/region.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace softmetal {

void History::add(const Access& access) {
  const Access& latest = last[0];
  if (latest.group == access.group && latest.thread == access.thread) {
    last[0] = access;
    return;
  }
  if (latest.group != 0) {
    if (latest.group != access.group) last[3] = latest;
    if (latest.group != access.group || latest.simdgroup() != access.simdgroup()) last[2] = latest;
    last[1] = latest;
  }
  last[0] = access;
}

Pages::Pages(uint64_t bytes, bool is_sparse) : data_(nullptr), bytes_(bytes + 64) {
  data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data_ == MAP_FAILED) {
    std::fprintf(stderr, "softmetal: no memory for checked mode\n");
    std::abort();
  }
  if (!is_sparse) madvise(data_, bytes_, MADV_HUGEPAGE);
}

Pages::~Pages() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Region::Region(char* start, uint64_t bytes, bool is_threadgroup, bool is_tracked)
    : start(start),
      bytes(bytes),
      is_threadgroup(is_threadgroup),
      is_tracked(is_tracked),
      flags(bytes, is_sparse()),
      cells_(is_tracked ? (bytes / granule + 1) * sizeof(Cell) : 0, is_sparse()) {}

namespace {

bool is_used(const Cell& cell) {
  return cell.write.group != 0 || cell.reads.last[0].group != 0;
}
bool is_used(const AtomicCell& cell) {
  return cell.writes.last[0].group != 0 || cell.reads.last[0].group != 0;
}

}  // namespace

template <class C>
void Region::refine(Pages& cells, uint32_t wanted) {
  Pages finer((bytes / wanted + 1) * sizeof(C), is_sparse());
  const auto* from = static_cast<const C*>(cells.data());
  auto* to = static_cast<C*>(finer.data());
  for_each_touched([&](uint64_t first, uint64_t end) {
    for (uint64_t i = first / wanted; i < end / wanted; ++i) {
      const C& cell = from[i * wanted / granule];
      if (is_used(cell)) to[i] = cell;
    }
  });
  cells = std::move(finer);
}

Cell* Region::cells(uint64_t offset, uint32_t size, uint32_t* count) {
  uint32_t wanted = granule;
  while ((offset | size) & (wanted - 1))
    wanted /= 2;
  if (wanted != granule) {
    refine<Cell>(cells_, wanted);
    if (atomic_cells_) refine<AtomicCell>(*atomic_cells_, wanted);
    granule = wanted;
  }
  *count = size / granule;
  return static_cast<Cell*>(cells_.data()) + offset / granule;
}

AtomicCell* Region::atomic_cells(uint64_t offset, bool make) {
  if (!atomic_cells_) {
    if (!make) return nullptr;
    atomic_cells_.emplace((bytes / granule + 1) * sizeof(AtomicCell), is_sparse());
  }
  return static_cast<AtomicCell*>(atomic_cells_->data()) + offset / granule;
}

namespace {

template <class Word>
bool mark_word(uint8_t* flags, uint8_t bits) {
  constexpr Word kEach = static_cast<Word>(0x0101010101010101u);
  Word word;
  std::memcpy(&word, flags, sizeof word);
  bool all = (word & kEach) == kEach;
  word |= static_cast<Word>(kEach * bits);
  std::memcpy(flags, &word, sizeof word);
  return all;
}
static_assert(kWritten == 1);

}  // namespace

void Region::touch(uint64_t offset, uint64_t size) {
  for (uint64_t chunk = offset / kChunk; chunk <= (offset + size - 1) / kChunk; ++chunk) {
    if (!touched_.insert(chunk).second) continue;
    const uint64_t first = chunk * kChunk, count = std::min(kChunk, bytes - first);
    for (uint64_t i = first; i < first + count; ++i)
      *flag(i) = host_initialised == nullptr || host_initialised[i] != 0 ? kWritten : 0;
  }
}

bool Region::mark(uint64_t offset, uint64_t size, uint8_t bits) {
  if (is_sparse()) touch(offset, size);
  uint8_t* first = flag(offset);
  if (size == 4) return mark_word<uint32_t>(first, bits);
  if (size == 2) return mark_word<uint16_t>(first, bits);
  bool all = true;
  uint64_t i = 0;
  for (; i + 8 <= size; i += 8)
    all = mark_word<uint64_t>(first + i, bits) && all;
  for (; i < size; ++i)
    all = mark_word<uint8_t>(first + i, bits) && all;
  return all;
}

const Binding& Region::binding_at(uint64_t offset) const {
  size_t i = bindings.size() - 1;
  while (i > 0 && bindings[i].offset > offset)
    --i;
  return bindings[i];
}

void Region::forget() {
  std::memset(flags.data(), 0, bytes);
}

}  // namespace softmetal
