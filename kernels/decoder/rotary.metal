// Rotates pairs of elements of q and k by the angles of their positions, in fp32. Each thread rotates one pair, or
// copies one of the elements after the rotated part.
#include "kernels/shared/kernel_list.h"

#include "kernels/decoder/params.h"
#include "kernels/gemm/function_constants.h"

using namespace metal;
using namespace marlin;

template <typename T>
[[kernel]] void rotary(const device T* q [[buffer(kSlotRotaryQ)]], const device T* k [[buffer(kSlotRotaryK)]],
                       const device uchar* cos_table [[buffer(kSlotCos)]],
                       const device uchar* sin_table [[buffer(kSlotSin)]], device T* q_out [[buffer(kSlotRotatedQ)]],
                       device T* k_out [[buffer(kSlotRotatedK)]], constant RotaryParams& params [[buffer(kSlotParams)]],
                       uint3 position [[thread_position_in_grid]]) {
  const uint pairs = params.rotary_size / 2;
  if (position.x >= pairs + params.head_size - params.rotary_size) return;
  if (position.y >= params.q_heads + params.k_heads) return;
  const long batch = position.z / params.tokens;
  const long token = position.z % params.tokens;
  const bool is_q = position.y < params.q_heads;
  const uint head = is_q ? position.y : position.y - params.q_heads;
  const uint heads = is_q ? params.q_heads : params.k_heads;
  const long in_q = batch * params.q.batch + long(head) * params.q.head + token * params.q.token;
  const long in_k = batch * params.k.batch + long(head) * params.k.head + token * params.k.token;
  const device T* in = is_q ? q + in_q : k + in_k;
  const bool token_rows = (params.flags & (is_q ? kRotaryTokenRowsQ : kRotaryTokenRowsK)) != 0;
  const long row =
      token_rows ? (batch * params.tokens + token) * heads + head : (batch * heads + head) * params.tokens + token;
  device T* out = (is_q ? q_out : k_out) + row * params.head_size;
  if (position.x >= pairs) {
    const uint element = position.x - pairs + params.rotary_size;
    out[element] = in[element];
    return;
  }
  const bool interleaved = (params.flags & kRotaryInterleaved) != 0;
  const uint one = interleaved ? 2 * position.x : position.x;
  const uint other = interleaved ? one + 1 : one + pairs;
  const bool per_pair = (params.flags & kRotaryPerPair) != 0;
  const uint at_one = per_pair ? position.x : one;
  const uint at_other = per_pair ? position.x : other;
  const long cos_row = batch * params.cos.batch + token * params.cos.token;
  const long sin_row = batch * params.sin.batch + token * params.sin.token;
  const float cos_one = load_element(cos_table, ulong(cos_row + at_one), params.table_type);
  const float cos_other = load_element(cos_table, ulong(cos_row + at_other), params.table_type);
  const float sin_one = load_element(sin_table, ulong(sin_row + at_one), params.table_type);
  const float sin_other = load_element(sin_table, ulong(sin_row + at_other), params.table_type);
  const bool transposed = (params.flags & kRotaryTransposed) != 0;
  const float to_one = transposed ? sin_other : -sin_one;
  const float to_other = transposed ? -sin_one : sin_other;
  const float x = float(in[one]);
  const float y = float(in[other]);
  out[one] = T(fma(x, cos_one, y * to_one));
  out[other] = T(fma(y, cos_other, x * to_other));
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_ROTARY(MARLIN_INSTANTIATE))
