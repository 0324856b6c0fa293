// The mLSTM by chunks (docs/mlstm.md): inside a chunk as masked products, between chunks as a state. A task holds some
// columns of one head's state in strips, so that both products of a chunk read and write them in cache:
//     numerator [L, strip] = [decayed queries | weights] [L, DK + L] @ [state; v] [DK + L, strip]
//     state [DK, strip] = decay * state + (weighted keys)^T [DK, L] @ v [L, strip]
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernel_set.h"
#include "mlstm.h"
#include "scratch.h"

namespace marlin::cpu {

namespace {

constexpr size_t kKeepBytes = size_t{8} << 20;  // of scratch, per thread
constexpr int64_t kChain = 1024;                // products that are added to one number in a row
// Gates this low are as good as -inf, and sums of them keep their precision in fp64.
constexpr double kLowestGate = -1e8;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

// [0, count) in nearly equal blocks of at most `most`.
template <class F>
void for_blocks(int64_t count, int64_t most, F&& f) {
  const int64_t blocks = ceil_div(count, most);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = count * block / blocks;
    f(begin, count * (block + 1) / blocks - begin);
  }
}

// What the gates of a chunk come to, everything in the stabilised units of its tokens or of the next state.
struct Gates {
  float* m;           // of each token
  float* from_state;  // decay of the state before the chunk up to each token
  float* row_high;    // the exponent of the weight of token l in the output of token j:
  float* row_low;     //   (row_high[j] + key_high[l]) + (row_low[j] + key_low[l])
  float* key_high;    // in two parts, since b_j - b_l + i_l - m_j is small where it matters and its terms need not be
  float* key_low;
  float* to_state;  // weight of each token in the state after the chunk
  float* floor;     // exp(-m)
  float whole;      // decay of the state through the whole chunk
};

class Task {
 public:
  Task(const MlstmArguments& a, const MlstmPlan& plan, const KernelSet& kernels, int64_t head, int64_t first_column,
       int64_t columns)
      : a_(a),
        plan_(plan),
        kernels_(kernels),
        mlstm_(kernels.mlstm),
        head_(head),
        first_column_(first_column),
        columns_(columns),
        strips_(ceil_div(columns, plan.strip)),
        L_(std::min(plan.chunk_size, a.S)),
        key_pitch_(round_up(a.DK, plan.strip)),
        token_pitch_(round_up(L_, std::max(plan.strip, kMlstmPadding))),
        row_pitch_(a.DK + token_pitch_ + kMlstmPadding),
        scale_(1.F / std::sqrt(static_cast<float>(a.DK))) {
    const int64_t per_token = 9 * token_pitch_ + kMlstmPadding;
    const int64_t keys = L_ * key_pitch_ + a.DK * token_pitch_ + key_pitch_;
    const int64_t rows = L_ * row_pitch_ + L_ * plan.strip;
    float* next = scratch().get<float>(per_token + keys + rows + strips_ * (a.DK + L_) * plan.strip);
    auto take = [&](int64_t count) {
      float* taken = next;
      next += count;
      return taken;
    };
    for (float** array : {&gates_.m, &gates_.from_state, &gates_.row_high, &gates_.row_low, &gates_.key_high,
                          &gates_.key_low, &gates_.to_state, &gates_.floor, &f_}) {
      *array = take(token_pitch_);
      std::fill(*array, *array + token_pitch_, 0.F);
    }
    keys_ = take(L_ * key_pitch_);
    keys_by_token_ = take(a.DK * token_pitch_);
    n_ = take(key_pitch_);
    rows_ = take(L_ * row_pitch_);
    numerators_ = take(L_ * plan.strip);
    state_ = take(strips_ * (a.DK + L_) * plan.strip);
    std::fill(keys_, keys_ + L_ * key_pitch_, 0.F);
    std::fill(n_, n_ + key_pitch_, 0.F);
  }

  ~Task() { scratch().trim(kKeepBytes); }
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  void all_chunks() {
    const int64_t chunks = ceil_div(a_.S, plan_.chunk_size);
    load_state(0);
    for (int64_t c = 0; c < chunks; ++c) {
      if (a_.chunks_per_slot != 0 && c % a_.chunks_per_slot == 0) store_state(c / a_.chunks_per_slot);
      chunk(c);
    }
    store_state(a_.out.slots - 1);
  }

  void one_chunk(int64_t c) {
    load_state(c);
    chunk(c);
  }

 private:
  static Scratch& scratch() {
    thread_local Scratch memory;
    return memory;
  }

  float* state_strip(int64_t strip) const { return state_ + strip * (a_.DK + L_) * plan_.strip; }
  int64_t strip_columns(int64_t strip) const { return std::min(plan_.strip, columns_ - strip * plan_.strip); }

  const char* at(const MlstmInput& input, int64_t s, int64_t column = 0) const {
    const int64_t offset = head_ / a_.H * input.stride_b + head_ % a_.H * input.stride_h + s * input.stride_s + column;
    return static_cast<const char*>(input.data) + offset * element_size(input.type);
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

  void chunk(int64_t c) {
    const int64_t begin = c * plan_.chunk_size;
    const int64_t count = std::min(plan_.chunk_size, a_.S - begin);
    gates(begin, count);
    for (int64_t j = 0; j < count; ++j)
      read(a_.k, begin + j, 0, a_.DK, keys_ + j * key_pitch_);
    if (a_.q.data != nullptr) weights(begin, count);

    const bool carry = a_.out.C != nullptr;
    if (carry) weigh_keys(count);
    for (int64_t p = 0; p < strips_; ++p) {
      float* values = state_strip(p) + a_.DK * plan_.strip;
      const int64_t columns = strip_columns(p);
      for (int64_t j = 0; j < count; ++j) {
        float* to = values + j * plan_.strip;
        read(a_.v, begin + j, first_column_ + p * plan_.strip, columns, to);
        std::fill(to + columns, to + plan_.strip, 0.F);
      }
      if (a_.q.data != nullptr) output(begin, count, p);
      if (carry) update(count, p);
    }
    if (carry) m_ = gates_.m[count - 1];
  }

  // In fp64 but for the elementwise functions: a sum of many decays keeps its low bits.
  void gates(int64_t begin, int64_t count) {
    const Gates& g = gates_;
    const int64_t padded = round_up(count, kMlstmPadding);
    read_gate(a_.f, begin, count, f_);
    read_gate(a_.i, begin, count, g.m);
    mlstm_.softplus(f_, g.floor, padded);
    double b = 0.0;
    double m = exact_m_;
    double sums[kMlstmChunkSizes.back()];
    double inputs[kMlstmChunkSizes.back()];
    for (int64_t j = 0; j < count; ++j) {
      const double decay = std::max<double>(std::min(f_[j], 0.F) - double{g.floor[j]}, kLowestGate);
      const double i = std::max<double>(g.m[j], kLowestGate);
      b += decay;
      m = std::max(decay + m, i);
      sums[j] = b;
      inputs[j] = i;
      g.m[j] = static_cast<float>(m);
      g.from_state[j] = static_cast<float>(b + m_ - g.m[j]);
      split(b - g.m[j], &g.row_high[j], &g.row_low[j]);
      split(i - b, &g.key_high[j], &g.key_low[j]);
      g.floor[j] = std::min(-g.m[j], 88.F);
    }
    for (int64_t j = 0; j < count; ++j)
      g.to_state[j] = static_cast<float>(b - sums[j] + inputs[j] - g.m[count - 1]);
    mlstm_.exp(g.from_state, padded);
    mlstm_.exp(g.to_state, padded);
    mlstm_.exp(g.floor, padded);
    for (int64_t j = 0; j < count; ++j) {
      if (g.m[j] < -88.F) g.floor[j] = std::exp(-g.m[j]);
    }
    gates_.whole = g.from_state[count - 1];
    exact_m_ = m;
  }

  static void split(double value, float* high, float* low) {
    *high = static_cast<float>(value);
    *low = std::isfinite(*high) ? static_cast<float>(value - *high) : 0.F;
  }

  // rows_: [decayed queries | weights of the chunk's tokens]; then what each row is divided by.
  void weights(int64_t begin, int64_t count) {
    for (int64_t d = 0; d < a_.DK; ++d) {
      for (int64_t j = 0; j < count; ++j)
        keys_by_token_[d * token_pitch_ + j] = keys_[j * key_pitch_ + d];
    }
    for (int64_t j = 0; j < count; ++j) {
      float* row = rows_ + j * row_pitch_;
      read(a_.q, begin + j, 0, a_.DK, row);
      for (int64_t d = 0; d < a_.DK; ++d)
        row[d] *= scale_;
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
    const Gates& g = gates_;
    const auto eps = static_cast<float>(a_.eps);
    for (int64_t j = 0; j < count; ++j) {
      float* row = rows_ + j * row_pitch_;
      const float inside = mlstm_.weigh(row + a_.DK, g.key_high, g.key_low, g.row_high[j], g.row_low[j], j + 1);
      const float before = mlstm_.scale_and_dot(row, g.from_state[j], n_, a_.DK);
      const float norm = std::max(std::abs(inside + before), g.floor[j]);
      const int64_t token = head_ * a_.S + begin + j;
      if (a_.N != nullptr && first_column_ == 0) static_cast<float*>(a_.N)[token] = norm;
      if (a_.M != nullptr && first_column_ == 0) static_cast<float*>(a_.M)[token] = g.m[j];
      g.floor[j] = norm + eps;
    }
  }

  template <class F>
  static void for_chain(int64_t count, F&& f) {
    for (int64_t k = 0; k < count; k += kChain)
      f(k, std::min(kChain, count - k));
  }

  void weigh_keys(int64_t count) {
    for (int64_t j = 0; j < count; ++j) {
      float* key = keys_ + j * key_pitch_;
      const float weight = gates_.to_state[j];
      for (int64_t d = 0; d < a_.DK; ++d)
        key[d] *= weight;
    }
  }

  void output(int64_t begin, int64_t count, int64_t strip) {
    const float* operand = state_strip(strip);
    for_blocks(count, plan_.max_rows, [&](int64_t first, int64_t rows) {
      const float* a = rows_ + first * row_pitch_;
      float* out = numerators_ + first * plan_.strip;
      const int64_t whole = a_.DK + first;
      const int64_t before = whole / kChain * kChain;
      for_chain(before, [&](int64_t k, int64_t steps) {
        mlstm_.product[static_cast<size_t>(rows)]({a + k, row_pitch_, 1, operand + k * plan_.strip, plan_.strip, steps,
                                                   k == 0 ? 0.F : 1.F, out, plan_.strip});
      });
      mlstm_.causal_product[static_cast<size_t>(rows)]({a + before, row_pitch_, 1, operand + before * plan_.strip,
                                                        plan_.strip, whole - before, before == 0 ? 0.F : 1.F, out,
                                                        plan_.strip});
    });
    const int64_t column = first_column_ + strip * plan_.strip;
    for (int64_t j = 0; j < count; ++j) {
      float* row = numerators_ + j * plan_.strip;
      for (int64_t d = 0; d < plan_.strip; ++d)
        row[d] /= gates_.floor[j];
      const int64_t to = (head_ * a_.S + begin + j) * a_.DV + column;
      kernels_.from_float(row, a_.q.type, strip_columns(strip),
                          static_cast<char*>(a_.h) + to * element_size(a_.q.type));
    }
  }

  void update(int64_t count, int64_t strip) {
    float* state = state_strip(strip);
    for_blocks(a_.DK, plan_.max_rows, [&](int64_t first, int64_t rows) {
      mlstm_.product[static_cast<size_t>(rows)]({keys_ + first, 1, key_pitch_, state + a_.DK * plan_.strip, plan_.strip,
                                                 count, gates_.whole, state + first * plan_.strip, plan_.strip});
    });
    if (strip != 0) return;
    float* ones = gates_.from_state;  // not needed any more
    std::fill_n(ones, count, 1.F);
    for (int64_t d = 0; d < a_.DK; d += plan_.strip) {
      mlstm_.product[1]({ones, 0, 1, keys_ + d, key_pitch_, count, gates_.whole, n_ + d, plan_.strip});
    }
  }

  const MlstmArguments& a_;
  const MlstmPlan& plan_;
  const KernelSet& kernels_;
  const MlstmKernels& mlstm_;
  const int64_t head_;
  const int64_t first_column_;
  const int64_t columns_;
  const int64_t strips_;
  const int64_t L_;
  const int64_t key_pitch_;
  const int64_t token_pitch_;
  const int64_t row_pitch_;
  const float scale_;
  Gates gates_{};
  float* f_ = nullptr;
  float* keys_ = nullptr;           // [L, DK], weighted for the state once the scores are there
  float* keys_by_token_ = nullptr;  // [DK, L]
  float* n_ = nullptr;              // [DK]
  float* rows_ = nullptr;           // [L, DK + L]
  float* numerators_ = nullptr;     // [L, strip]
  float* state_ = nullptr;          // [strips][DK + L, strip]: the state, and below it the chunk's v
  float m_ = 0.F;                   // what the state is relative to: exact_m_, rounded
  double exact_m_ = 0.0;            // over many chunks the roundings would add up
};

}  // namespace

void mlstm_chunkwise(const MlstmArguments& a, const MlstmPlan& plan, const Parallel& parallel) {
  const KernelSet& kernels = *kernels_of(plan.isa);
  const int64_t heads = a.B * a.H;
  if (a.given_states) {
    const int64_t chunks = a.S / plan.chunk_size;
    parallel.run(heads * chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task)
        Task(a, plan, kernels, task / chunks, 0, a.DV).one_chunk(task % chunks);
    });
    return;
  }
  const int64_t strips = ceil_div(a.DV, plan.strip);
  const int64_t parts = plan.column_tasks;
  parallel.run(heads * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t part = task % parts;
      const int64_t first = strips * part / parts * plan.strip;
      const int64_t last = std::min(strips * (part + 1) / parts * plan.strip, a.DV);
      Task(a, plan, kernels, task / parts, first, last - first).all_chunks();
    }
  });
}

}  // namespace marlin::cpu
