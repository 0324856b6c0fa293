// The slots, workspaces and parameters of the mLSTM kernels. For shaders and host, in the C subset of
// kernels/shared/types.h.
//
//   mlstm_gates    computes log decays, sums for exponents and stabilisers from the gates
//   mlstm_states   computes the state before each chunk and after the last one
//   mlstm_output   computes h from q, k, v, the gates and the states
//   mlstm_step     computes one token and the state after it
#pragma once

#include "kernels/shared/slots.h"

namespace marlin {

// The slots of the mLSTM kernels, except kSlotParams, which is in slots.h. MlstmParams contains the strides of q, k, v,
// i and f; all other buffers are contiguous. heads = B * H.
enum MlstmSlot {
  kSlotQ = 0,         // [B, H, S, DK]; q, k and v have unit stride in the last dimension
  kSlotK = 1,         // [B, H, S, DK]
  kSlotV = 2,         // [B, H, S, DV]
  kSlotI = 3,         // [B, H, S]; the input gate before its activation function
  kSlotF = 4,         // [B, H, S]; the forget gate before its activation function
  kSlotC0 = 5,        // float [heads, DK, DV]: the initial state
  kSlotN0 = 6,        // float [heads, DK]
  kSlotM0 = 7,        // float [heads]
  kSlotH = 8,         // [heads, S, DV]
  kSlotOutN = 9,      // float [heads, S]: the denominator without eps
  kSlotOutM = 11,     // float [heads, S]: the stabiliser of each token
  kSlotStatesC = 12,  // float [heads, state_slots, DK, DV]: the states before the chunks
  kSlotStatesN = 13,  // float [heads, state_slots, DK]
  kSlotStatesM = 14,  // float [heads, chunks + 1]
  // The state after the last chunk. The states of consecutive heads are final_slots states apart.
  kSlotFinalC = 15,  // float [heads, DK, DV]
  kSlotFinalN = 16,  // float [heads, DK]
  kSlotFinalM = 17,  // float [heads]
  kSlotGates = 18,   // float [kGateVectorCount, heads, gate_stride]
  kSlotChunks = 19,  // float [kChunkVectorCount, heads, chunks]
};
static_assert(int(kSlotChunks) < int(kSlotCount), "slots.h counts all slots");

// The vectors in kSlotGates. Decays are logarithms. A block is the kMlstmBlock tokens that a simdgroup scans at once.
// The first block of a chunk starts with the chunk.
enum GateVector {
  kGateForget = 0,  // log sigmoid(f)
  kGateInput = 1,   // i
  kGatePrefix = 2,  // decay over the block's tokens up to and including this one
  kGateSuffix = 3,  // i plus the decay over the block's tokens after this one
  kGateCarry = 4,   // factor of the state before the chunk in the token's output
  kGateWeight = 5,  // factor of k v^T in the state after the chunk
  kGateVectorCount = 6,
};

enum ChunkVector {
  kChunkDecay = 0,  // first the decay over the whole chunk; mlstm_gates then replaces it by the factor of the state
                    // before the chunk
  kChunkPeak = 1,   // the stabiliser after the chunk if no token precedes it
  kChunkVectorCount = 2,
};

enum MlstmFlag {
  kMlstmInitialState = 1,  // the caller passes C0, n0, m0
  kMlstmGivenM = 2,        // kSlotStatesM is an input
  kMlstmForOutput = 4,     // mlstm_gates writes the vectors that mlstm_output reads
};

enum {
  kMlstmBlock = 32,        // tokens of a block, and queries per threadgroup of mlstm_output
  kMlstmSimdColumns = 32,  // rows and columns of C per simdgroup
  kMlstmStateTile = 64,    // rows and columns of C per threadgroup of mlstm_states
  kMlstmStateThreads = 128,
  kMlstmMaxSimdgroups = 8,    // per threadgroup of mlstm_output
  kMlstmGateSimdgroups = 16,  // limit per threadgroup of mlstm_gates
  kMlstmStepColumns = 128,    // per threadgroup of mlstm_step: four per lane
  kMlstmStepMaxSimdgroups = 16,
};

// The threadgroup memory of mlstm_output. It contains the scores of a block of queries with the keys of its own block
// and of all earlier blocks of the chunk.
constexpr uint32_t mlstm_output_bytes(uint32_t chunk_size) {
  return ceil_divide(chunk_size, kMlstmBlock) * kMlstmBlock * kMlstmBlock * 4;
}
static_assert(mlstm_output_bytes(128) <= kPreferredThreadgroupBytes,
              "the threadgroup memory of an M1 core holds three");
static_assert(mlstm_output_bytes(256) <= kMaxThreadgroupBytes, "Metal's limit");

// The threadgroup memory of mlstm_step. For each simdgroup, it contains the sums of all columns and the sum of the
// denominator.
constexpr uint32_t mlstm_step_bytes(uint32_t simdgroups) {
  return round_up(simdgroups * (kMlstmStepColumns + 1) * 4, 16);  // Metal requires multiples of 16 bytes
}
static_assert(mlstm_step_bytes(kMlstmStepMaxSimdgroups) <= kPreferredThreadgroupBytes,
              "the threadgroup memory of an M1 core holds three");

// Strides in elements. The host limits the token strides of q, k and v to kMlstmMaxStride, so that an offset within a
// chunk of 256 tokens fits in 32 bits.
struct MlstmStrides {
  int64_t batch;
  int64_t head;
  int64_t token;
};
enum { kMlstmMaxStride = 1 << 23 };

// The parameters of all four kernels. A dispatch computes segment_chunks chunks, starting at first_chunk.
struct MlstmParams {
  MlstmStrides q;
  MlstmStrides k;
  MlstmStrides v;
  MlstmStrides i;
  MlstmStrides f;
  uint32_t heads;
  uint32_t heads_per_batch;
  uint32_t S;
  uint32_t DK;
  uint32_t DV;
  uint32_t chunk_size;
  uint32_t chunks;  // chunks of the whole sequence; the last may be short
  uint32_t first_chunk;
  uint32_t segment_chunks;
  uint32_t save_every;   // chunks between saved states
  uint32_t state_slots;  // per head
  uint32_t final_slots;
  uint32_t gate_stride;  // S rounded up to a multiple of 4
  int32_t gate_type;     // ElementType of i and f
  uint32_t flags;        // MlstmFlags
  float scale;           // factor of q: DK^-1/2
  float eps;
  uint32_t unused;
};
static_assert(sizeof(MlstmParams) == 192, "shared with the shaders");

}  // namespace marlin
