// The chunkwise mLSTM (docs/use/mlstm.md): masked products inside a chunk, and a state between chunks. A task computes
// some columns of one head's state. The task divides these columns into strips that stay in the cache for both products
// of a chunk:
//     numerator [L, strip] = [decayed queries | weights] [L, DK + L] @ [state; v] [DK + L, strip]
//     state [DK, strip] = decay * state + (weighted keys)^T [DK, L] @ v [L, strip]
#include <algorithm>
#include <cmath>

#include "csrc/core/math.h"
#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/cpu/scratch.h"
#include "csrc/cpu/shuffle.h"
#include "csrc/mlstm/cpu/api.h"
#include "csrc/mlstm/cpu/gates.h"
#include "csrc/mlstm/cpu/kernel_table.h"

namespace marlin::cpu {

namespace {

// A longer sum is computed in several parts, which keeps its rounding error small.
constexpr int64_t kMaxChain = 1024;

// Divides [0, count) into nearly equal blocks of at most max_size, and calls f(first, size) for each block.
template <class F>
void for_blocks(int64_t count, int64_t max_size, F&& f) {
  const int64_t blocks = ceil_divide(count, max_size);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = count * block / blocks;
    f(begin, count * (block + 1) / blocks - begin);
  }
}

// Transposes a matrix. Both arrays must be padded to multiples of four rows and columns.
void transpose(const float* from, int64_t ld_from, int64_t rows, int64_t columns, float* to, int64_t ld_to) {
  for (int64_t d = 0; d < columns; d += 4) {
    for (int64_t j = 0; j < rows; j += 4)
      transpose_4x4(from + j * ld_from + d, ld_from, to + d * ld_to + j, ld_to);
  }
}

class Task {
 public:
  Task(const MlstmArguments& a, const MlstmPlan& plan, int64_t head, int64_t first_column, int64_t columns)
      : a_(a),
        plan_(plan),
        kernels_(*kernels_of(plan.isa)),
        mlstm_(*mlstm_kernels_of(plan.isa)),
        head_(head),
        b_(head / a.H),
        h_(head % a.H),
        first_column_(first_column),
        columns_(columns),
        strips_(ceil_divide(columns, plan.strip)),
        L_(std::min(std::max(first_chunk(), plan.chunk_size), a.S)),
        key_pitch_(round_up(a.DK, plan.strip) + kMlstmPadding),
        scale_(1.F / std::sqrt(static_cast<float>(a.DK))) {
    set_pitches(L_);
    const int64_t per_token = 9 * token_pitch_ + kMlstmPadding;
    const int64_t keys = round_up(L_, 4) * key_pitch_ + round_up(a.DK, 4) * token_pitch_ + key_pitch_;
    const int64_t rows = L_ * row_pitch_ + L_ * plan.strip;
    float* next = scratch().get<float>(per_token + keys + rows + strips_ * (a.DK + L_) * plan.strip);
    auto take = [&](int64_t count) {
      float* taken = next;
      next += count;
      return taken;
    };
    for (float** array : {&gates_.f, &gates_.m, &gates_.from_state, &gates_.row_high, &gates_.row_low, &gates_.key_high,
                          &gates_.key_low, &gates_.to_state, &gates_.floor}) {
      *array = take(token_pitch_);
      std::fill(*array, *array + token_pitch_, 0.F);
    }
    keys_ = take(round_up(L_, 4) * key_pitch_);
    keys_by_token_ = take(round_up(a.DK, 4) * token_pitch_);
    n_ = take(key_pitch_);
    rows_ = take(L_ * row_pitch_);
    numerators_ = take(L_ * plan.strip);
    state_ = take(strips_ * (a.DK + L_) * plan.strip);
    std::fill(keys_, keys_ + round_up(L_, 4) * key_pitch_, 0.F);
    std::fill(n_, n_ + key_pitch_, 0.F);
  }

  ~Task() { scratch().trim(kKeepBytes); }
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  void all_chunks() {
    load_state(0);
    int64_t begin = 0;
    for (int64_t c = 0; begin < a_.S; ++c) {
      if (a_.chunks_per_slot != 0 && c % a_.chunks_per_slot == 0) store_state(c / a_.chunks_per_slot);
      const int64_t count = std::min(c == 0 ? first_chunk() : plan_.chunk_size, a_.S - begin);
      chunk(begin, count);
      begin += count;
    }
    store_state(a_.out.slots - 1);
  }

  void one_chunk(int64_t c) {
    load_state(c);
    chunk(c * plan_.chunk_size, plan_.chunk_size);
  }

 private:
  static Scratch& scratch() {
    thread_local Scratch memory;
    return memory;
  }

  int64_t first_chunk() const {
    return a_.in.C == nullptr && a_.chunks_per_slot == 0 ? plan_.first_chunk : plan_.chunk_size;
  }

  void set_pitches(int64_t count) {
    token_pitch_ = round_up(count, std::max(plan_.strip, kMlstmPadding));
    row_pitch_ = a_.DK + token_pitch_ + kMlstmPadding;
  }

  float* state_strip(int64_t strip) const { return state_ + strip * (a_.DK + L_) * plan_.strip; }
  int64_t strip_begin(int64_t strip) const { return first_column_ + strip * plan_.strip; }
  int64_t strip_columns(int64_t strip) const { return std::min(plan_.strip, columns_ - strip * plan_.strip); }

  const char* at(const MlstmInput& input, int64_t s, int64_t column = 0) const {
    return element_at(input.data, input.type, b_ * input.stride_b + h_ * input.stride_h + s * input.stride_s + column);
  }

  char* output_at(int64_t s, int64_t strip) const {
    return element_at(a_.h, a_.q.type, (head_ * a_.S + s) * a_.DV + strip_begin(strip));
  }

  void read(const MlstmInput& input, int64_t s, int64_t column, int64_t count, float* out) const {
    kernels_.to_float(at(input, s, column), input.type, count, out);
  }

  void read_gate(const MlstmInput& input, int64_t s, int64_t count, float* out) const {
    if (input.stride_s == 1) return read(input, s, 0, count, out);
    for (int64_t j = 0; j < count; ++j)
      out[j] = load_element(at(input, s + j), input.type, 0);
  }

  void load_state(int64_t slot) {
    const int64_t strip = plan_.strip;
    const bool given = a_.in.C != nullptr;
    const int64_t at = head_ * a_.in.slots + slot;
    const auto* C = static_cast<const float*>(a_.in.C) + (given ? at * a_.DK * a_.DV + first_column_ : 0);
    for (int64_t p = 0; p < strips_; ++p) {
      float* to = state_strip(p);
      const int64_t count = given ? strip_columns(p) : 0;
      for (int64_t d = 0; d < a_.DK; ++d, to += strip) {
        if (given) std::copy_n(C + d * a_.DV + p * strip, count, to);
        std::fill(to + count, to + strip, 0.F);
      }
    }
    m_ = given ? static_cast<const float*>(a_.in.m)[at] : 0.F;
    exact_m_ = m_;
    is_zero_ = !given;
    if (given) {
      std::copy_n(static_cast<const float*>(a_.in.n) + at * a_.DK, a_.DK, n_);
    } else {
      std::fill(n_, n_ + a_.DK, 0.F);
    }
  }

  void store_state(int64_t slot) const {
    const int64_t at = head_ * a_.out.slots + slot;
    auto* C = static_cast<float*>(a_.out.C) + at * a_.DK * a_.DV + first_column_;
    for (int64_t p = 0; p < strips_; ++p) {
      for (int64_t d = 0; d < a_.DK; ++d)
        std::copy_n(state_strip(p) + d * plan_.strip, strip_columns(p), C + d * a_.DV + p * plan_.strip);
    }
    if (first_column_ != 0) return;
    std::copy_n(n_, a_.DK, static_cast<float*>(a_.out.n) + at * a_.DK);
    static_cast<float*>(a_.out.m)[at] = m_;
  }

  void chunk(int64_t begin, int64_t count) {
    set_pitches(count);
    read_gate(a_.f, begin, count, gates_.f);
    read_gate(a_.i, begin, count, gates_.m);
    gates_.compute(mlstm_, count, m_, &exact_m_);
    for (int64_t j = 0; j < count; ++j)
      read(a_.k, begin + j, 0, a_.DK, keys_ + j * key_pitch_);
    transpose(keys_, key_pitch_, round_up(count, 4), round_up(a_.DK, 4), keys_by_token_, token_pitch_);
    if (a_.q.data != nullptr) weights(begin, count);

    const bool carry = a_.out.C != nullptr;
    if (carry) weigh_keys(count);
    for (int64_t p = 0; p < strips_; ++p) {
      read_values(begin, count, p);
      if (a_.q.data != nullptr) output(begin, count, p);
      if (carry) update(begin, count, p);
    }
    if (carry) {
      update_n(count);
      m_ = gates_.m[count - 1];
    }
    is_zero_ = false;
  }

  void read_values(int64_t begin, int64_t count, int64_t strip) const {
    float* to = state_strip(strip) + a_.DK * plan_.strip;
    const int64_t columns = strip_columns(strip);
    for (int64_t j = 0; j < count; ++j, to += plan_.strip) {
      read(a_.v, begin + j, strip_begin(strip), columns, to);
      std::fill(to + columns, to + plan_.strip, 0.F);
    }
  }

  // Prefetches rows of v and h that the next strip needs: those of tokens `first` to end - 1. These rows are too far
  // apart for the hardware prefetcher.
  [[gnu::always_inline]] void prefetch_next(int64_t begin, int64_t count, int64_t strip, int64_t first,
                                            int64_t end) const {
    const bool is_last = strip + 1 == strips_;
    const int64_t next = is_last ? begin + count : begin;
    const int64_t next_strip = is_last ? 0 : strip + 1;
    end = std::min(next + end, a_.S);
    for (int64_t s = next + first; s < end; ++s) {
      prefetch(at(a_.v, s, strip_begin(next_strip)), a_.v.type);
      if (a_.q.data != nullptr) prefetch(output_at(s, next_strip), a_.q.type);
    }
  }

  // always_inline, because GCC removes calls of functions that only prefetch.
  [[gnu::always_inline]] void prefetch(const char* row, ElementType type) const {
    for (int64_t byte = 0; byte < plan_.strip * element_bytes(type); byte += 64)
      __builtin_prefetch(row + byte);
  }

  // Computes rows_, which is [decayed queries | weights of the chunk's tokens]. Stores the divisor of each row in
  // gates_.floor.
  void weights(int64_t begin, int64_t count) {
    for (int64_t j = 0; j < count; ++j) {
      read(a_.q, begin + j, 0, a_.DK, rows_ + j * row_pitch_);
    }
    for_blocks(count, plan_.max_rows, [&](int64_t first, int64_t rows) {
      for (int64_t column = 0; column < first + rows; column += plan_.strip) {
        for_chain(a_.DK, [&](int64_t k, int64_t steps) {
          float* row = rows_ + first * row_pitch_;
          mlstm_.product[static_cast<size_t>(rows)]({row + k, row_pitch_, 1, keys_by_token_ + k * token_pitch_ + column,
                                                     token_pitch_, steps, k == 0 ? 0.F : 1.F, row + a_.DK + column,
                                                     row_pitch_});
        });
      }
    });
    const MlstmGates& g = gates_;
    const auto eps = static_cast<float>(a_.eps);
    for (int64_t j = 0; j < count; ++j) {
      float* row = rows_ + j * row_pitch_;
      const float inside = mlstm_.weigh(row + a_.DK, g.key_high, g.key_low, g.row_high[j], g.row_low[j], scale_, j + 1);
      const float before = mlstm_.scale_and_dot(row, scale_ * g.from_state[j], n_, a_.DK);
      const float norm = std::max(std::abs(inside + before), g.floor[j]);
      const int64_t token = head_ * a_.S + begin + j;
      if (a_.N != nullptr && first_column_ == 0) static_cast<float*>(a_.N)[token] = norm;
      if (a_.M != nullptr && first_column_ == 0) static_cast<float*>(a_.M)[token] = g.m[j];
      g.floor[j] = norm + eps;
    }
  }

  template <class F>
  static void for_chain(int64_t count, F&& f) {
    for (int64_t k = 0; k < count; k += kMaxChain)
      f(k, std::min(kMaxChain, count - k));
  }

  void weigh_keys(int64_t count) {
    for (int64_t d = 0; d < a_.DK; ++d)
      mlstm_.multiply(keys_by_token_ + d * token_pitch_, gates_.to_state, count);
  }

  void output(int64_t begin, int64_t count, int64_t strip) {
    const int64_t from_state = is_zero_ ? 0 : a_.DK;
    const float* operand = state_strip(strip) + (a_.DK - from_state) * plan_.strip;
    for_blocks(count, plan_.max_rows, [&](int64_t first, int64_t rows) {
      const float* a = rows_ + first * row_pitch_ + (a_.DK - from_state);
      float* out = numerators_ + first * plan_.strip;
      const int64_t whole = from_state + first;
      const int64_t before = whole / kMaxChain * kMaxChain;
      for_chain(before, [&](int64_t k, int64_t steps) {
        mlstm_.product[static_cast<size_t>(rows)]({a + k, row_pitch_, 1, operand + k * plan_.strip, plan_.strip, steps,
                                                   k == 0 ? 0.F : 1.F, out, plan_.strip});
      });
      mlstm_.causal_product[static_cast<size_t>(rows)]({a + before, row_pitch_, 1, operand + before * plan_.strip,
                                                        plan_.strip, whole - before, before == 0 ? 0.F : 1.F, out,
                                                        plan_.strip});
    });
    for (int64_t j = 0; j < count; ++j) {
      float* row = numerators_ + j * plan_.strip;
      const float inverse = 1.F / gates_.floor[j];
      if (std::isfinite(inverse)) {
        mlstm_.scale(row, inverse, plan_.strip);
      } else {  // the divisor is subnormal
        for (int64_t d = 0; d < plan_.strip; ++d)
          row[d] /= gates_.floor[j];
      }
      kernels_.from_float(row, a_.q.type, strip_columns(strip), output_at(begin + j, strip));
    }
  }

  void update(int64_t begin, int64_t count, int64_t strip) {
    float* state = state_strip(strip);
    const int64_t tokens = ceil_divide(count * plan_.max_rows, a_.DK);  // the tokens to prefetch with each block of
                                                                        // rows
    int64_t prefetched = 0;
    for_blocks(a_.DK, plan_.max_rows, [&](int64_t first, int64_t rows) {
      mlstm_.product[static_cast<size_t>(rows)](
          {keys_by_token_ + first * token_pitch_, token_pitch_, 1, state + a_.DK * plan_.strip, plan_.strip, count,
           is_zero_ ? 0.F : gates_.whole, state + first * plan_.strip, plan_.strip});
      const int64_t end = std::min(prefetched + tokens, count);
      prefetch_next(begin, count, strip, prefetched, end);
      prefetched = end;
    });
  }

  void update_n(int64_t count) {
    for (int64_t d = 0; d < a_.DK; d += plan_.strip)
      mlstm_.product[1]({gates_.to_state, 0, 1, keys_ + d, key_pitch_, count, gates_.whole, n_ + d, plan_.strip});
  }

  const MlstmArguments& a_;
  const MlstmPlan& plan_;
  const KernelSet& kernels_;
  const MlstmKernels& mlstm_;
  const int64_t head_;
  const int64_t b_;
  const int64_t h_;
  const int64_t first_column_;
  const int64_t columns_;
  const int64_t strips_;
  const int64_t L_;
  const int64_t key_pitch_;
  const float scale_;
  int64_t token_pitch_ = 0;  // the row length of keys_by_token_ in this chunk
  int64_t row_pitch_ = 0;
  MlstmGates gates_{};
  float* keys_ = nullptr;           // [L, DK]
  float* keys_by_token_ = nullptr;  // [DK, L]; weigh_keys() multiplies it by gates_.to_state, after weights() has read
                                    // it
  float* n_ = nullptr;              // [DK]
  float* rows_ = nullptr;           // [L, DK + L]
  float* numerators_ = nullptr;     // [L, strip]
  float* state_ = nullptr;          // [strips][DK + L, strip]: the state, and below it the v of the chunk
  bool is_zero_ = true;             // true if the state is zero
  float m_ = 0.F;                   // stabiliser of the state: exact_m_, rounded to fp32
  double exact_m_ = 0.0;            // fp64, because rounding errors would add up over many chunks
};

}  // namespace

void mlstm_chunkwise(const MlstmArguments& a, const MlstmPlan& plan, const Parallel& parallel) {
  const int64_t heads = a.B * a.H;
  if (a.given_states) {
    const int64_t chunks = a.S / plan.chunk_size;
    parallel.run(heads * chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task)
        Task(a, plan, task / chunks, 0, a.DV).one_chunk(task % chunks);
    });
    return;
  }
  const int64_t strips = ceil_divide(a.DV, plan.strip);
  const int64_t parts = plan.column_tasks;
  parallel.run(heads * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t part = task % parts;
      const int64_t first = strips * part / parts * plan.strip;
      const int64_t last = std::min(strips * (part + 1) / parts * plan.strip, a.DV);
      Task(a, plan, task / parts, first, last - first).all_chunks();
    }
  });
}

}  // namespace marlin::cpu
