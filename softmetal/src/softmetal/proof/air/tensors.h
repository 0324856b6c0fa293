// Metal 4's matmul2d on operands in registers, in the form that kernels compiled by Apple call. `kind` is 0 for the
// left operand, 1 for the right operand and 2 for the destination. The low 16 bits of a type are its width. As in
// msl/tensor, the executor computes the product and determines the layout.
#pragma once

extern "C" uint32_t sm_tensor_block(uint32_t index, uint32_t groups, uint32_t blocks, uint32_t layout);
extern "C" SM_CONVERGENT void sm_tensor_product(const float* a, const float* b, float* sum, uint32_t options);

namespace air {

// A descriptor in memory.
struct tensor_descriptor {
  s32 m, n, k;
  u8 transpose_left, transpose_right, relaxed_precision;
  s32 accumulates;
};

struct tensor_shape {
  u32 rows, columns;
  u32 block_columns() const { return (columns + 15) / 16; }
  u32 blocks() const { return (rows + 15) / 16 * block_columns(); }
  // As in msl/tensor: the layout of operands in registers of one simdgroup, and the index of a block's element.
  u32 layout(bool is_strict_float) const {
    if (blocks() > 2 || rows % 16 != 0 || columns % 16 != 0) return 0;
    if (is_strict_float) return rows == 16 ? 2 : 0;
    return 1;
  }
  u32 index(u32 block, u32 element, u32 layout) const {
    return layout == 2 && blocks() == 2 ? (element & 3) | block << 2 | element >> 2 << 3 : 8 * block + element;
  }
};
AIR_FUNCTION tensor_shape shape_of(u32 kind, u32 m, u32 n, u32 k, bool left, bool right) {
  if (kind == 2) return {m, n};
  if (kind == 0) return left ? tensor_shape{k, m} : tensor_shape{m, k};
  return right ? tensor_shape{n, k} : tensor_shape{k, n};
}

// Returns the number of bytes of a lane's elements.
AIR_FUNCTION u64 tensor_bytes(u32 kind, u32 m, u32 n, u32 k, u8 left, u8 right, u8, u32, u32 a, u32 b, u32 c, u32) {
  const u32 type = kind == 0 ? a : kind == 1 ? b : c;
  return shape_of(kind, m, n, k, left, right).blocks() * 8 * (type & 0xffff) / 8;
}
// Returns the address of an element, or of all elements if the index is -1. For an index past the end, returns the null
// pointer, so that an access is a fault in both modes.
AIR_FUNCTION void* tensor_element(u32 kind, u32 m, u32 n, u32 k, u8 left, u8 right, u8 relaxed, u32 mode, void* all,
                                  u16 index, u32 a, u32 b, u32 c) {
  const u64 bytes = ((kind == 0 ? a : kind == 1 ? b : c) & 0xffff) / 8;
  if (index == 0xffff) return all;
  if (index * bytes >= tensor_bytes(kind, m, n, k, left, right, relaxed, mode, a, b, c, 32)) return nullptr;
  return static_cast<char*>(all) + index * bytes;
}

template <class T>
AIR_FUNCTION void tensor_block(tensor_shape shape, u32 layout, void* all, u32 row, u32 column, float* out) {
  const u32 wanted = row / 16 * shape.block_columns() + column / 16;
  for (u32 b = 0; b < shape.blocks(); ++b) {
    if (sm_tensor_block(b, 1, shape.blocks(), layout) != wanted) continue;
    for (u32 i = 0; i < 8; ++i) out[i] = static_cast<f32>(static_cast<T*>(all)[shape.index(b, i, layout)]);
  }
}

template <class A, class B, class C>
AIR_FUNCTION SM_CONVERGENT void tensor_product(void* descriptor, void* a, void* b, void* c) {
  const tensor_descriptor what = *static_cast<tensor_descriptor*>(descriptor);
  const u32 m = what.m, n = what.n, k = what.k;
  const bool left = what.transpose_left, right = what.transpose_right;
  const tensor_shape shape_a = shape_of(0, m, n, k, left, right), shape_b = shape_of(1, m, n, k, left, right),
                     shape_c = shape_of(2, m, n, k, left, right);
  const bool is_strict = !what.relaxed_precision && (__is_same(A, f32) || __is_same(B, f32));
  const u32 layout_a = shape_a.layout(is_strict), layout_b = shape_b.layout(is_strict),
            layout_c = shape_c.layout(is_strict);
  const u32 options = u32(left) | u32(right) << 1 | u32(what.relaxed_precision && __is_same(A, f32)) << 2 |
                      layout_a << 3 | layout_b << 5 | layout_c << 7;
  C* sums = static_cast<C*>(c);
  for (u32 own = 0; own < shape_c.blocks(); ++own) {
    const u32 number = sm_tensor_block(own, 1, shape_c.blocks(), layout_c);
    const u32 row = number / shape_c.block_columns() * 16, column = number % shape_c.block_columns() * 16;
    f32 total[8], of_a[8], of_b[8];
    for (u32 i = 0; i < 8; ++i) total[i] = what.accumulates ? static_cast<f32>(sums[shape_c.index(own, i, layout_c)]) : 0.0f;
    for (u32 step = 0; step < k; step += 16) {
      tensor_block<A>(shape_a, layout_a, a, left ? step : row, left ? row : step, of_a);
      tensor_block<B>(shape_b, layout_b, b, right ? column : step, right ? step : column, of_b);
      sm_tensor_product(of_a, of_b, total, options);
    }
    for (u32 i = 0; i < 8; ++i) sums[shape_c.index(own, i, layout_c)] = static_cast<C>(total[i]);
  }
}

}  // namespace air
