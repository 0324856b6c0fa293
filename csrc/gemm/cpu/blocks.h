// Divides a product into ranges of rows, columns and K. Defines the layout of packed activations and the order in which
// words are prefetched.
#pragma once

#include <algorithm>
#include <cstdint>

#include "csrc/core/math.h"
#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/weights/cpu/api.h"

namespace marlin::cpu {

struct Range {
  int64_t begin;
  int64_t end;
  int64_t size() const { return end - begin; }
};

// Returns part `index` of `parts` nearly equal parts of [0, count).
inline Range part(int64_t count, int64_t parts, int64_t index) {
  return {count * index / parts, count * (index + 1) / parts};
}

// The packed activations of a pass, [chunk][row block][k, rows of the block], and their sums over each segment,
// [chunk][segment][row]. kernel_table.h defines chunk and segment.
struct Activations {
  int64_t rows;
  int64_t row_blocks;
  int64_t segments;   // per chunk
  int64_t row_bytes;  // bytes of one row of one chunk
  char* values;
  float* sums;

  const int64_t* starts;  // [row_blocks + 1]: the first row of each block, followed by the number of rows
  int64_t pitch;          // number of rows from the start of a block to the start of the next block

  Range block(int64_t index) const { return {starts[index], starts[index + 1]}; }
  char* block_values(int64_t chunk, int64_t index) const {
    return values + (chunk * row_blocks + index) * pitch * row_bytes;
  }
  float* segment_sums(int64_t chunk, int64_t segment) const { return sums + (chunk * segments + segment) * rows; }
};

// The prefetch distances: kBytesAhead into the second-level cache, kBytesAheadNear into the first-level cache. With the
// near distance, one row of E4M3 was 1.02 to 1.16 times as fast as with the far distance (Intel Xeon, two and 16
// threads). byte_split of one row of 4-bit codes was 1.00 to 1.11 times as fast with AVX-512, and 1.02 to 2.22 times
// with AVX2. The fp32 kernels were 0.94 to 1.09 times as fast with 4-bit codes, so they use the far distance.
inline constexpr int64_t kBytesAhead = 32 << 10;
inline constexpr int64_t kBytesAheadNear = 4 << 10;

// Returns the words to prefetch: those of a task's strips, chunk after chunk, `bytes_ahead` before the products need
// them. A chunk contains chunk_k elements of K.
class WordsAhead {
 public:
  WordsAhead(const PackedWeight& w, const Range& strips, const Range& chunks, int64_t chunk_k, int64_t strip,
             int64_t bytes_ahead)
      : row_(w.words + chunks.begin * (chunk_k / codes_per_word(w.format)) * w.N + strips.begin * strip),
        chunk_stride_(chunk_k / codes_per_word(w.format) * w.N),
        chunks_left_(std::min(chunks.end, w.K / chunk_k) - chunks.begin - 1),
        strips_(strips.size()),
        strip_(strip) {
    for (int64_t columns = strip; columns < bytes_ahead * 2 / chunk_k; columns += strip)
      next();
  }
  // Returns the words of the next strip. After the task's last chunk, returns the words of that chunk again.
  const uint32_t* next() {
    if (++at_ == strips_) {
      at_ = 0;
      if (chunks_left_-- > 0) row_ += chunk_stride_;
    }
    return row_ + at_ * strip_;
  }

 private:
  const uint32_t* row_;
  int64_t chunk_stride_;
  int64_t chunks_left_;
  int64_t strips_;
  int64_t strip_;
  int64_t at_ = 0;
};

}  // namespace marlin::cpu
