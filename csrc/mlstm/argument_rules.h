// The shape and dtype rules of the mLSTM operators. All backends and the fake kernels share these rules.
// csrc/core/tensor_checks.h defines the format of the errors.
#pragma once

#include "csrc/core/tensor_checks.h"
#include "csrc/mlstm/problem.h"

namespace marlin {

using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// The sizes of one call. S is 1 for mlstm_step.
struct MlstmShape {
  c10::SymInt B;
  c10::SymInt H;
  c10::SymInt S;
  c10::SymInt DK;
  c10::SymInt DV;
};

// The initial state: either all three tensors or none. Without tensors, the initial state is zero.
struct MlstmInitial {
  const OptionalTensor& C0;
  const OptionalTensor& n0;
  const OptionalTensor& m0;
};

// Returns the dtype of C, n and m: float32, or float64 if the inputs are float64 (on the CPU only).
at::ScalarType mlstm_state_dtype(const Tensor& k);

MlstmProblem mlstm_problem(const MlstmShape& shape, int64_t chunk_size);

MlstmShape check_mlstm(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                       const MlstmInitial& initial, int64_t chunk_size, double eps);
// mlstm_states returns S / chunk_size / save_states_every + 1 states per head.
MlstmShape check_mlstm_states(const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                              const MlstmInitial& initial, int64_t chunk_size, int64_t save_states_every);
MlstmShape check_mlstm_output(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                              const Tensor& C, const Tensor& n, const Tensor& m, int64_t chunk_size, double eps);
MlstmShape check_mlstm_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                            const Tensor& C, const Tensor& n, const Tensor& m, double eps);

}  // namespace marlin
