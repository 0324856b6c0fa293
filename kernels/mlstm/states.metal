// Computes the state between chunks: C' = G C + sum_j A_j k_j v_j^T and n' = G n + sum_j A_j k_j over a chunk's tokens
// j, where G is kChunkDecay and A_j is kGateWeight (params.h). A simdgroup keeps 32 x 32 elements of C in registers
// through all chunks, so the kernel needs no threadgroup memory and no barrier.
#include "kernels/shared/kernel_list.h"

#include "kernels/mlstm/mlstm.h"

using namespace metal;
using namespace marlin;

namespace marlin {

// The elements of C and n that a lane owns.
struct StatePlace {
  uint row;     // the first of the lane's four rows
  uint column;  // the first of the lane's eight columns
  uint DK;
  uint DV;
  bool owns_n;  // true if this lane stores n
};

template <typename T>
struct LaneState {
  Fragment C[kFragments][kFragments];
  float n[kFragments];  // within a chunk, the lane's partial sum; between chunks, the total, in the first lane of a row

  MARLIN_INLINE void clear() thread {
    MARLIN_UNROLL for (uint r = 0; r < kFragments; ++r) {
      MARLIN_UNROLL for (uint c = 0; c < kFragments; ++c) {
        C[r][c] = make_filled_simdgroup_matrix<float, kBlock, kBlock>(0.0f);
      }
      n[r] = 0.0f;
    }
  }

  // Rows at DK and beyond are zero. A clamped row would read an element that another lane may be writing.
  MARLIN_INLINE void load(const device float* C_source, const device float* n_source, StatePlace place) thread {
    MARLIN_UNROLL for (uint r = 0; r < kFragments; ++r) {
      const uint row = place.row + r;
      const bool exists = row < place.DK;
      MARLIN_UNROLL for (uint part = 0; part < 2; ++part) {
        const float4 x =
            load4<Tail::zero>(C_source, row * place.DV, place.column + 4 * part, exists ? place.DV : 0, vector_columns);
        MARLIN_UNROLL for (uint i = 0; i < 4; ++i) C[r][2 * part + i / 2].thread_elements()[i % 2] = x[i];
      }
      n[r] = place.owns_n && exists ? n_source[row] : 0.0f;
    }
  }

  MARLIN_INLINE void store(device float* C_target, device float* n_target, StatePlace place) const thread {
    MARLIN_UNROLL for (uint r = 0; r < kFragments; ++r) {
      const uint row = place.row + r;
      if (row >= place.DK) continue;
      if (place.owns_n) n_target[row] = n[r];
      MARLIN_UNROLL for (uint part = 0; part < 2; ++part) {
        float4 x;
        MARLIN_UNROLL for (uint i = 0; i < 4; ++i) {
          Fragment whole = C[r][2 * part + i / 2];
          x[i] = whole.thread_elements()[i % 2];
        }
        store4(C_target, row * place.DV, place.column + 4 * part, place.DV, vector_columns, x);
      }
    }
  }

  MARLIN_INLINE void gather_n(bool owns_n) thread {
    MARLIN_UNROLL for (uint r = 0; r < kFragments; ++r) {
      const float whole = row_sum(n[r]);
      n[r] = owns_n ? whole : 0.0f;
    }
  }

  MARLIN_INLINE void scale(float factor) thread {
    MARLIN_UNROLL for (uint r = 0; r < kFragments; ++r) {
      MARLIN_UNROLL for (uint c = 0; c < kFragments; ++c) {
        MARLIN_UNROLL for (uint e = 0; e < 2; ++e) C[r][c].thread_elements()[e] *= factor;
      }
      n[r] *= factor;
    }
  }

  // Adds eight tokens, starting at `token`. With Tail::zero, tokens at `end` and beyond are zero.
  template <Tail tail>
  MARLIN_INLINE void add(const device T* k, uint k_stride, const device T* v, uint v_stride,
                         GateVectors<const device float*> gates, uint token, uint end, StatePlace place,
                         MlstmLane lane) thread {
    float keys[kFragments][2];
    MARLIN_UNROLL for (uint e = 0; e < 2; ++e) {
      const uint own = token + 2 * lane.pair + e;
      const bool exists = tail == Tail::clamp || own < end;
      vec<T, 4> x = vec<T, 4>(T(0.0f));
      float weight = 0.0f;
      if (exists) {
        weight = gates.at(kGateWeight, own);
        x = load4<Tail::clamp>(k, own * k_stride, place.row, place.DK, vector_activations);
      }
      MARLIN_UNROLL for (uint r = 0; r < kFragments; ++r) {
        keys[r][e] = float(x[r]) * weight;
        n[r] += keys[r][e];
      }
    }
    const uint own = token + lane.row;
    LaneColumns<T> values;
    values.template load<tail>(v, own * v_stride, place.column, place.DV, own < end, vector_activations);
    Fragment value[kFragments];
    MARLIN_UNROLL for (uint c = 0; c < kFragments; ++c) value[c] = values.operand(c);
    MARLIN_UNROLL for (uint r = 0; r < kFragments; ++r) {
      Fragment key;
      key.thread_elements()[0] = keys[r][0];
      key.thread_elements()[1] = keys[r][1];
      MARLIN_UNROLL for (uint c = 0; c < kFragments; ++c)
          simdgroup_multiply_accumulate(C[r][c], key, value[c], C[r][c]);
    }
  }
};

}  // namespace marlin

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kMlstmStateThreads)]] void mlstm_states(
    const device T* k [[buffer(kSlotK)]], const device T* v [[buffer(kSlotV)]],
    const device float* C0 [[buffer(kSlotC0)]], const device float* n0 [[buffer(kSlotN0)]],
    device float* states_C [[buffer(kSlotStatesC)]], device float* states_n [[buffer(kSlotStatesN)]],
    device float* final_C [[buffer(kSlotFinalC)]], device float* final_n [[buffer(kSlotFinalN)]],
    const device float* gates [[buffer(kSlotGates)]], const device float* chunks [[buffer(kSlotChunks)]],
    constant MlstmParams& params [[buffer(kSlotParams)]], uint3 block [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane_index [[thread_index_in_simdgroup]]) {
  const uint head = block.z;
  const uint row = block.y * kMlstmStateTile + simdgroup / 2 * kMlstmSimdColumns;
  const uint column = block.x * kMlstmStateTile + simdgroup % 2 * kMlstmSimdColumns;
  if (row >= params.DK || column >= params.DV) return;
  const MlstmLane lane = mlstm_lane(lane_index);
  const bool sums_n = column == 0;
  const StatePlace place = {row + 4 * lane.row, column + 8 * lane.pair, params.DK, params.DV, sums_n && lane.pair == 0};

  const ulong state_size = ulong(params.DK) * params.DV;
  final_C += head * params.final_slots * state_size;
  final_n += ulong(head) * params.final_slots * params.DK;
  LaneState<T> state;
  if (params.first_chunk != 0) {
    state.load(final_C, final_n, place);
  } else if ((params.flags & kMlstmInitialState) != 0) {
    state.load(C0 + head * state_size, n0 + ulong(head) * params.DK, place);
  } else {
    state.clear();
  }

  const device T* head_k = first_token(k, params.k, params, head);
  const device T* head_v = first_token(v, params.v, params, head);
  const uint k_stride = uint(params.k.token);
  const uint v_stride = uint(params.v.token);
  for (uint c = 0; c < params.segment_chunks; ++c) {
    if (c % params.save_every == 0) {
      const ulong slot = ulong(head) * params.state_slots + c / params.save_every;
      state.store(states_C + slot * state_size, states_n + slot * params.DK, place);
    }
    const uint chunk = params.first_chunk + c;
    const uint start = chunk * params.chunk_size;
    const uint length = min(params.chunk_size, params.S - start);
    const device T* chunk_k = head_k + int64_t(start) * params.k.token;
    const device T* chunk_v = head_v + int64_t(start) * params.v.token;
    const GateVectors<const device float*> chunk_gates = gate_vectors(gates, params, head, start);
    state.scale(chunks[chunk_index(params, kChunkDecay, head) + chunk]);
    uint token = 0;
    for (; token + kBlock <= length; token += kBlock) {
      state.template add<Tail::clamp>(chunk_k, k_stride, chunk_v, v_stride, chunk_gates, token, length, place, lane);
    }
    if (token < length) {
      state.template add<Tail::zero>(chunk_k, k_stride, chunk_v, v_stride, chunk_gates, token, length, place, lane);
    }
    if (sums_n) state.gather_n(place.owns_n);
  }
  state.store(final_C, final_n, place);
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_MLSTM_STATES(MARLIN_INSTANTIATE))
