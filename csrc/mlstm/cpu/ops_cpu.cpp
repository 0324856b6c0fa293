// The mLSTM operators for the CPU: checks the tensors, passes plain pointers to the kernels, and returns tensors.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <list>
#include <tuple>
#include <vector>

#include "csrc/cpu/parallel.h"
#include "csrc/mlstm/argument_rules.h"
#include "csrc/mlstm/cpu/api.h"

namespace marlin::cpu {
namespace {

// Owns the tensors of one call. Copies a tensor only if its last dimension is strided.
class Call {
 public:
  Call(const MlstmShape& shape, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f, int64_t chunk_size)
      : problem_(mlstm_problem(shape, chunk_size)), options_(k.options()) {
    a.B = problem_.B;
    a.H = problem_.H;
    a.S = problem_.S;
    a.DK = problem_.DK;
    a.DV = problem_.DV;
    a.wide = k.scalar_type() == at::kDouble;
    a.k = rows(k);
    a.v = rows(v);
    a.i = input(i);
    a.f = input(f);
  }

  void query(const Tensor& q, double eps) {
    a.q = rows(q);
    a.eps = eps;
    h = at::empty({a.B, a.H, a.S, a.DV}, options_);
    a.h = h.mutable_data_ptr();
  }

  void state_in(const OptionalTensor& C, const OptionalTensor& n, const OptionalTensor& m, int64_t slots) {
    if (!C) return;
    a.in = {store(C->contiguous()).const_data_ptr(), store(n->contiguous()).const_data_ptr(),
            store(m->contiguous()).const_data_ptr(), slots};
  }

  void state_out(at::IntArrayRef leading, int64_t slots) {
    const auto options = options_.dtype(a.wide ? at::kDouble : at::kFloat);
    std::vector<int64_t> sizes(leading.begin(), leading.end());
    m = at::empty(sizes, options);
    sizes.push_back(a.DK);
    n = at::empty(sizes, options);
    sizes.push_back(a.DV);
    C = at::empty(sizes, options);
    a.out = {C.mutable_data_ptr(), n.mutable_data_ptr(), m.mutable_data_ptr(), slots};
  }

  void run() const {
    if (a.B * a.H == 0) return;
    const Machine machine{capability().isa, false, at::get_num_threads()};
    const MlstmPlan plan = make_mlstm_plan(machine, problem_, a.wide);
    if (plan.form == MlstmForm::sequential) {
      mlstm_sequential(a, plan, at_parallel());
    } else {
      mlstm_chunkwise(a, plan, at_parallel());
    }
  }

  MlstmArguments a{};
  Tensor h, C, n, m;

 private:
  const Tensor& store(const Tensor& tensor) { return stored_.emplace_back(tensor); }

  // Converts i or f: [B, H, S] or, for one token, [B, H].
  MlstmInput input(const Tensor& tensor) {
    const Tensor& t = store(tensor);
    return {t.const_data_ptr(), element_type(t), t.stride(0), t.stride(1), t.dim() == 2 ? 0 : t.stride(2)};
  }

  // Converts q, k or v: [B, H, S, D] or, for one token, [B, H, D].
  MlstmInput rows(const Tensor& tensor) {
    const bool unit = tensor.stride(-1) == 1 || tensor.size(-1) == 1;
    const Tensor& t = store(unit ? tensor : tensor.contiguous());
    return {t.const_data_ptr(), element_type(t), t.stride(0), t.stride(1), t.dim() == 3 ? 0 : t.stride(2)};
  }

  MlstmProblem problem_;
  at::TensorOptions options_;
  std::list<Tensor> stored_;
};

ThreeTensors mlstm_states_cpu(const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                              const OptionalTensor& C0, const OptionalTensor& n0, const OptionalTensor& m0,
                              int64_t chunk_size, int64_t save_states_every) {
  Call call(check_mlstm_states(k, v, i, f, {C0, n0, m0}, chunk_size, save_states_every), k, v, i, f, chunk_size);
  const int64_t slots = call.a.S / chunk_size / save_states_every + 1;
  call.state_in(C0, n0, m0, 1);
  call.state_out({call.a.B, call.a.H, slots}, slots);
  call.a.chunks_per_slot = save_states_every;
  call.run();
  return {call.C, call.n, call.m};
}

ThreeTensors mlstm_output_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                              const Tensor& C, const Tensor& n, const Tensor& m, int64_t chunk_size, double eps) {
  Call call(check_mlstm_output(q, k, v, i, f, C, n, m, chunk_size, eps), k, v, i, f, chunk_size);
  call.query(q, eps);
  call.state_in(C, n, m, call.a.S / chunk_size + 1);
  call.a.given_states = true;
  const Tensor N = at::empty({call.a.B, call.a.H, call.a.S}, m.options());
  const Tensor M = at::empty_like(N);
  call.a.N = N.mutable_data_ptr();
  call.a.M = M.mutable_data_ptr();
  call.run();
  return {call.h, N, M};
}

FourTensors mlstm_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                      const OptionalTensor& C0, const OptionalTensor& n0, const OptionalTensor& m0, int64_t chunk_size,
                      double eps) {
  Call call(check_mlstm(q, k, v, i, f, {C0, n0, m0}, chunk_size, eps), k, v, i, f, chunk_size);
  call.query(q, eps);
  call.state_in(C0, n0, m0, 1);
  call.state_out({call.a.B, call.a.H}, 1);
  call.run();
  return {call.h, call.C, call.n, call.m};
}

FourTensors mlstm_step_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                           const Tensor& C, const Tensor& n, const Tensor& m, double eps) {
  Call call(check_mlstm_step(q, k, v, i, f, C, n, m, eps), k, v, i, f, 0);
  call.query(q, eps);
  call.state_in(C, n, m, 1);
  call.state_out({call.a.B, call.a.H}, 1);
  call.run();
  return {call.h.squeeze(2), call.C, call.n, call.m};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_marlin_metal, CPU, m) {
  m.impl("mlstm_states", mlstm_states_cpu);
  m.impl("mlstm_output", mlstm_output_cpu);
  m.impl("mlstm", mlstm_cpu);
  m.impl("mlstm_step", mlstm_step_cpu);
}

}  // namespace marlin::cpu
