// Computes h inside chunks. A threadgroup computes 32 queries of a chunk and up to 256 columns, 32 per simdgroup:
//   num_j = s E_j (q_j C) + sum over l <= j of S_jl v_l, where S_jl = s (q_j . k_l) exp(D_jl - m_j)
//   den_j = s E_j (q_j . n) + sum over l <= j of S_jl
//   h_j = num_j / (max(|den_j|, exp(-m_j)) + eps)
// C and n are the state before the chunk, s is params.scale, and E_j is kGateCarry. D_jl is the decay from token l to
// token j, plus i_l.
//
// The simdgroups of a threadgroup first compute all scores S_jl together, and then the sums. Scores pass through
// threadgroup memory in the layout of the fragments, so that a lane loads its fragment's elements. mlstm_gates has
// computed the stabilisers m_j, so all products are added to the same accumulators, and none is rescaled.
#include "kernels/shared/kernel_list.h"

#include "kernels/mlstm/mlstm.h"

using namespace metal;
using namespace marlin;

namespace marlin {

enum {
  kScorePairs = kFragments * kFragments / 2,     // pairs of adjacent score fragments; a simdgroup computes one pair at
                                                 // a time
  kBlockScores = kMlstmBlock * kMlstmBlock / 2,  // number of float2 in a block of keys
};

// A lane holds eight of every 32 k of its query: column 2 pair + e of fragment j is k = 8 pair + 4 e + j. In fragment j
// of the keys, row v is k = 4 v + j.
template <typename T>
struct QueryRow {
  vec<T, 4> x[2];

  template <Tail tail>
  MARLIN_INLINE void load(const device T* q, uint row, uint k, uint DK) thread {
    MARLIN_UNROLL for (uint e = 0; e < 2; ++e) x[e] = load4<tail>(q, row, k + 4 * e, DK, vector_activations);
  }
  MARLIN_INLINE Fragment operand(uint j) const thread {
    Fragment matrix;
    matrix.thread_elements()[0] = float(x[0][j]);
    matrix.thread_elements()[1] = float(x[1][j]);
    return matrix;
  }
};

typedef GateVectors<const device float*> ChunkGates;

// The 32 queries of a threadgroup. The first `count` exist. Tokens are counted from the chunk's start.
struct Queries {
  uint first;
  uint count;

  MARLIN_INLINE bool has(uint row) const thread { return row < count; }
  // Returns the token of a row. For a row that does not exist, returns the last token; the result is not stored.
  MARLIN_INLINE uint token(uint row) const thread { return first + min(row, count - 1); }
};

// The position of a pair of score fragments in a block. The rows of the pair are those of the fragment that contains
// query_row. Its columns begin at first_column.
struct PairPlace {
  uint query_row;  // the lane's row in the block
  uint first_column;
  MlstmLane lane;

  MARLIN_INLINE uint column(uint b, uint e) const thread { return first_column + b * kBlock + 2 * lane.pair + e; }
};

// The scores of eight queries and sixteen keys.
template <typename T>
struct ScorePair {
  Fragment sum[2];

  template <Tail tail>
  MARLIN_INLINE void add_step(const device T* q, uint q_row, const device T* k, thread const uint (&k_rows)[2][2],
                              uint first, uint DK, MlstmLane lane) thread {
    QueryRow<T> query;
    query.template load<tail>(q, q_row, first + 8 * lane.pair, DK);
    vec<T, 4> keys[2][2];
    MARLIN_UNROLL for (uint b = 0; b < 2; ++b) {
      MARLIN_UNROLL for (uint e = 0; e < 2; ++e) {
        keys[b][e] = load4<tail>(k, k_rows[b][e], first + 4 * lane.row, DK, vector_activations);
      }
    }
    MARLIN_UNROLL for (uint j = 0; j < 4; ++j) {
      const Fragment a = query.operand(j);
      MARLIN_UNROLL for (uint b = 0; b < 2; ++b) {
        Fragment key;
        key.thread_elements()[0] = float(keys[b][0][j]);
        key.thread_elements()[1] = float(keys[b][1][j]);
        simdgroup_multiply_accumulate(sum[b], a, key, sum[b]);
      }
    }
  }

  // Computes q . k. Keys at key_count and beyond do not exist. The function reads other keys in their place, and the
  // resulting scores are not used.
  MARLIN_INLINE void multiply(const device T* q, uint q_stride, const device T* k, uint k_stride, uint DK,
                              Queries queries, PairPlace place, uint first_key, uint key_count) thread {
    uint k_rows[2][2];
    MARLIN_UNROLL for (uint b = 0; b < 2; ++b) {
      sum[b] = make_filled_simdgroup_matrix<float, kBlock, kBlock>(0.0f);
      MARLIN_UNROLL for (uint e = 0; e < 2; ++e) {
        k_rows[b][e] = (first_key + min(place.column(b, e), key_count - 1)) * k_stride;
      }
    }
    const uint q_row = queries.token(place.query_row) * q_stride;
    uint first = 0;
    for (; first + kMlstmBlock <= DK; first += kMlstmBlock) {
      add_step<Tail::clamp>(q, q_row, k, k_rows, first, DK, place.lane);
    }
    if (first < DK) add_step<Tail::zero>(q, q_row, k, k_rows, first, DK, place.lane);
  }

  // Multiplies the scores of keys in the queries' own block by their weights. The decay from key to query is summed
  // token by token. own_forget is the log decay of token number `lane` in the block.
  MARLIN_INLINE void weigh_own_block(ChunkGates gates, const device float* m, Queries queries, PairPlace place,
                                     float own_forget, float scale) thread {
    float decay[2][2] = {};
    const uint end = place.query_row - place.lane.row + kBlock;
    for (uint token = place.first_column + 1; token < end; ++token) {
      const float forget = simd_broadcast(own_forget, ushort(token));
      const float passed = token <= place.query_row ? forget : 0.0f;
      MARLIN_UNROLL for (uint b = 0; b < 2; ++b) {
        MARLIN_UNROLL for (uint e = 0; e < 2; ++e) decay[b][e] += token > place.column(b, e) ? passed : 0.0f;
      }
    }
    const float m_query = m[queries.token(place.query_row)];
    MARLIN_UNROLL for (uint b = 0; b < 2; ++b) {
      MARLIN_UNROLL for (uint e = 0; e < 2; ++e) {
        const float input = gates.at(kGateInput, queries.token(place.column(b, e)));
        const float weight = scale * exp((decay[b][e] + input) - m_query);
        const float score = sum[b].thread_elements()[e] * weight;
        sum[b].thread_elements()[e] = place.column(b, e) <= place.query_row ? score : 0.0f;
      }
    }
  }

  // Multiplies the scores of keys in an earlier block by their weights. The decay from key to query is the sum of three
  // decays: from the key to the end of its block, through the blocks between, and from the start of the query's block
  // to the query.
  MARLIN_INLINE void weigh_earlier_block(ChunkGates gates, const device float* m, Queries queries, PairPlace place,
                                         uint first_key, float scale) thread {
    const uint query = queries.token(place.query_row);
    const float m_query = m[query];
    float between = 0.0f;
    for (uint end = first_key + 2 * kMlstmBlock; end <= queries.first; end += kMlstmBlock)
      between += gates.at(kGatePrefix, end - 1);
    const float since = gates.at(kGatePrefix, query) + between;
    MARLIN_UNROLL for (uint b = 0; b < 2; ++b) {
      MARLIN_UNROLL for (uint e = 0; e < 2; ++e) {
        const float weight = scale * exp((since + gates.at(kGateSuffix, first_key + place.column(b, e))) - m_query);
        sum[b].thread_elements()[e] *= weight;
      }
    }
  }

  MARLIN_INLINE void store(threadgroup float2* scores, uint lane_index) const thread {
    MARLIN_UNROLL for (uint b = 0; b < 2; ++b) {
      Fragment whole = sum[b];
      scores[b * kSimdWidth + lane_index] = float2(whole.thread_elements()[0], whole.thread_elements()[1]);
    }
  }
};

// The numerators of 32 queries x 32 columns, and the lane's partial sums of the scores.
template <typename T>
struct OutputSums {
  Fragment numerator[kFragments][kFragments];
  float score_sum[kFragments];

  MARLIN_INLINE void clear() thread {
    MARLIN_UNROLL for (uint r = 0; r < kFragments; ++r) {
      MARLIN_UNROLL for (uint c = 0; c < kFragments; ++c) {
        numerator[r][c] = make_filled_simdgroup_matrix<float, kBlock, kBlock>(0.0f);
      }
      score_sum[r] = 0.0f;
    }
  }

  // Adds the products of sixteen k. A lane holds four of them: column 2 pair + e of fragment j is k = 4 pair + 2 j + e.
  template <Tail tail>
  MARLIN_INLINE void add_state_step(const device T* q, thread const uint (&q_rows)[kFragments], const device float* C,
                                    uint first, uint column, uint DK, uint DV, MlstmLane lane) thread {
    vec<T, 4> query[kFragments];
    MARLIN_UNROLL for (uint r = 0; r < kFragments; ++r) {
      query[r] = load4<tail>(q, q_rows[r], first + 4 * lane.pair, DK, vector_activations);
    }
    MARLIN_UNROLL for (uint j = 0; j < 2; ++j) {
      const uint row = first + 4 * (lane.row / 2) + 2 * j + lane.row % 2;
      LaneColumns<float> columns;
      columns.template load<tail>(C, row * DV, column, DV, row < DK, vector_columns);
      Fragment state[kFragments];
      MARLIN_UNROLL for (uint c = 0; c < kFragments; ++c) state[c] = columns.operand(c);
      MARLIN_UNROLL for (uint r = 0; r < kFragments; ++r) {
        Fragment a;
        a.thread_elements()[0] = float(query[r][2 * j]);
        a.thread_elements()[1] = float(query[r][2 * j + 1]);
        MARLIN_UNROLL for (uint c = 0; c < kFragments; ++c) {
          simdgroup_multiply_accumulate(numerator[r][c], a, state[c], numerator[r][c]);
        }
      }
    }
  }

  // Adds the contribution of the state before the chunk.
  MARLIN_INLINE void add_state(const device T* q, uint q_stride, const device float* C, uint DK, uint DV, float scale,
                               ChunkGates gates, Queries queries, uint column, MlstmLane lane) thread {
    uint q_rows[kFragments];
    MARLIN_UNROLL for (uint r = 0; r < kFragments; ++r) q_rows[r] = queries.token(r * kBlock + lane.row) * q_stride;
    uint first = 0;
    for (; first + 2 * kBlock <= DK; first += 2 * kBlock) {
      add_state_step<Tail::clamp>(q, q_rows, C, first, column, DK, DV, lane);
    }
    if (first < DK) add_state_step<Tail::zero>(q, q_rows, C, first, column, DK, DV, lane);
    MARLIN_UNROLL for (uint r = 0; r < kFragments; ++r) {
      const float factor = scale * gates.at(kGateCarry, queries.token(r * kBlock + lane.row));
      MARLIN_UNROLL for (uint c = 0; c < kFragments; ++c) {
        MARLIN_UNROLL for (uint e = 0; e < 2; ++e) numerator[r][c].thread_elements()[e] *= factor;
      }
    }
  }

  // Adds one block of keys. If is_own is true, the block's tokens are those of the queries. In such a block, fragments
  // above the diagonal were not computed, and keys at key_count and beyond do not exist. A query has the score 0 for
  // later keys, and 0 times a non-finite value of v would be NaN. So non-finite values of v in this block are skipped.
  // Returns false if there were any.
  template <bool is_own>
  MARLIN_INLINE bool add_block(const device T* v, uint v_stride, const threadgroup float2* scores, uint first_key,
                               uint key_count, uint column, uint DV, MlstmLane lane, uint lane_index) thread {
    bool was_finite = true;
    MARLIN_UNROLL for (uint b = 0; b < kFragments; ++b) {
      const uint key = b * kBlock + lane.row;
      LaneColumns<T> columns;
      columns.template load<is_own ? Tail::zero : Tail::clamp>(v, (first_key + key) * v_stride, column, DV,
                                                               key < key_count, vector_activations);
      if (is_own) was_finite = columns.clear_not_finite() && was_finite;
      Fragment value[kFragments];
      MARLIN_UNROLL for (uint c = 0; c < kFragments; ++c) value[c] = columns.operand(c);
      MARLIN_UNROLL for (uint r = 0; r < kFragments; ++r) {
        if (is_own && r < b) continue;
        const float2 score = scores[(r * kFragments + b) * kSimdWidth + lane_index];
        Fragment a;
        a.thread_elements()[0] = score.x;
        a.thread_elements()[1] = score.y;
        score_sum[r] += score.x + score.y;
        MARLIN_UNROLL for (uint c = 0; c < kFragments; ++c) {
          simdgroup_multiply_accumulate(numerator[r][c], a, value[c], numerator[r][c]);
        }
      }
    }
    return was_finite;
  }

  // Adds the non-finite values that add_block skipped.
  MARLIN_INLINE void add_not_finite(const device T* v, uint v_stride, const threadgroup float2* scores, uint first_key,
                                    uint key_count, uint column, uint DV, MlstmLane lane) thread {
    for (uint key = 0; key < key_count; ++key) {
      LaneColumns<T> values;
      values.template load<Tail::clamp>(v, (first_key + key) * v_stride, column, DV, true, vector_activations);
      const uint place = key / kBlock * kSimdWidth + mlstm_lane_at(lane.row, key % kBlock / 2);
      MARLIN_UNROLL for (uint r = 0; r < kFragments; ++r) {
        if (key > r * kBlock + lane.row) continue;
        const float2 score = scores[r * kFragments * kSimdWidth + place];
        MARLIN_UNROLL for (uint i = 0; i < 8; ++i) {
          const float value = values.at(i);
          if (!isfinite(value)) {
            numerator[r][i / 2].thread_elements()[i % 2] += (key % 2 == 0 ? score.x : score.y) * value;
          }
        }
      }
    }
  }

  // state_sums contains each row's part of the denominator from the state before the chunk.
  MARLIN_INLINE void store(device T* h, device float* out_n, const device float* m, const threadgroup float* state_sums,
                           Queries queries, uint DV, float eps, uint column, bool stores_n,
                           MlstmLane lane) const thread {
    MARLIN_UNROLL for (uint r = 0; r < kFragments; ++r) {
      const uint row = r * kBlock + lane.row;
      const float scores = row_sum(score_sum[r]);
      if (!queries.has(row)) continue;
      const float size = abs(state_sums[row] + scores);
      const uint token = queries.first + row;
      const float floor_value = exp(-m[token]);
      const float bounded = size <= floor_value ? floor_value : size;  // unlike max(), keeps NaN
      if (stores_n && lane.pair == 0) out_n[token] = bounded;
      MARLIN_UNROLL for (uint part = 0; part < 2; ++part) {
        float4 x;
        MARLIN_UNROLL for (uint i = 0; i < 4; ++i) {
          Fragment whole = numerator[r][2 * part + i / 2];
          x[i] = whole.thread_elements()[i % 2] / (bounded + eps);
        }
        store4(h, token * DV, column + 4 * part, DV, vector_activations, x);
      }
    }
  }
};

}  // namespace marlin

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kMlstmMaxSimdgroups* kSimdWidth)]] void mlstm_output(
    const device T* q [[buffer(kSlotQ)]], const device T* k [[buffer(kSlotK)]], const device T* v [[buffer(kSlotV)]],
    device T* h [[buffer(kSlotH)]], device float* out_n [[buffer(kSlotOutN)]],
    const device float* out_m [[buffer(kSlotOutM)]], const device float* states_C [[buffer(kSlotStatesC)]],
    const device float* states_n [[buffer(kSlotStatesN)]], const device float* gates [[buffer(kSlotGates)]],
    constant MlstmParams& params [[buffer(kSlotParams)]], threadgroup float2* shared [[threadgroup(0)]],
    uint3 block [[threadgroup_position_in_grid]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane_index [[thread_index_in_simdgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint blocks_per_chunk = ceil_divide(params.chunk_size, kMlstmBlock);
  const uint query_block = block.y % blocks_per_chunk;
  const uint c = block.y / blocks_per_chunk;
  const uint start = (params.first_chunk + c) * params.chunk_size;
  const uint length = min(params.chunk_size, params.S - start);
  if (query_block * kMlstmBlock >= length) return;
  const Queries queries = {query_block * kMlstmBlock, min(uint(kMlstmBlock), length - query_block * kMlstmBlock)};
  const MlstmLane lane = mlstm_lane(lane_index);
  const uint head = block.z;
  const uint simd_column = (block.x * simdgroups + simdgroup) * kMlstmSimdColumns;
  const bool owns_columns = simd_column < params.DV;
  const uint column = simd_column + 8 * lane.pair;

  const device T* chunk_q = first_token(q, params.q, params, head) + int64_t(start) * params.q.token;
  const uint q_stride = uint(params.q.token);
  const ChunkGates chunk_gates = gate_vectors(gates, params, head, start);
  const ulong sequence = ulong(head) * params.S + start;
  const device float* m = out_m + sequence;

  const device T* chunk_k = first_token(k, params.k, params, head) + int64_t(start) * params.k.token;
  const ulong slot = ulong(head) * params.state_slots + c;
  // state_sums uses the memory of a pair of fragments above the diagonal of the queries' own block. That memory holds
  // no scores.
  threadgroup float* state_sums =
      reinterpret_cast<threadgroup float*>(shared + (query_block * kScorePairs + 1) * (2 * kSimdWidth));
  const device float* n = states_n + slot * params.DK;
  for (uint row = simdgroup; row < queries.count; row += simdgroups) {
    const device T* query = chunk_q + queries.token(row) * q_stride;
    float sum = 0.0f;
    for (uint k_index = lane_index; k_index < params.DK; k_index += kSimdWidth)
      sum = fma(float(query[k_index]), n[k_index], sum);
    sum = simd_sum(sum);
    if (lane_index == 0) state_sums[row] = params.scale * chunk_gates.at(kGateCarry, queries.token(row)) * sum;
  }

  const float own_forget = chunk_gates.at(kGateForget, queries.token(lane_index));
  for (uint unit = simdgroup; unit < (query_block + 1) * kScorePairs; unit += simdgroups) {
    const uint key_block = unit / kScorePairs;
    const uint pair = unit % kScorePairs;
    const bool is_own = key_block == query_block;
    const PairPlace place = {pair / 2 * kBlock + lane.row, pair % 2 * (2 * kBlock), lane};
    if (is_own && place.first_column > pair / 2 * kBlock) continue;
    const uint first_key = key_block * kMlstmBlock;
    ScorePair<T> part;
    part.multiply(chunk_q, q_stride, chunk_k, uint(params.k.token), params.DK, queries, place, first_key,
                  is_own ? queries.count : uint(kMlstmBlock));
    if (is_own) {
      part.weigh_own_block(chunk_gates, m, queries, place, own_forget, params.scale);
    } else {
      part.weigh_earlier_block(chunk_gates, m, queries, place, first_key, params.scale);
    }
    part.store(shared + unit * (2 * kSimdWidth), lane_index);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (!owns_columns) return;

  OutputSums<T> sums;
  sums.clear();
  sums.add_state(chunk_q, q_stride, states_C + slot * params.DK * params.DV, params.DK, params.DV, params.scale,
                 chunk_gates, queries, column, lane);
  const device T* chunk_v = first_token(v, params.v, params, head) + int64_t(start) * params.v.token;
  const uint v_stride = uint(params.v.token);
  for (uint key_block = 0; key_block < query_block; ++key_block) {
    sums.template add_block<false>(chunk_v, v_stride, shared + key_block * kBlockScores, key_block * kMlstmBlock,
                                   kMlstmBlock, column, params.DV, lane, lane_index);
  }
  const threadgroup float2* own_scores = shared + query_block * kBlockScores;
  const bool was_finite = sums.template add_block<true>(chunk_v, v_stride, own_scores, queries.first, queries.count,
                                                        column, params.DV, lane, lane_index);
  if (!simd_all(was_finite)) {
    sums.add_not_finite(chunk_v, v_stride, own_scores, queries.first, queries.count, column, params.DV, lane);
  }
  sums.store(h + sequence * params.DV, out_n + sequence, m, state_sums, queries, params.DV, params.eps, column,
             simd_column == 0, lane);
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_MLSTM_OUTPUT(MARLIN_INSTANTIATE))
