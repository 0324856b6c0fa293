// Compares the layout that the kernels for tensor units assume with the layout that Metal's own functions report.
// Requires Metal language version 4.0.
#include "kernels/gemm/tensor_layout.h"

#include "kernels/shared/slots.h"

using namespace metal;
using namespace marlin;

namespace {

// Stores kTensorMatches if all elements of a matrix have the assumed positions. Otherwise stores the first wrong
// element of the first lane that has one (geometry.h). The matrix consists of 16 x 16 blocks, one below the other if
// `down` is true, and otherwise side by side.
template <uint count, typename Matrix>
void compare(thread Matrix& matrix, bool down, device uint* out, uint lane) {
  uint found = kTensorMatches;
  if (matrix.get_capacity() != count) {
    found = kTensorCapacity | matrix.get_capacity();
  } else {
    const LanePlace place = tensor_place(lane);
    for (ushort i = 0; i < count; ++i) {
      const uint block = i / 8 * 16;
      const uint row = place.row + i % 8 / 4 * 8 + (down ? block : 0);
      const uint column = place.column + i % 4 + (down ? 0 : block);
      const auto at = matrix.get_multidimensional_index(i);
      const bool is_there = uint(at[1]) == row && uint(at[0]) == column;
      if (found == kTensorMatches && !is_there) {
        found = kTensorElement | lane << 24 | uint(i) << 16 | (uint(at[1]) & 255u) << 8 | (uint(at[0]) & 255u);
      }
    }
  }
  const uint first = simd_min(found == kTensorMatches ? uint(kSimdWidth) : lane);
  if (first == kSimdWidth ? lane == 0 : lane == first) out[0] = found;
}

template <typename R>
void compare_all(device uint* out, uint lane) {
  auto product = tensor_product();
  auto a = product.template get_left_input_cooperative_tensor<R, R, float>();
  auto b = product.template get_right_input_cooperative_tensor<R, R, float>();
  auto c = product.template get_destination_cooperative_tensor<remove_addrspace_t<decltype(a)>,
                                                               remove_addrspace_t<decltype(b)>, float>();
  compare<8>(a, true, out, lane);
  compare<16>(b, true, out + 1, lane);
  compare<16>(c, false, out + 2, lane);
}

}  // namespace

[[kernel]] void probe_tensor_layout(device uint* out [[buffer(kSlotOut)]], uint lane [[thread_index_in_simdgroup]]) {
  compare_all<half>(out, lane);
  compare_all<bfloat>(out + 3, lane);
}
