// One pass of a matrix product: packs the activations, loops over chunks of K and, in each chunk, over strips of
// columns, and calls a MatrixKernel for the arithmetic. kernel_table.h defines chunk, strip and segment. gemm.cpp runs
// the tasks on threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/cpu/scratch.h"
#include "csrc/gemm/cpu/blocks.h"
#include "csrc/gemm/cpu/kernel_of_plan.h"
#include "csrc/weights/cpu/scales.h"

namespace marlin::cpu {

// Parts of scratch memory start at multiples of this many elements, so that products do not share cache lines.
inline constexpr int64_t kScratchUnit = 64;

// One pass of a product, which computes some of its rows.
class Pass {
 public:
  Pass(const GemmArguments& arguments, const CpuPlan& plan, const KernelSet& kernels, int64_t pass)
      : a_(arguments),
        w_(arguments.weight),
        plan_(plan),
        kernels_(kernels),
        matrix_(matrix_kernel(plan, kernels)),
        role_(zeros_role(w_.format)),
        high_bits_(high_bits(w_.format)),
        values_(code_values(w_.format, w_.lut)),
        chunk_k_(plan.chunk),
        chunks_(ceil_divide(w_.K, chunk_k_)),
        strips_(ceil_divide(w_.N, plan.strip)),
        group_(std::min<int64_t>(w_.group_size, chunk_k_)),
        segment_(matrix_.scaled_panel || matrix_.rounded_panel ? chunk_k_ : group_),
        pass_(pass),
        row_(part(a_.M, plan.passes, pass).begin) {
    x_.rows = part(a_.M, plan_.passes, pass).size();
    x_.row_blocks = ceil_divide(x_.rows, plan_.max_rows);
    x_.pitch = ceil_divide(ceil_divide(x_.rows, plan_.row_unit), x_.row_blocks) * plan_.row_unit;
    x_.segments = ceil_divide(chunk_k_, segment_);
    x_.row_bytes = matrix_.row_bytes;
  }

  const GemmArguments& arguments() const { return a_; }
  const CpuPlan& plan() const { return plan_; }
  int64_t pass() const { return pass_; }

  // The sizes of the parts of scratch memory that place() receives: bytes for the packed activations, and elements for
  // all other parts.
  int64_t value_bytes() const { return round_up(chunks_ * x_.row_blocks * x_.pitch * x_.row_bytes, kScratchUnit); }
  int64_t sum_count() const { return round_up(chunks_ * x_.segments * x_.rows, kScratchUnit); }
  int64_t start_count() const { return x_.row_blocks + 1; }
  int64_t partial_count() const {
    return plan_.k_slices > 1 ? round_up(plan_.k_slices * x_.rows * w_.N, kScratchUnit) : 0;
  }

  // Sets the memory of the packed activations, their sums, the row blocks and the partial sums.
  void place(char* values, float* sums, int64_t* starts, float* partial) {
    const int64_t row_units = ceil_divide(x_.rows, plan_.row_unit);
    for (int64_t i = 0; i <= x_.row_blocks; ++i)
      starts[i] = std::min(row_units * i / x_.row_blocks * plan_.row_unit, x_.rows);
    x_.values = values;
    x_.sums = sums;
    x_.starts = starts;
    partial_ = plan_.k_slices > 1 ? partial : nullptr;
  }

  // Returns false if the kernel cannot represent an activation or a scale. The caller must then repeat the pass with
  // another plan.
  bool representable() const { return representable_.load(std::memory_order_relaxed); }

  // Packs the activations, with one task for each chunk and row block. Chunks are innermost, so that a thread reads its
  // rows from front to back.
  int64_t pack_tasks() const { return chunks_ * x_.row_blocks; }
  int64_t pack_task_elements() const { return chunk_k_ * ceil_divide(x_.rows, x_.row_blocks); }
  void pack(int64_t task) {
    if (!pack(task % chunks_, task / chunks_)) representable_.store(false, std::memory_order_relaxed);
  }

  // Computes the products, after all activations are packed.
  int64_t tasks() const { return row_tasks() * plan_.column_tasks * plan_.k_slices; }
  void multiply(int64_t index) {
    const int64_t slice = index % plan_.k_slices;
    const int64_t rest = index / plan_.k_slices;
    run_task(part(x_.row_blocks, row_tasks(), rest / plan_.column_tasks),
             part(strips_, plan_.column_tasks, rest % plan_.column_tasks), part(chunks_, plan_.k_slices, slice),
             partial_ == nullptr ? nullptr : partial_ + slice * x_.rows * w_.N);
  }

  // Returns the number of rows of the partial sums over slices of K, or 0 if K is not sliced.
  int64_t sliced_rows() const { return plan_.k_slices > 1 ? x_.rows : 0; }
  void add_slices(int64_t m) const {
    float* total = partial_ + m * w_.N;
    for (int64_t slice = 1; slice < plan_.k_slices; ++slice) {
      const float* from = partial_ + (slice * x_.rows + m) * w_.N;
      for (int64_t n = 0; n < w_.N; ++n)
        total[n] += from[n];
    }
    write(m, 0, w_.N, total);
  }

 private:
  int64_t row_tasks() const { return std::min(plan_.row_tasks, x_.row_blocks); }

  bool pack(int64_t chunk, int64_t block_index) const {
    bool good = true;
    const Range block = x_.block(block_index);
    const int64_t k0 = chunk * chunk_k_;
    const int64_t count = std::min<int64_t>(chunk_k_, w_.K - k0);
    for (int64_t i = 0; i < block.size(); ++i) {
      float buffer[kChunk];
      const int64_t size = element_bytes(a_.a_type);
      const int64_t m = row_ + block.begin + i;
      const int64_t start = a_.a_starts == nullptr ? m * a_.a_row_stride : a_.a_starts[m];
      const char* from = static_cast<const char*>(a_.a) + start * size;
      if (a_.perm == nullptr) {
        kernels_.to_float(from + k0 * size, a_.a_type, count, buffer);
      } else if (size == sizeof(float)) {
        gather(reinterpret_cast<const float*>(from), a_.perm + k0, count, buffer);
      } else {
        uint16_t gathered[kChunk];
        gather(reinterpret_cast<const uint16_t*>(from), a_.perm + k0, count, gathered);
        kernels_.to_float(gathered, a_.a_type, count, buffer);
      }
      good &=
          matrix_.pack({buffer, static_cast<int>(count), static_cast<int>(segment_), static_cast<int>(block.size()),
                        static_cast<int>(i), x_.block_values(chunk, block_index), is_byte_wide(codes_of(w_.format))});
      if (role_ == ZerosRole::none || matrix_.rounded_panel) continue;
      for (int64_t segment = 0; segment * segment_ < count; ++segment) {
        const Range range{segment * segment_, std::min(count, (segment + 1) * segment_)};
        x_.segment_sums(chunk, segment)[block.begin + i] = sum(buffer + range.begin, range.size());
      }
    }
    return good;
  }

  template <class Element>
  static void gather(const Element* from, const int32_t* perm, int64_t count, Element* out) {
    for (int64_t k = 0; k < count; ++k)
      out[k] = from[perm[k]];
  }

  // Returns the sum of `count` values. `count` is a multiple of 8.
  static float sum(const float* values, int64_t count) {
    float lanes[8] = {};
    for (int64_t i = 0; i < count; i += 8) {
      for (int j = 0; j < 8; ++j)
        lanes[j] += values[i + j];
    }
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
  }

  void run_task(Range blocks, Range strips, Range chunks, float* partial) {
    static thread_local Scratch y_scratch, scale_scratch, panel_scratch;
    const int64_t block_strips = plan_.block_columns / plan_.strip;
    // Each group of row blocks decodes all words again. So there are as few groups as possible, of nearly equal size.
    const int64_t groups_of_blocks = ceil_divide(ceil_divide(x_.rows, row_tasks()), plan_.block_rows);
    const int64_t block_step = ceil_divide(blocks.size(), groups_of_blocks);
    const int64_t columns = block_strips * plan_.strip;
    float* y = y_scratch.get<float>(block_step * plan_.max_rows * columns);
    float* scales = scale_scratch.get<float>(2 * groups() * columns);
    // The scratch memory contains two panels. If the last strip extends beyond N, its words are copied and padded; the
    // memory for this copy is in front of the panels.
    const int64_t tail = (word_rows(chunk_k_) + high_rows(chunk_k_)) * plan_.strip * int64_t{sizeof(uint32_t)};
    char* scratch = panel_scratch.get<char>(tail + 2 * matrix_.panel_bytes);
    auto* tail_words = reinterpret_cast<uint32_t*>(scratch);
    Panels panels{reinterpret_cast<float*>(scratch + tail),
                  reinterpret_cast<float*>(scratch + tail + matrix_.panel_bytes)};
    if (matrix_.begin != nullptr) {
      const int64_t rows = blocks.size() == 1 ? x_.block(blocks.begin).size() : plan_.max_rows;
      matrix_.begin(static_cast<int>(segment_), static_cast<int>(rows));
    }
    for (int64_t s = strips.begin; s < strips.end; s += block_strips) {
      const Range some_strips{s, std::min(s + block_strips, strips.end)};
      for (int64_t b = blocks.begin; b < blocks.end; b += block_step) {
        const Range some_blocks{b, std::min(b + block_step, blocks.end)};
        const Range rows{x_.block(some_blocks.begin).begin, x_.block(some_blocks.end - 1).end};
        std::memset(y, 0, sizeof(float) * static_cast<size_t>(some_strips.size() * rows.size() * plan_.strip));
        int64_t loaded = -1;
        WordsAhead ahead(w_, some_strips, chunks, chunk_k_, plan_.strip, bytes_ahead());
        // The steps of a strip and of the next one. set_strip() writes only the fields that differ. A copy of a whole
        // Step would read fields in larger parts than they were just written in, and a CPU waits for such reads.
        Step steps[2]{};
        for (Step& step : steps) {
          step.values = values_;
          step.ld_scales = some_strips.size() * plan_.strip;
          step.ld_sums = x_.rows;
        }
        for (int64_t chunk = chunks.begin; chunk < chunks.end; ++chunk) {
          loaded = load_chunk_scales(chunk, some_strips, loaded, scales);
          if (!representable_.load(std::memory_order_relaxed)) break;
          for (Step& step : steps)
            step.k = static_cast<int>(std::min<int64_t>(chunk_k_, w_.K - chunk * chunk_k_));
          float* y_strip = y;
          Step *step = steps, *next = steps + 1;
          set_strip(*step, some_strips.begin, chunk, some_strips, scales, ahead.next(), tail_words);
          for (int64_t strip = some_strips.begin; strip < some_strips.end; ++strip) {
            const bool last = strip + 1 == some_strips.end;
            if (!last) set_strip(*next, strip + 1, chunk, some_strips, scales, ahead.next(), tail_words);
            run_strip(some_blocks, chunk, *step, last ? nullptr : next, panels, y_strip);
            std::swap(step, next);
            y_strip += rows.size() * plan_.strip;
          }
        }
        finish(some_strips, rows, y, partial);
      }
    }
    if (matrix_.end != nullptr) matrix_.end();
  }

  int64_t columns_of(const Range& strips) const {
    return std::min(strips.end * plan_.strip, w_.N) - strips.begin * plan_.strip;
  }

  int64_t bytes_ahead() const {
    const bool near = x_.rows == 1 && matrix_.near_row[static_cast<size_t>(codes_of(w_.format))];
    return near ? kBytesAheadNear : kBytesAhead;
  }

  // Returns the number of rows of words that hold this many k.
  int64_t word_rows(int64_t k) const { return k / codes_per_word(w_.format); }

  // Returns the number of rows of the second plane that hold this many k. Each chunk begins at the start of a row.
  int64_t high_rows(int64_t k) const { return ceil_divide(k * high_bits_, 32); }

  int64_t groups() const { return ceil_divide(chunk_k_, group_); }

  // Loads the scales and the zeros of a chunk's groups, as two arrays [group, columns of the strips] with zeros beyond
  // N. For a scaled panel, the second array contains the global scale instead, as [columns of the strips]. Returns the
  // number of the chunk's first group. If `loaded` equals this number, `scales` already contains the chunk's values,
  // and nothing is loaded.
  int64_t load_chunk_scales(int64_t chunk, const Range& strips, int64_t loaded, float* scales) {
    const int64_t k0 = chunk * chunk_k_;
    const int64_t first = k0 / w_.group_size;
    if (first == loaded) return loaded;
    const int64_t width = strips.size() * plan_.strip;
    const int64_t count = columns_of(strips);
    const int64_t begin = strips.begin * plan_.strip;
    float* zeros = scales + groups() * width;
    for (int64_t i = 0; i < groups() && k0 + i * group_ < w_.K; ++i, scales += width, zeros += width) {
      const int64_t group = (k0 + i * group_) / w_.group_size;
      if (matrix_.scaled_panel) {
        load_group_scales(kernels_, w_, group, begin, count, scales);
        if (!matrix_.representable(scales, count)) representable_.store(false, std::memory_order_relaxed);
        if (i == 0) load_global_scale(w_, begin, count, zeros);
      } else {
        load_scales(kernels_, w_, group, begin, count, scales);
      }
      std::fill(scales + count, scales + width, 0.F);
      if (role_ != ZerosRole::none) load_zeros(kernels_, w_, group, begin, count, zeros);
      std::fill(zeros + count, zeros + width, 0.F);
    }
    return first;
  }

  // Sets the fields that differ between the strips of a chunk. `scales` is the address of their scales and zeros.
  // run_strip() sets the fields of the row block.
  void set_strip(Step& step, int64_t strip, int64_t chunk, const Range& strips, const float* scales,
                 const uint32_t* ahead, uint32_t* tail_words) const {
    step.segment = static_cast<int>(group_);
    step.ld_words = w_.N;
    step.words = w_.words + chunk * word_rows(chunk_k_) * w_.N + strip * plan_.strip;
    step.high = {w_.high, w_.N, high_bits_};
    if (high_bits_ != 0) step.high.words += chunk * high_rows(chunk_k_) * w_.N + strip * plan_.strip;
    step.ahead = ahead;
    step.scales = scales + (strip - strips.begin) * plan_.strip;
    step.zeros = step.scales + groups() * step.ld_scales;
    step.role = role_;
    if ((strip + 1) * plan_.strip > w_.N) {
      const int64_t count = w_.N - strip * plan_.strip;
      const auto pad = [&](const uint32_t* words, int64_t rows, uint32_t* to) {
        for (int64_t r = 0; r < rows; ++r, words += w_.N, to += plan_.strip) {
          std::copy_n(words, count, to);
          std::fill_n(to + count, plan_.strip - count, 0U);
        }
        return to;
      };
      uint32_t* tail_high = pad(step.words, word_rows(step.k), tail_words);
      pad(step.high.words, high_rows(step.k), tail_high);
      step.high = {tail_high, plan_.strip, high_bits_};
      step.words = tail_words;
      step.ahead = tail_words;
      step.ld_words = plan_.strip;
    }
  }

  struct Panels {
    float* of_this;
    float* of_next;
    bool decoded = false;  // true if the previous step has already filled of_this
  };

  void run_strip(const Range& blocks, int64_t chunk, Step& step, const Step* next, Panels& panels, float* y) const {
    step.next = nullptr;
    const auto codes = static_cast<size_t>(codes_of(w_.format));
    if (matrix_.panel_bytes != 0) {
      if (!panels.decoded) matrix_.unpack[codes](step, panels.of_this);
      step.panel = panels.of_this;
      panels.decoded = next != nullptr && x_.block(blocks.begin).size() <= matrix_.ahead_rows;
      if (panels.decoded) {
        step.next = next;
        step.next_panel = panels.of_next;
        std::swap(panels.of_this, panels.of_next);
      }
    }
    if (matrix_.scaled_panel) step.scales = step.zeros;  // the global scale
    if (matrix_.rounded_panel) {
      static constexpr float kOnes[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                        1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
      step.scales = kOnes;
      step.role = ZerosRole::none;
    }
    step.segment = static_cast<int>(segment_);
    const float* sums = x_.segment_sums(chunk, 0);
    for (int64_t b = blocks.begin; b < blocks.end; ++b) {
      const Range block = x_.block(b);
      step.x = x_.block_values(chunk, b);
      step.rows = static_cast<int>(block.size());
      step.sums = sums + block.begin;
      step.y = y;
      matrix_.step[codes][static_cast<size_t>(block.size())](step);
      step.next = nullptr;
      y += block.size() * plan_.strip;
    }
  }

  // y is [strip][row][columns of the strip].
  void finish(const Range& strips, const Range& rows, float* y, float* partial) const {
    for (int64_t m = rows.begin; m < rows.end; ++m) {
      for (int64_t strip = strips.begin; strip < strips.end; ++strip) {
        const int64_t n = strip * plan_.strip;
        const int64_t count = std::min(plan_.strip, w_.N - n);
        float* from = y + ((strip - strips.begin) * rows.size() + (m - rows.begin)) * plan_.strip;
        if (partial != nullptr) {
          std::copy_n(from, count, partial + m * w_.N + n);
        } else {
          write(m, n, count, from);
        }
      }
    }
  }

  // Writes row m of the pass to the output.
  void write(int64_t m, int64_t n, int64_t count, float* from) const {
    if (a_.bias != nullptr) {
      for (int64_t i = 0; i < count; ++i)
        from[i] += load_element(a_.bias, a_.bias_type, n + i);
    }
    const int64_t row = a_.out_rows == nullptr ? row_ + m : a_.out_rows[row_ + m];
    const ElementType type = a_.fp32_out ? ElementType::float32 : a_.a_type;
    kernels_.from_float(from, type, count, element_at(a_.out, type, row * w_.N + n));
  }

  const GemmArguments& a_;
  const PackedWeight& w_;
  const CpuPlan plan_;
  const KernelSet& kernels_;
  const MatrixKernel& matrix_;
  const ZerosRole role_;
  const uint32_t high_bits_;
  const float* const values_;  // the value of each code
  const int64_t chunk_k_;      // number of k in a full chunk
  const int64_t chunks_;
  const int64_t strips_;
  const int64_t group_;    // the group size, or chunk_k_ if the group size is larger
  const int64_t segment_;  // number of k that a kernel sums before it applies scales
  const int64_t pass_;
  const int64_t row_;  // the first row of the pass in the product
  Activations x_{};
  float* partial_ = nullptr;  // [k_slices, rows, N] sums over slices of K, or nullptr if there is one slice
  std::atomic<bool> representable_{true};
};

}  // namespace marlin::cpu
