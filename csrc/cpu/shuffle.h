// Shuffles of 128-bit vectors, with the compiler's built-in vector types. They work on every CPU and need no
// intrinsics.
#pragma once

#include <cstdint>
#include <cstring>

namespace marlin::cpu {

using Words __attribute__((vector_size(16))) = uint32_t;

// Returns a vector whose element i is element index[i] of the concatenation of a and b.
template <int... index, class Vector>
Vector shuffle(Vector a, Vector b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, index...);
#else
  return __builtin_shuffle(a, b, Vector{index...});
#endif
}

// Transposes a 4 x 4 block of 32-bit elements.
template <class Element>
void transpose_4x4(const Element* from, int64_t ld_from, Element* to, int64_t ld_to) {
  static_assert(sizeof(Words) == 4 * sizeof(Element));
  Words row[4];
  for (int r = 0; r < 4; ++r)
    std::memcpy(&row[r], from + r * ld_from, sizeof(Words));
  const Words low01 = shuffle<0, 4, 1, 5>(row[0], row[1]), low23 = shuffle<0, 4, 1, 5>(row[2], row[3]);
  const Words high01 = shuffle<2, 6, 3, 7>(row[0], row[1]), high23 = shuffle<2, 6, 3, 7>(row[2], row[3]);
  const Words column[4] = {shuffle<0, 1, 4, 5>(low01, low23), shuffle<2, 3, 6, 7>(low01, low23),
                           shuffle<0, 1, 4, 5>(high01, high23), shuffle<2, 3, 6, 7>(high01, high23)};
  for (int c = 0; c < 4; ++c)
    std::memcpy(to + c * ld_to, &column[c], sizeof(Words));
}

}  // namespace marlin::cpu
