// Computes one token. The kernel reads C once and writes C' = f C + i k v^T once. A lane owns four columns. The
// simdgroups of a threadgroup divide the rows and add their sums in threadgroup memory, in a fixed order.
#include "kernels/shared/kernel_list.h"

#include "kernels/mlstm/mlstm.h"

using namespace metal;
using namespace marlin;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kMlstmStepMaxSimdgroups* kSimdWidth)]] void mlstm_step(
    const device T* q [[buffer(kSlotQ)]], const device T* k [[buffer(kSlotK)]], const device T* v [[buffer(kSlotV)]],
    const device uchar* i [[buffer(kSlotI)]], const device uchar* f [[buffer(kSlotF)]],
    const device float* C0 [[buffer(kSlotC0)]], const device float* n0 [[buffer(kSlotN0)]],
    const device float* m0 [[buffer(kSlotM0)]], device T* h [[buffer(kSlotH)]],
    device float* final_C [[buffer(kSlotFinalC)]], device float* final_n [[buffer(kSlotFinalN)]],
    device float* final_m [[buffer(kSlotFinalM)]], constant MlstmParams& params [[buffer(kSlotParams)]],
    threadgroup float* shared [[threadgroup(0)]], uint2 block [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint head = block.y;
  const int64_t batch = head / params.heads_per_batch;
  const int64_t head_of_batch = head % params.heads_per_batch;
  const float forget =
      log_sigmoid(load_element(f, ulong(batch * params.f.batch + head_of_batch * params.f.head), params.gate_type));
  const float input = load_element(i, ulong(batch * params.i.batch + head_of_batch * params.i.head), params.gate_type);
  const float m_before = m0[head];
  const float m = max(forget + m_before, input);
  const float kept = exp(forget + m_before - m);
  const float added = exp(input - m);
  if (block.x == 0 && simdgroup == 0 && lane == 0) final_m[head] = m;

  const device T* query = first_token(q, params.q, params, head);
  const device T* key = first_token(k, params.k, params, head);
  const uint column = block.x * kMlstmStepColumns + lane * 4;
  const vec<T, 4> value_elements =
      load4<Tail::zero>(first_token(v, params.v, params, head), 0, column, params.DV, vector_activations);
  float4 value;
  MARLIN_UNROLL for (uint c = 0; c < 4; ++c) value[c] = added * float(value_elements[c]);

  const ulong rows = ulong(head) * params.DK;
  float4 numerator = float4(0.0f);
  for (uint row = simdgroup; row < params.DK; row += simdgroups) {
    const ulong first = (rows + row) * params.DV;
    float4 C = load4<Tail::zero>(C0 + first, 0, column, params.DV, vector_columns);
    C = fma(float4(float(key[row])), value, kept * C);
    numerator = fma(float4(params.scale * float(query[row])), C, numerator);
    store4(final_C + first, 0, column, params.DV, vector_columns, C);
  }
  float denominator = 0.0f;
  for (uint row = simdgroup * kSimdWidth + lane; row < params.DK; row += simdgroups * kSimdWidth) {
    const float n = kept * n0[rows + row] + added * float(key[row]);
    if (block.x == 0) final_n[rows + row] = n;
    denominator = fma(params.scale * float(query[row]), n, denominator);
  }
  denominator = simd_sum(denominator);

  threadgroup float* denominators = shared + simdgroups * kMlstmStepColumns;
  MARLIN_UNROLL for (uint c = 0; c < 4; ++c) shared[simdgroup * kMlstmStepColumns + lane * 4 + c] = numerator[c];
  if (lane == 0) denominators[simdgroup] = denominator;
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float size = 0.0f;
  for (uint s = 0; s < simdgroups; ++s)
    size += denominators[s];
  size = abs(size);
  const float floor_value = exp(-m);
  const float bounded = size <= floor_value ? floor_value : size;  // unlike max(), keeps NaN
  for (uint c = simdgroup * kSimdWidth + lane; c < kMlstmStepColumns; c += simdgroups * kSimdWidth) {
    const uint output = block.x * kMlstmStepColumns + c;
    if (output >= params.DV) continue;
    float sum = 0.0f;
    for (uint s = 0; s < simdgroups; ++s)
      sum += shared[s * kMlstmStepColumns + c];
    h[ulong(head) * params.DV + output] = T(sum / (bounded + params.eps));
  }
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_MLSTM_STEP(MARLIN_INSTANTIATE))
