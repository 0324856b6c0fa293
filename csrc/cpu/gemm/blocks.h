// How a product is divided: ranges of rows, columns and K, packed activations, and the order of the prefetches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "csrc/core/math.h"
#include "csrc/cpu/api.h"
#include "csrc/cpu/gemm/kernel_table.h"

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

// The packed activations of a pass: values [chunk][row block][kChunk, rows of the block], and the sums of each segment
// [chunk][segment][row].
struct Activations {
  int64_t rows;
  int64_t row_blocks;
  int64_t segments;   // of a chunk
  int64_t row_bytes;  // one row of one chunk
  char* values;
  float* sums;

  const int64_t* starts;  // [row_blocks + 1]: the first row of each block, then the number of rows
  int64_t pitch;          // rows between the blocks in memory

  Range block(int64_t index) const { return {starts[index], starts[index + 1]}; }
  char* block_values(int64_t chunk, int64_t index) const {
    return values + (chunk * row_blocks + index) * pitch * row_bytes;
  }
  float* segment_sums(int64_t chunk, int64_t segment) const { return sums + (chunk * segments + segment) * rows; }
};

inline constexpr int64_t kColumnsAhead = 512;  // prefetch distance: 32 KB of a whole chunk's words

// The strips of a block, chunk after chunk, ahead of the products.
class WordsAhead {
 public:
  WordsAhead(const PackedWeight& w, const Range& strips, const Range& chunks, int64_t strip)
      : row_(w.words + chunks.begin * (kChunk / 8) * w.N + strips.begin * strip),
        chunk_stride_(kChunk / 8 * w.N),
        chunks_left_(std::min(chunks.end, w.K / kChunk) - chunks.begin - 1),
        strips_(strips.size()),
        strip_(strip) {
    for (int64_t columns = strip; columns < kColumnsAhead; columns += strip)
      next();
  }
  // Returns the words of the next strip; at the end of the task, those of the last chunk again.
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
