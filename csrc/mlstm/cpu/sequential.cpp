// The mLSTM in recurrent form, token by token (docs/use/mlstm.md). Tests compare the chunkwise form with it.
#include <algorithm>
#include <cmath>
#include <vector>

#include "csrc/cpu/kernels/kernel_table.h"
#include "csrc/mlstm/cpu/api.h"
#include "csrc/mlstm/cpu/kernel_table.h"

namespace marlin::cpu {

namespace {

template <class T>
void read(const KernelSet& kernels, const MlstmInput& input, int64_t offset, int64_t count, T* out) {
  if constexpr (std::is_same_v<T, double>) {
    const auto* from = static_cast<const double*>(input.data) + offset;
    std::copy(from, from + count, out);
  } else {
    kernels.to_float(element_at(input.data, input.type, offset), input.type, count, out);
  }
}

template <class T>
void write(const KernelSet& kernels, const T* values, int64_t offset, int64_t count, ElementType type, void* out) {
  if constexpr (std::is_same_v<T, double>) {
    std::copy(values, values + count, static_cast<double*>(out) + offset);
  } else {
    kernels.from_float(values, type, count, element_at(out, type, offset));
  }
}

void step_row(const MlstmKernels&, const double* from, double* to, const double* v, double* numerator, double forget,
              double key, double query, int64_t count) {
  for (int64_t d = 0; d < count; ++d) {
    to[d] = forget * from[d] + key * v[d];
    numerator[d] += query * to[d];
  }
}

void step_row(const MlstmKernels& kernels, const float* from, float* to, const float* v, float* numerator, float forget,
              float key, float query, int64_t count) {
  kernels.step_row(from, to, v, numerator, forget, key, query, count);
}

// log(sigmoid(f)) as written would give -inf for f below about -88. Here exp(-|f|) cannot overflow.
template <class T>
T log_sigmoid(T f) {
  return std::min(f, T{0}) - std::log1p(std::exp(-std::abs(f)));
}

// Computes the tokens of one head.
template <class T>
class Head {
 public:
  Head(const MlstmArguments& a, const MlstmPlan& plan, int64_t b, int64_t h)
      : a_(a),
        kernels_(*kernels_of(plan.isa)),
        mlstm_(*mlstm_kernels_of(plan.isa)),
        chunk_size_(plan.chunk_size),
        b_(b),
        h_(h),
        head_(b * a.H + h),
        q_(a.DK),
        k_(a.DK),
        v_(a.DV),
        y_(a.DV) {}

  void run() {
    const bool final_only = a_.out.C != nullptr && a_.chunks_per_slot == 0;
    std::vector<T> C(final_only ? 0 : a_.DK * a_.DV);
    std::vector<T> n(final_only ? 0 : a_.DK);
    C_ = final_only ? out(a_.out.C, a_.DK * a_.DV, 0) : C.data();
    n_ = final_only ? out(a_.out.n, a_.DK, 0) : n.data();
    start(0);
    for (int64_t s = 0; s < a_.S; ++s) {
      if (s % chunk_size_ == 0) chunk(s / chunk_size_);
      token(s);
    }
    if (a_.out.C == nullptr) return;
    if (!final_only) return chunk(a_.S / chunk_size_);
    if (a_.S == 0) keep();
    *out(a_.out.m, 1, 0) = m_;
  }

 private:
  T* out(void* data, int64_t size, int64_t slot) const {
    return static_cast<T*>(data) + (head_ * a_.out.slots + slot) * size;
  }
  const T* in(const void* data, int64_t size, int64_t slot) const {
    return static_cast<const T*>(data) + (head_ * a_.in.slots + slot) * size;
  }

  // Loads the state from this slot of the input, for the next token.
  void start(int64_t slot) {
    if (a_.in.C == nullptr) {
      std::fill(C_, C_ + a_.DK * a_.DV, T{0});
      std::fill(n_, n_ + a_.DK, T{0});
      from_C_ = C_;
      from_n_ = n_;
      m_ = 0;
      return;
    }
    from_C_ = in(a_.in.C, a_.DK * a_.DV, slot);
    from_n_ = in(a_.in.n, a_.DK, slot);
    m_ = *in(a_.in.m, 1, slot);
  }

  void keep() {
    if (from_C_ == C_) return;
    std::copy(from_C_, from_C_ + a_.DK * a_.DV, C_);
    std::copy(from_n_, from_n_ + a_.DK, n_);
  }

  // run() calls this function before the first token of each chunk, and after the last chunk.
  void chunk(int64_t index) {
    if (a_.given_states) start(index);
    if (a_.chunks_per_slot == 0 || index % a_.chunks_per_slot != 0) return;
    const int64_t slot = index / a_.chunks_per_slot;
    std::copy(from_C_, from_C_ + a_.DK * a_.DV, out(a_.out.C, a_.DK * a_.DV, slot));
    std::copy(from_n_, from_n_ + a_.DK, out(a_.out.n, a_.DK, slot));
    *out(a_.out.m, 1, slot) = m_;
  }

  int64_t offset(const MlstmInput& input, int64_t s) const {
    return b_ * input.stride_b + h_ * input.stride_h + s * input.stride_s;
  }

  void token(int64_t s) {
    T i, f;
    read(kernels_, a_.i, offset(a_.i, s), 1, &i);
    read(kernels_, a_.f, offset(a_.f, s), 1, &f);
    read(kernels_, a_.k, offset(a_.k, s), a_.DK, k_.data());
    read(kernels_, a_.v, offset(a_.v, s), a_.DV, v_.data());
    if (a_.q.data != nullptr) read(kernels_, a_.q, offset(a_.q, s), a_.DK, q_.data());

    const T decayed = log_sigmoid(f) + m_;
    const T m = std::max(decayed, i);
    const T forget = std::exp(decayed - m);
    const T input = std::exp(i - m);
    const T scale = 1 / std::sqrt(static_cast<T>(a_.DK));
    std::fill(y_.begin(), y_.end(), T{0});
    T denominator = 0;
    for (int64_t d = 0; d < a_.DK; ++d) {
      const T query = scale * q_[static_cast<size_t>(d)];
      const T key = input * k_[static_cast<size_t>(d)];
      step_row(mlstm_, from_C_ + d * a_.DV, C_ + d * a_.DV, v_.data(), y_.data(), forget, key, query, a_.DV);
      n_[d] = forget * from_n_[d] + key;
      denominator += query * n_[d];
    }
    from_C_ = C_;
    from_n_ = n_;
    m_ = m;
    if (a_.h == nullptr) return;
    const T norm = std::max(std::abs(denominator), std::exp(-m));
    const T total = norm + static_cast<T>(a_.eps);
    for (T& y : y_)
      y /= total;
    const int64_t row = head_ * a_.S + s;
    write(kernels_, y_.data(), row * a_.DV, a_.DV, a_.q.type, a_.h);
    if (a_.N != nullptr) static_cast<T*>(a_.N)[row] = norm;
    if (a_.M != nullptr) static_cast<T*>(a_.M)[row] = m;
  }

  const MlstmArguments& a_;
  const KernelSet& kernels_;
  const MlstmKernels& mlstm_;
  const int64_t chunk_size_;
  const int64_t b_, h_, head_;
  std::vector<T> q_, k_, v_, y_;
  T* C_ = nullptr;
  T* n_ = nullptr;
  const T* from_C_ = nullptr;
  const T* from_n_ = nullptr;
  T m_ = 0;
};

}  // namespace

void mlstm_sequential(const MlstmArguments& a, const MlstmPlan& plan, const Parallel& parallel) {
  parallel.run(a.B * a.H, 1, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) {
      if (a.wide) {
        Head<double>(a, plan, head / a.H, head % a.H).run();
      } else {
        Head<float>(a, plan, head / a.H, head % a.H).run();
      }
    }
  });
}

}  // namespace marlin::cpu
