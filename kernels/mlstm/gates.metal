// Computes all values that depend only on the gates, so that other kernels need no maximum and no logarithm.
//
// The stabiliser after a token is m' = max(lf + m, i), where m is the stabiliser before the token and lf = log
// sigmoid(f). Two numbers describe a run of tokens: its decay, which is the sum of lf, and its peak, which is the
// stabiliser after the run if no token precedes it. Such pairs combine associatively, so one simdgroup scans a block of
// 32 tokens. A threadgroup computes one head, and its simdgroups share the head's chunks. The stabilisers between
// chunks are then computed one after the other. They use the same sums as the exponents, so the factor of the state is
// exactly 1 if a chunk adds nothing to it.
//
// No decay is the difference of two sums, so decays of any size keep their precision. A forget gate of minus infinity
// resets the state.
#include "kernels/shared/kernel_list.h"

#include "kernels/mlstm/mlstm.h"

using namespace metal;
using namespace marlin;

namespace marlin {

struct GateScan {
  float decay;
  float peak;
};

MARLIN_INLINE GateScan no_tokens() {
  return {0.0f, -INFINITY};
}

MARLIN_INLINE GateScan join(GateScan first, GateScan second) {
  return {first.decay + second.decay, max(first.peak + second.decay, second.peak)};
}

MARLIN_INLINE GateScan inclusive_scan(GateScan x, uint lane) {
  MARLIN_UNROLL for (ushort step = 1; step < kMlstmBlock; step *= 2) {
    const GateScan before = {simd_shuffle_up(x.decay, step), simd_shuffle_up(x.peak, step)};
    if (lane >= step) x = join(before, x);
  }
  return x;
}

// Returns the sum of x over the lanes after this one.
MARLIN_INLINE float exclusive_suffix_sum(float x, uint lane) {
  float sum = simd_shuffle_down(x, ushort(1));
  if (lane + 1 >= kMlstmBlock) sum = 0.0f;
  MARLIN_UNROLL for (ushort step = 1; step < kMlstmBlock; step *= 2) {
    const float after = simd_shuffle_down(sum, step);
    if (lane + step < kMlstmBlock) sum += after;
  }
  return sum;
}

struct HeadGates {
  const device uchar* i;
  const device uchar* f;
  int64_t i_first;
  int64_t f_first;
  int64_t i_stride;
  int64_t f_stride;
  int type;

  // Returns the decay and the peak of a single token: its log decay and its input gate.
  MARLIN_INLINE GateScan load(uint token) const thread {
    const float forget = load_element(f, ulong(f_first + int64_t(token) * f_stride), type);
    return {log_sigmoid(forget), load_element(i, ulong(i_first + int64_t(token) * i_stride), type)};
  }

  MARLIN_INLINE GateScan load_lane(uint token, uint end) const thread {
    return token < end ? load(token) : no_tokens();
  }
};

MARLIN_INLINE HeadGates head_gates(const device uchar* i, const device uchar* f, constant MlstmParams& params,
                                   uint head) {
  const int64_t batch = head / params.heads_per_batch;
  const int64_t head_of_batch = head % params.heads_per_batch;
  return {i,
          f,
          batch * params.i.batch + head_of_batch * params.i.head,
          batch * params.f.batch + head_of_batch * params.f.head,
          params.i.token,
          params.f.token,
          params.gate_type};
}

// Writes the vectors of a chunk that mlstm_output reads. `m` is the stabiliser before the chunk.
MARLIN_INLINE void write_output_gates(HeadGates inputs, GateVectors<device float*> gates, device float* out_m,
                                      constant MlstmParams& params, uint head, uint start, uint end, float m,
                                      uint lane) {
  GateScan chunk = no_tokens();
  for (uint first = start; first < end; first += kMlstmBlock) {
    const uint token = first + lane;
    const GateScan own = inputs.load_lane(token, end);
    const GateScan block = inclusive_scan(own, lane);
    const GateScan whole = join(chunk, block);
    if (token < end) {
      const float m_token = max(whole.decay + m, whole.peak);
      gates.data[gates.index(kGateForget, token)] = own.decay;
      gates.data[gates.index(kGateInput, token)] = own.peak;
      gates.data[gates.index(kGatePrefix, token)] = block.decay;
      gates.data[gates.index(kGateCarry, token)] = exp(whole.decay + m - m_token);
      out_m[ulong(head) * params.S + token] = m_token;
    }
    chunk = GateScan{simd_broadcast(whole.decay, kMlstmBlock - 1), simd_broadcast(whole.peak, kMlstmBlock - 1)};
  }
}

// Writes the weights of a chunk's tokens in the state after the chunk. `m` is the stabiliser of that state.
MARLIN_INLINE void write_suffix_gates(HeadGates inputs, GateVectors<device float*> gates, uint start, uint end, float m,
                                      uint lane) {
  float later = 0.0f;
  for (uint block = ceil_divide(end - start, kMlstmBlock); block > 0; --block) {
    const uint token = start + (block - 1) * kMlstmBlock + lane;
    const GateScan own = inputs.load_lane(token, end);
    const float suffix = exclusive_suffix_sum(own.decay, lane);
    if (token < end) {
      gates.data[gates.index(kGateSuffix, token)] = suffix + own.peak;
      gates.data[gates.index(kGateWeight, token)] = exp((suffix + later) + own.peak - m);
    }
    later += simd_broadcast(suffix + own.decay, 0);
  }
}

// Writes the stabiliser before each chunk, and the factor by which each chunk decays the state.
MARLIN_INLINE void scan_chunks(device float* decays, const device float* peaks, device float* states_m,
                               device float* final_m, constant MlstmParams& params, uint head, float m, uint lane) {
  device float* before = states_m + ulong(head) * (params.chunks + 1);
  for (uint first = 0; first < params.chunks; first += kSimdWidth) {
    const uint chunk = first + lane;
    const bool is_chunk = chunk < params.chunks;
    const float decay = is_chunk ? decays[chunk] : no_tokens().decay;
    const float peak = is_chunk ? peaks[chunk] : no_tokens().peak;
    float m_before = m;
    float m_after = m;
    for (ushort l = 0; l < kSimdWidth; ++l) {
      if (lane == l) m_before = m;
      m = max(simd_broadcast(decay, l) + m, simd_broadcast(peak, l));
      if (lane == l) m_after = m;
    }
    if (is_chunk) {
      before[chunk] = m_before;
      decays[chunk] = exp(decay + m_before - m_after);
    }
  }
  if (lane == 0) {
    before[params.chunks] = m;
    final_m[ulong(head) * params.final_slots] = m;
  }
}

}  // namespace marlin

[[kernel, max_total_threads_per_threadgroup(kMlstmGateSimdgroups* kSimdWidth)]] void mlstm_gates(
    const device uchar* i [[buffer(kSlotI)]], const device uchar* f [[buffer(kSlotF)]],
    const device float* m0 [[buffer(kSlotM0)]], device float* out_m [[buffer(kSlotOutM)]],
    device float* states_m [[buffer(kSlotStatesM)]], device float* final_m [[buffer(kSlotFinalM)]],
    device float* gates [[buffer(kSlotGates)]], device float* chunks [[buffer(kSlotChunks)]],
    constant MlstmParams& params [[buffer(kSlotParams)]], uint2 block [[threadgroup_position_in_grid]],
    uint2 blocks [[threadgroups_per_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint head = block.y;
  const HeadGates inputs = head_gates(i, f, params, head);
  if ((params.flags & kMlstmGivenM) == 0) {
    device float* decays = chunks + chunk_index(params, kChunkDecay, head);
    device float* peaks = chunks + chunk_index(params, kChunkPeak, head);
    for (uint chunk = simdgroup; chunk < params.chunks; chunk += simdgroups) {
      const uint start = chunk * params.chunk_size;
      const uint end = min(start + params.chunk_size, params.S);
      GateScan scan = no_tokens();
      for (uint first = start; first < end; first += kMlstmBlock) {
        scan = join(scan, inclusive_scan(inputs.load_lane(first + lane, end), lane));
        scan = GateScan{simd_broadcast(scan.decay, kMlstmBlock - 1), simd_broadcast(scan.peak, kMlstmBlock - 1)};
      }
      if (lane == 0) {
        decays[chunk] = scan.decay;
        peaks[chunk] = scan.peak;
      }
    }
    threadgroup_barrier(mem_flags::mem_device);
    if (simdgroup == 0) {
      const float m = (params.flags & kMlstmInitialState) != 0 ? m0[head] : 0.0f;
      scan_chunks(decays, peaks, states_m, final_m, params, head, m, lane);
    }
    threadgroup_barrier(mem_flags::mem_device);
  }

  const GateVectors<device float*> vectors = gate_vectors(gates, params, head, 0);
  const device float* m = states_m + ulong(head) * (params.chunks + 1);
  for (uint chunk = block.x * simdgroups + simdgroup; chunk < params.chunks; chunk += blocks.x * simdgroups) {
    const uint start = chunk * params.chunk_size;
    const uint end = min(start + params.chunk_size, params.S);
    if ((params.flags & kMlstmForOutput) != 0) {
      write_output_gates(inputs, vectors, out_m, params, head, start, end, m[chunk], lane);
    }
    write_suffix_gates(inputs, vectors, start, end, m[chunk + 1], lane);
  }
}
