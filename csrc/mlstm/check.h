// Shape and dtype rules of the mLSTM operators, shared by all backends and by the fake kernels. Errors have the form
// of check.h.
#pragma once

#include "check.h"
#include "mlstm_plan.h"

namespace marlin {

// Of mlstm_step S is 1.
struct MlstmShape {
  c10::SymInt B;
  c10::SymInt H;
  c10::SymInt S;
  c10::SymInt DK;
  c10::SymInt DV;
};

// All three or none; absent ones are zero.
struct MlstmInitial {
  const OptionalTensor& C0;
  const OptionalTensor& n0;
  const OptionalTensor& m0;
};

// Of C, n and m: float32 whatever the inputs, float64 (on the CPU) where they are.
at::ScalarType mlstm_state_dtype(const Tensor& k);

MlstmProblem mlstm_problem(const MlstmShape& shape, int64_t chunk_size);

MlstmShape check_mlstm(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                       const MlstmInitial& initial, int64_t chunk_size, double eps);
// The slots of the result are shape.S / (chunk_size * save_states_every) + 1.
MlstmShape check_mlstm_states(const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                              const MlstmInitial& initial, int64_t chunk_size, int64_t save_states_every);
MlstmShape check_mlstm_output(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                              const Tensor& C, const Tensor& n, const Tensor& m, int64_t chunk_size, double eps);
MlstmShape check_mlstm_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& i, const Tensor& f,
                            const Tensor& C, const Tensor& n, const Tensor& m, double eps);

}  // namespace marlin
