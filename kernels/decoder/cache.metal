// Copies the keys and values of new tokens into a cache. Each thread copies one element. The position of the first
// token is in device memory, so the host need not wait for it. If the tokens do not fit in the cache, each thread
// writes NaN instead, at the start of the cache. Attention over this cache then never gives a plausible result.
#include "kernels/shared/kernel_list.h"

#include "kernels/decoder/params.h"

using namespace metal;
using namespace marlin;

template <typename T>
[[kernel]] void write_cache(device T* keys [[buffer(kSlotKeys)]], device T* values [[buffer(kSlotValues)]],
                            const device T* k [[buffer(kSlotNewKeys)]], const device T* v [[buffer(kSlotNewValues)]],
                            const device long* start [[buffer(kSlotStart)]],
                            constant CacheParams& params [[buffer(kSlotParams)]],
                            uint3 position [[thread_position_in_grid]]) {
  if (position.y >= 2 * params.heads) return;
  const bool is_k = position.y < params.heads;
  const uint columns = is_k ? params.k_size : params.v_size;
  if (position.x >= columns) return;
  const long batch = position.z / params.tokens;
  const long token = position.z % params.tokens;
  const long head = is_k ? position.y : position.y - params.heads;
  const long first = *start;
  const bool fits = first >= 0 && first <= long(params.length) - long(params.tokens);
  const long in_k = batch * params.k.batch + head * params.k.head + token * params.k.token;
  const long in_v = batch * params.v.batch + head * params.v.head + token * params.v.token;
  const long row = (batch * params.heads + head) * params.length + token + (fits ? first : 0);
  const T value = is_k ? k[in_k + position.x] : v[in_v + position.x];
  (is_k ? keys : values)[row * columns + position.x] = fits ? value : T(NAN);
}

MARLIN_FUNCTIONS(MARLIN_KERNELS_CACHE(MARLIN_INSTANTIATE))
