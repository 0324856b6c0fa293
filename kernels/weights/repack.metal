// Converts the words of GPTQ and AWQ checkpoints to the words of packed weights, and unpacks their zero points to [G,
// N]. The kernels only move integers, so the results are exact.
#include "kernels/shared/kernel_list.h"

#include "kernels/gemm/function_constants.h"

using namespace metal;
using namespace marlin;

// Column j of an AWQ word is in nibble 4 * (j % 2) + j / 2 (AutoAWQ, packing_utils.py: order 0 2 4 6 1 3 5 7).
MARLIN_INLINE uint awq_shift(uint column) {
  return 16 * (column & 1u) + 4 * (column >> 1);
}

// Word (r, n) of the result contains rows perm[r c] .. perm[r c + c - 1] of the packed input, where c is the number of
// codes per word.
[[kernel]] void gptq_repack(const device uint* in [[buffer(kSlotPacked)]], const device int* perm [[buffer(kSlotPerm)]],
                            device uint* out [[buffer(kSlotOut)]],
                            constant RepackParams& params [[buffer(kSlotParams)]],
                            uint2 position [[thread_position_in_grid]]) {
  const uint n = position.x;
  const uint row = position.y;
  if (n >= params.columns || row >= params.rows) return;
  uint word = 0;
  if (has_perm) {
    const uint bits = params.code_bits;
    const uint codes = 32 / bits;
    for (uint i = 0; i < codes; ++i) {
      const uint k = uint(perm[row * codes + i]);
      if (k >= params.rows * codes) continue;  // the host cannot check the values of perm
      const uint source = in[ulong(k / codes) * params.columns + n];
      word |= ((source >> (bits * (k % codes))) & ((1u << bits) - 1u)) << (bits * i);
    }
  } else {
    word = in[ulong(row) * params.columns + n];
  }
  out[ulong(row) * params.columns + n] = word;
}

// An AWQ word contains eight interleaved columns; a word of the result contains eight k. Each thread transposes an 8 x
// 8 block of codes.
[[kernel]] void awq_repack(const device uint* in [[buffer(kSlotPacked)]], device uint* out [[buffer(kSlotOut)]],
                           constant RepackParams& params [[buffer(kSlotParams)]],
                           uint2 position [[thread_position_in_grid]]) {
  const uint column = position.x;
  const uint row = position.y;
  if (column >= params.columns || row >= params.rows) return;
  uint source[kNibbles];
  for (uint i = 0; i < kNibbles; ++i) {
    source[i] = in[(ulong(row) * kNibbles + i) * params.columns + column];
  }
  device uint* target = out + (ulong(row) * params.columns + column) * kNibbles;
  for (uint j = 0; j < kNibbles; ++j) {
    uint word = 0;
    for (uint i = 0; i < kNibbles; ++i)
      word |= ((source[i] >> awq_shift(j)) & 15u) << (4 * i);
    target[j] = word;
  }
}

[[kernel]] void gptq_unpack_zeros(const device uint* in [[buffer(kSlotPacked)]], device uchar* out [[buffer(kSlotOut)]],
                                  constant RepackParams& params [[buffer(kSlotParams)]],
                                  uint2 position [[thread_position_in_grid]]) {
  const uint column = position.x;
  const uint row = position.y;
  if (column >= params.columns || row >= params.rows) return;
  const ulong index = ulong(row) * params.columns + column;
  const StoredZeros stored = StoredZeros(params.stored_zeros);
  const uint word = in[index] + (stored == StoredZeros::word ? 0x11111111u : 0u);
  for (uint j = 0; j < kNibbles; ++j) {
    const uint code = (word >> (4 * j)) & 15u;
    const uint zero = stored == StoredZeros::masked     ? (code + 1) & 15u
                      : stored == StoredZeros::unmasked ? code + 1
                                                        : code;
    out[index * kNibbles + j] = uchar(zero);
  }
}

[[kernel]] void awq_unpack_zeros(const device uint* in [[buffer(kSlotPacked)]], device uchar* out [[buffer(kSlotOut)]],
                                 constant RepackParams& params [[buffer(kSlotParams)]],
                                 uint2 position [[thread_position_in_grid]]) {
  const uint column = position.x;
  const uint row = position.y;
  if (column >= params.columns || row >= params.rows) return;
  const ulong index = ulong(row) * params.columns + column;
  const uint word = in[index];
  for (uint j = 0; j < kNibbles; ++j) {
    out[index * kNibbles + j] = uchar((word >> awq_shift(j)) & 15u);
  }
}
