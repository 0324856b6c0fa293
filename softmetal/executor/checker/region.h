// A piece of GPU memory in checked mode and what is known of every byte of it.
#pragma once

#include <cstdint>
#include <vector>

namespace softmetal {

// Who touched a piece of memory last. `barriers` counts those passed before, of the threadgroup and of the simdgroup.
struct Access {
  uint32_t group = 0;  // linear index + 1; 0: nobody
  uint32_t thread : 10 = 0;
  uint32_t is_atomic : 1 = 0;
  uint32_t code : 21 = 0;  // offset in the library
  uint32_t barriers = 0;
  uint32_t simd_barriers = 0;

  uint32_t simdgroup() const { return thread / 32u; }
};
static_assert(sizeof(Access) == 16);

// The last write and enough reads to find any that a write conflicts with: the last one, and the last ones by another
// thread, simdgroup and threadgroup than it.
struct Cell {
  Access write;
  Access read[4];

  void add_read(const Access& access);
};

enum : uint8_t { kWritten = 1, kReadHere = 2, kWrittenHere = 4 };  // kWritten: at any time; the others: in this launch

// Anonymous memory that is zero where it was not touched.
class Pages {
 public:
  explicit Pages(uint64_t bytes);
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
  uint64_t offset;  // of the kernel's pointer in the region
};

struct Region {
  Region(char* start, uint64_t bytes, bool is_threadgroup, bool is_tracked, uint32_t first_granule);

  // Cells of the granules that [offset, offset + bytes) covers; makes granules smaller where the access is.
  Cell* cells(uint64_t offset, uint32_t bytes, uint32_t* count);
  void forget();  // a new threadgroup: nothing is written
  // Sets bits in the flags of some bytes; says whether all of them were written before.
  bool mark(uint64_t offset, uint64_t bytes, uint8_t bits);
  const Binding& binding_at(uint64_t offset) const;  // the last that begins at or before it

  char* start;
  uint64_t bytes;
  bool is_threadgroup;
  bool is_const = false;          // the kernel may not store
  bool is_tracked;                // several threads may conflict here
  bool is_written = false;        // in this launch
  uint32_t granule;               // bytes per cell
  std::vector<Binding> bindings;  // of device memory
  char* host = nullptr;           // where its contents come from
  int32_t argument = -1;          // of threadgroup memory: the index, or -1 for a variable
  uint32_t variable = 0;
  Pages flags;  // one byte per byte

  uint8_t* flag(uint64_t offset) { return static_cast<uint8_t*>(flags.data()) + offset; }

 private:
  Pages cells_;
};

}  // namespace softmetal
