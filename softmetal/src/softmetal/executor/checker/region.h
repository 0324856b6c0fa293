// A range of GPU memory in checked mode, with the history of its accesses. The history is kept for each granule: a
// block of a few bytes, as small as the smallest access so far.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <unordered_set>
#include <vector>

namespace softmetal {

// The latest access of a granule: the thread, and how many barriers the thread's threadgroup and simdgroup had passed.
struct Access {
  uint32_t group = 0;  // linear index + 1; 0: no access yet
  uint32_t thread : 10 = 0;
  uint32_t code : 22 = 0;  // offset of the accessing code in the library
  uint32_t barriers = 0;
  uint32_t simd_barriers = 0;

  uint32_t simdgroup() const { return thread / 32u; }
};
static_assert(sizeof(Access) == 16);

// Earlier accesses that do not conflict with each other. Four accesses are enough to find any conflict with a later
// access: the last access, and the last accesses by a different thread, a different simdgroup and a different
// threadgroup.
struct History {
  Access last[4];

  void add(const Access& access);
};

// The plain accesses of a granule. One write is enough, because a conflict with an earlier write was already reported.
struct Cell {
  Access write;
  History reads;
};

// The atomic accesses of a granule. Plain accesses have a separate history: in a shared history, a thread's atomic
// access would replace the same thread's plain store, and a conflict of that store with another thread's atomic would
// be missed.
struct AtomicCell {
  History writes, reads;
};

// Flags of a byte. kWritten: written at any time. kReadHere and kWrittenHere: read or written in this launch.
enum : uint8_t { kWritten = 1, kReadHere = 2, kWrittenHere = 4 };

// Anonymous memory from the system. Pages that were not written read as zero.
class Pages {
 public:
  explicit Pages(uint64_t bytes, bool is_sparse = false);
  ~Pages();
  Pages(Pages&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }
  Pages& operator=(Pages&& other) noexcept;
  void* data() const { return data_; }

 private:
  void* data_;
  uint64_t bytes_;
};

struct Binding {
  int32_t buffer;   // slot
  uint64_t offset;  // bytes from the region's start to the address that the kernel gets
};

// A region of at least this size is sparse: the checker neither copies it nor visits bytes that no thread touches.
inline constexpr uint64_t kSparseBytes = 1u << 28;

struct Region {
  Region(char* start, uint64_t bytes, bool is_threadgroup, bool is_tracked);

  // Returns the cells of [offset, offset + bytes), one cell for each granule. If the access is smaller than a granule
  // or crosses its border, the granules are made smaller first.
  Cell* cells(uint64_t offset, uint32_t bytes, uint32_t* count);
  // Returns the cells of the atomic accesses to the granules from this offset on. They exist only after the first
  // atomic access. Before it, the function makes them if `make` is true, and otherwise returns null.
  AtomicCell* atomic_cells(uint64_t offset, bool make);
  void forget();  // marks all bytes as unwritten, for a new threadgroup
  // Sets bits in the flags of a range of bytes. Returns whether all bytes were written before.
  bool mark(uint64_t offset, uint64_t bytes, uint8_t bits);
  // Returns the last binding that does not begin after the offset, or else the first binding. Do not call this for a
  // resident buffer, whose region has no bindings.
  const Binding& binding_at(uint64_t offset) const;
  // Calls visit(first, end) for the ranges of bytes that threads may have touched.
  template <class Visit>
  void for_each_touched(Visit visit) const {
    if (!is_sparse()) return visit(uint64_t{0}, bytes);
    for (const uint64_t chunk : touched_)
      visit(chunk * kChunk, std::min(bytes, (chunk + 1) * kChunk));
  }
  bool is_sparse() const { return bytes >= kSparseBytes; }

  char* start;
  uint64_t bytes;
  bool is_threadgroup;
  bool is_const = false;          // the kernel must not store here
  bool is_tracked;                // accesses of several threads may conflict here
  bool is_written = false;        // in this launch
  uint32_t granule = 4;           // bytes per cell
  std::vector<Binding> bindings;  // buffer slots that are bound to this region of device memory
  char* host = nullptr;  // the host's memory of this region; equal to `start` if the kernel uses the host's addresses
  // The host's flags of written bytes, starting at `host`. Null means that all bytes are written.
  uint8_t* host_initialised = nullptr;
  int32_t argument = -1;  // index of a threadgroup argument, or -1 for a variable
  uint32_t variable = 0;
  Pages flags;  // a byte of flags for each byte of memory

  uint8_t* flag(uint64_t offset) { return static_cast<uint8_t*>(flags.data()) + offset; }

 private:
  static constexpr uint64_t kChunk = 4096;
  template <class C>
  void refine(Pages& cells, uint32_t wanted);
  void touch(uint64_t offset, uint64_t size);

  std::unordered_set<uint64_t> touched_;  // chunks, of a sparse region
  Pages cells_;
  std::optional<Pages> atomic_cells_;
};

}  // namespace softmetal
