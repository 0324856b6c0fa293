#include "csrc/mlstm/argument_rules.h"

#include <algorithm>

namespace marlin {

namespace {

using Sizes = std::vector<c10::SymInt>;

bool is_input_dtype(const Tensor& tensor) {
  return is_floating(tensor.scalar_type()) || tensor.scalar_type() == at::kDouble;
}

const std::string kInputs = "float16, bfloat16, float32 or float64";

struct TokenChecker : Checker {
  const Tensor& first;  // the first argument; all later arguments must have its dtype and device

  TokenChecker(const char* op, const Tensor& first) : Checker{op, first.device()}, first(first) {}

  void tensor(const char* argument, const Tensor& tensor, bool dtype_ok, const std::string& dtypes,
              const std::string& names, const Sizes& sizes) const {
    const auto found = tensor.sym_sizes();
    if (!dtype_ok || !std::equal(found.begin(), found.end(), sizes.begin(), sizes.end())) {
      fail(op, argument, text(dtypes, " ", names, " = ", c10::SymIntArrayRef(sizes)), describe(tensor));
    }
    on_device(argument, tensor);
  }

  void like_first(const char* argument, const Tensor& tensor, const std::string& names, const Sizes& sizes) const {
    this->tensor(argument, tensor, tensor.scalar_type() == first.scalar_type(), dtype_name(first.scalar_type()), names,
                 sizes);
  }

  void gates(const Tensor& i, const Tensor& f, const std::string& names, const Sizes& sizes) const {
    const bool wide = first.scalar_type() == at::kDouble;
    const bool dtype_ok = is_input_dtype(i) && (i.scalar_type() == at::kDouble) == wide;
    tensor("i", i, dtype_ok, std::string(wide ? "float64" : kFloating), names, sizes);
    tensor("f", f, f.scalar_type() == i.scalar_type(), dtype_name(i.scalar_type()) + " (the dtype of i)", names, sizes);
  }

  void state(const char* argument, const Tensor& tensor, const std::string& names, const Sizes& sizes) const {
    const at::ScalarType dtype = mlstm_state_dtype(first);
    this->tensor(argument, tensor, tensor.scalar_type() == dtype, dtype_name(dtype), names, sizes);
  }

  void initial(const MlstmInitial& initial, const MlstmShape& s) const {
    const bool whole =
        initial.C0.has_value() == initial.n0.has_value() && initial.n0.has_value() == initial.m0.has_value();
    if (!whole) {
      auto given = [](const char* name, const OptionalTensor& tensor) {
        return tensor ? std::string(" ") + name : std::string();
      };
      fail(op, "C0, n0, m0", "all three or none",
           "only" + given("C0", initial.C0) + given("n0", initial.n0) + given("m0", initial.m0));
    }
    if (!initial.C0) return;
    state("C0", *initial.C0, "[B, H, DK, DV]", {s.B, s.H, s.DK, s.DV});
    state("n0", *initial.n0, "[B, H, DK]", {s.B, s.H, s.DK});
    state("m0", *initial.m0, "[B, H]", {s.B, s.H});
  }

  // Checks k, v, i and f of a sequence, and returns the sequence's sizes. `first` is q, or k if there is no q.
  MlstmShape sequence(const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f) const {
    const char* name = &first == &k ? "k" : "q";
    if (!is_input_dtype(first) || first.dim() != 4 || first.sym_size(3) < 1) {
      fail(op, name, kInputs + " [B, H, S, DK] with DK >= 1", describe(first));
    }
    if (v.dim() != 4 || v.sym_size(3) < 1) fail(op, "v", "[B, H, S, DV] with DV >= 1", describe(v));
    MlstmShape s{first.sym_size(0), first.sym_size(1), first.sym_size(2), first.sym_size(3), v.sym_size(3)};
    like_first("k", k, "[B, H, S, DK]", {s.B, s.H, s.S, s.DK});
    like_first("v", v, "[B, H, S, DV]", {s.B, s.H, s.S, s.DV});
    gates(i, f, "[B, H, S]", {s.B, s.H, s.S});
    return s;
  }

  void chunk_size(int64_t chunk_size, bool zero_allowed) const {
    if (zero_allowed && chunk_size == 0) return;
    if (std::find(kMlstmChunkSizes.begin(), kMlstmChunkSizes.end(), chunk_size) != kMlstmChunkSizes.end()) return;
    std::string known;
    for (int64_t size : kMlstmChunkSizes)
      known += (known.empty() ? "" : ", ") + std::to_string(size);
    fail(op, "chunk_size", "one of " + known + (zero_allowed ? ", or 0 for the planner's choice" : ""),
         std::to_string(chunk_size));
  }

  [[noreturn]] void wrong_length(const Tensor& k, const std::string& span) const {
    fail(op, "k", "[B, H, S, DK] with S a multiple of " + span + " (use mlstm for other lengths)", describe(k));
  }

  void whole_chunks(const Tensor& k, const c10::SymInt& S, int64_t chunk_size) const {
    if (S % chunk_size != 0) wrong_length(k, "chunk_size = " + std::to_string(chunk_size));
  }

  void eps(double eps) const {
    if (!(eps >= 0.0)) fail(op, "eps", "a number >= 0", std::to_string(eps));
  }
};

}  // namespace

at::ScalarType mlstm_state_dtype(const Tensor& k) {
  return k.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

MlstmProblem mlstm_problem(const MlstmShape& shape, int64_t chunk_size) {
  return {shape.B.expect_int(),  shape.H.expect_int(),  shape.S.expect_int(),
          shape.DK.expect_int(), shape.DV.expect_int(), chunk_size};
}

MlstmShape check_mlstm(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                       const MlstmInitial& initial, int64_t chunk_size, double eps) {
  const TokenChecker check{"mlstm", q};
  MlstmShape shape = check.sequence(k, v, i, f);
  check.initial(initial, shape);
  check.chunk_size(chunk_size, true);
  check.eps(eps);
  return shape;
}

MlstmShape check_mlstm_states(const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                              const MlstmInitial& initial, int64_t chunk_size, int64_t save_states_every) {
  const TokenChecker check{"mlstm_states", k};
  MlstmShape shape = check.sequence(k, v, i, f);
  check.initial(initial, shape);
  check.chunk_size(chunk_size, false);
  if (save_states_every < 1) fail(check.op, "save_states_every", "at least 1", std::to_string(save_states_every));
  check.whole_chunks(k, shape.S, chunk_size);
  // chunk_size * save_states_every may overflow, so this code divides the number of chunks instead.
  if (save_states_every != 1 && shape.S / chunk_size % save_states_every != 0) {
    check.wrong_length(k, "chunk_size * save_states_every = " + std::to_string(chunk_size) + " * " +
                              std::to_string(save_states_every));
  }
  return shape;
}

MlstmShape check_mlstm_output(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                              const Tensor& C, const Tensor& n, const Tensor& m, int64_t chunk_size, double eps) {
  const TokenChecker check{"mlstm_output", q};
  MlstmShape s = check.sequence(k, v, i, f);
  check.chunk_size(chunk_size, false);
  check.whole_chunks(k, s.S, chunk_size);
  const c10::SymInt slots = s.S / chunk_size + 1;
  check.state("C", C, "[B, H, S / chunk_size + 1, DK, DV]", {s.B, s.H, slots, s.DK, s.DV});
  check.state("n", n, "[B, H, S / chunk_size + 1, DK]", {s.B, s.H, slots, s.DK});
  check.state("m", m, "[B, H, S / chunk_size + 1]", {s.B, s.H, slots});
  check.eps(eps);
  return s;
}

MlstmShape check_mlstm_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                            const Tensor& C, const Tensor& n, const Tensor& m, double eps) {
  const TokenChecker check{"mlstm_step", q};
  if (!is_input_dtype(q) || q.dim() != 3 || q.sym_size(2) < 1) {
    fail(check.op, "q", kInputs + " [B, H, DK] with DK >= 1", describe(q));
  }
  if (v.dim() != 3 || v.sym_size(2) < 1) fail(check.op, "v", "[B, H, DV] with DV >= 1", describe(v));
  MlstmShape s{q.sym_size(0), q.sym_size(1), 1, q.sym_size(2), v.sym_size(2)};
  check.like_first("k", k, "[B, H, DK]", {s.B, s.H, s.DK});
  check.like_first("v", v, "[B, H, DV]", {s.B, s.H, s.DV});
  check.gates(i, f, "[B, H]", {s.B, s.H});
  check.state("C", C, "[B, H, DK, DV]", {s.B, s.H, s.DK, s.DV});
  check.state("n", n, "[B, H, DK]", {s.B, s.H, s.DK});
  check.state("m", m, "[B, H]", {s.B, s.H});
  check.eps(eps);
  return s;
}

}  // namespace marlin
