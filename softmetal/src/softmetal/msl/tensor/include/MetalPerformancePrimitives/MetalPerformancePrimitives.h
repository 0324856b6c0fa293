// mpp::tensor_ops::matmul2d: the product of two matrices, each in memory (a tensor) or in registers (a cooperative
// tensor).
#pragma once

#include <metal_cooperative_tensor>

// 0 means the ABI of macOS before 26.2. Apple's header sets it if the deployment target is older.
#ifndef __TENSOR_OPS_SUPPORT_DEPLOYMENT_TARGET_26_2
#define __TENSOR_OPS_SUPPORT_DEPLOYMENT_TARGET_26_2 1
#endif

namespace mpp {
namespace tensor_ops {

template <typename T>
constant constexpr T dynamic_length_v = metal::numeric_limits<T>::max();

// As an argument of a template, a descriptor is encoded in an integer, because C++17 has no template arguments of class
// type.
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int rows, int columns, int inner = -1, bool left = false, bool right = false,
                                bool relaxed = false, mode what = mode::multiply)
      : m(rows), n(columns), k(inner == dynamic_length_v<int> ? -1 : inner), transpose_left(left),
        transpose_right(right), relaxed_precision(relaxed), matmul_mode(what) {}
  constexpr operator ulong() const thread {
    return (ulong)m | (ulong)n << 16 | (ulong)(k & 0xffff) << 32 | (ulong)transpose_left << 48 |
           (ulong)transpose_right << 49 | (ulong)relaxed_precision << 50 |
           (ulong)(matmul_mode == mode::multiply_accumulate) << 51;
  }
};

namespace detail {

// Loads the lane's 8 elements of a block of 16 x 16 from memory. Elements outside of the operand are 0.
template <typename Tensor>
void block(thread Tensor& source, int row, int column, int rows, int columns, thread float* out) {
  for (uint i = 0; i < 8; ++i) {
    const int place = int(sm_tensor_place(i, metal::tensor_detail::kQuads));
    const int x = column + place % 16, y = row + place / 16;
    const bool is_inside =
        x < columns && y < rows && x < int(source.sizes.sizes[0]) && y < int(source.sizes.sizes[1]);
    out[i] = is_inside ? float(source.data[long(x) * source.strides[0] + long(y) * source.strides[1]]) : 0.0f;
  }
}
template <typename T, int Rows, int Columns, uint Layout>
void block(thread metal::cooperative_tensor<T, Rows, Columns, 1, Layout>& source, int row, int column, int, int,
           thread float* out) {
  const int wanted = row / 16 * source.block_columns + column / 16;
  for (uint b = 0; b < uint(source.own_blocks); ++b) {
    if (int(sm_tensor_block(b, 1, source.blocks, Layout)) != wanted) continue;
    for (uint i = 0; i < 8; ++i) {
      const uint at = source.index_of(b, i);
      out[i] = source.is_valid_element(at) ? float(source[at]) : 0.0f;
    }
  }
}

template <typename Tensor>
struct layout {
  static constexpr constant uint value = metal::tensor_detail::kQuads;  // block() loads a tensor from memory in quads
};
template <typename T, int Rows, int Columns, int Groups, uint Layout>
struct layout<metal::cooperative_tensor<T, Rows, Columns, Groups, Layout>> {
  static constexpr constant uint value = Layout;
};
template <typename Tensor>
struct is_cooperative {
  static constexpr constant bool value = false;
};
template <typename T, int Rows, int Columns, int Groups, uint Layout>
struct is_cooperative<metal::cooperative_tensor<T, Rows, Columns, Groups, Layout>> {
  static constexpr constant bool value = true;
};

// The type of the elements of an operand. An operand is a tensor of any kind, or the element type itself.
template <typename Operand, bool is_element>
struct element {
  typedef typename Operand::value_type type;
};
template <typename Operand>
struct element<Operand, true> {
  typedef Operand type;
};

template <typename T>
struct is_operand {
  static constexpr constant bool value =
      metal::is_same_v<T, half> || metal::is_same_v<T, bfloat> || metal::is_same_v<T, float>;
};

}  // namespace detail

template <ulong Descriptor, typename Scope>
struct matmul2d {
  static constexpr constant int m = int(Descriptor & 0xffff);
  static constexpr constant int n = int(Descriptor >> 16 & 0xffff);
  static constexpr constant bool has_dynamic_k = (Descriptor >> 32 & 0xffff) == 0xffff;
  static constexpr constant int k = has_dynamic_k ? 0 : int(Descriptor >> 32 & 0xffff);
  static constexpr constant bool transpose_left = Descriptor >> 48 & 1;
  static constexpr constant bool transpose_right = Descriptor >> 49 & 1;
  static constexpr constant bool relaxed_precision = Descriptor >> 50 & 1;
  static constexpr constant bool accumulates = Descriptor >> 51 & 1;
  static constexpr constant int groups = int(Scope::static_size);
  static_assert(m > 0 && n > 0, "matmul2d: m and n must be known");

 private:
  template <typename T>
  using element_t = typename detail::element<T, metal::is_arithmetic_v<T>>::type;
  template <typename T, typename Left, typename Right, int Rows, int Columns, metal::tensor_detail::operand which>
  using operand_t =
      metal::cooperative_tensor<T, Rows, Columns, groups,
                                metal::tensor_detail::layout_of<element_t<Left>, element_t<Right>, relaxed_precision,
                                                                Rows, Columns, groups>(which)>;

 public:

  template <typename Left, typename Right, typename Result, typename Coordinate = int>
  using cooperative_tensor_left_input_t =
      operand_t<Left, Left, Right, transpose_left ? k : m, transpose_left ? m : k, metal::tensor_detail::operand::left>;
  template <typename Left, typename Right, typename Result, typename Coordinate = int>
  using cooperative_tensor_right_input_t =
      operand_t<Right, Left, Right, transpose_right ? n : k, transpose_right ? k : n,
                metal::tensor_detail::operand::right>;
  template <typename Left, typename Right, typename Result, typename Coordinate = int>
  using cooperative_tensor_destination_t =
      operand_t<Result, Left, Right, m, n, metal::tensor_detail::operand::sum>;

  template <typename Left, typename Right, typename Result, typename Coordinate = int>
  cooperative_tensor_left_input_t<Left, Right, Result> get_left_input_cooperative_tensor() const thread {
    check_registers<Left, Right>();
    cooperative_tensor_left_input_t<Left, Right, Result> undefined;
    return undefined;
  }
  template <typename Left, typename Right, typename Result, typename Coordinate = int>
  cooperative_tensor_right_input_t<Left, Right, Result> get_right_input_cooperative_tensor() const thread {
    check_registers<Left, Right>();
    cooperative_tensor_right_input_t<Left, Right, Result> undefined;
    return undefined;
  }
  template <typename Left, typename Right, typename Result, typename Coordinate = int>
  cooperative_tensor_destination_t<Left, Right, Result> get_destination_cooperative_tensor() const thread {
    cooperative_tensor_destination_t<Left, Right, Result> undefined;
    return undefined;
  }

  // Every thread of the scope must reach this call.
  template <typename Left, typename Right, typename Destination>
  void run(thread Left& left, thread Right& right, thread Destination& destination) const thread {
    // MLX mixes types of operands in registers. For operands in memory, only equal types are known to work.
    static_assert((detail::is_cooperative<Left>::value && detail::is_cooperative<Right>::value) ||
                      metal::is_same_v<typename Left::value_type, typename Right::value_type>,
                  "matmul2d: expected operands of one type, unless both are in registers");
    static_assert(detail::is_operand<typename Left::value_type>::value &&
                      detail::is_operand<typename Right::value_type>::value,
                  "matmul2d: expected operands of half, bfloat or float");
    if constexpr (detail::is_cooperative<Destination>::value) {
      multiply(left, right, destination);
    } else {
      cooperative_tensor_destination_t<Left, Right, float> sum;
      if constexpr (accumulates) sum.load(destination);
      multiply(left, right, sum);
      sum.store(destination);
    }
  }

 private:
  template <typename Left, typename Right>
  static void check_registers() {
    static_assert(groups == 1, "matmul2d: operands in registers need execution_simdgroup");
    static_assert(!has_dynamic_k, "matmul2d: operands in registers need a known k");
    static_assert(detail::is_operand<Left>::value && detail::is_operand<Right>::value,
                  "matmul2d: expected operands of half, bfloat or float");
  }

  // The extent of k, taken from the descriptor, else from the left operand, else from the right operand.
  template <typename Left, typename Right>
  static int inner(thread Left& left, thread Right& right) {
    if constexpr (!has_dynamic_k) {
      return k;
    } else if constexpr (detail::is_cooperative<Left>::value) {
      return int(right.sizes.sizes[transpose_right ? 0 : 1]);
    } else {
      return int(left.sizes.sizes[transpose_left ? 1 : 0]);
    }
  }

  template <typename Left, typename Right, typename Sum>
  static void multiply(thread Left& left, thread Right& right, thread Sum& sum) {
    const int depth = inner(left, right);
    const uint options = uint(transpose_left) | uint(transpose_right) << 1 |
                         uint(relaxed_precision && metal::is_same_v<typename Left::value_type, float>) << 2 |
                         detail::layout<Left>::value << 3 | detail::layout<Right>::value << 5 | Sum::layout << 7;
    for (uint own = 0; own < uint(Sum::own_blocks); ++own) {
      const uint number = sm_tensor_block(own, groups, Sum::blocks, Sum::layout);
      if (number >= uint(Sum::blocks)) continue;
      const int row = int(number) / Sum::block_columns * 16, column = int(number) % Sum::block_columns * 16;
      float total[8], a[8], b[8];
      for (uint i = 0; i < 8; ++i) total[i] = accumulates ? float(sum[Sum::index_of(own, i)]) : 0.0f;
      for (int step = 0; step < depth; step += 16) {
        if constexpr (transpose_left) {
          detail::block(left, step, row, depth, m, a);
        } else {
          detail::block(left, row, step, m, depth, a);
        }
        if constexpr (transpose_right) {
          detail::block(right, column, step, n, depth, b);
        } else {
          detail::block(right, step, column, depth, n, b);
        }
        sm_tensor_product(a, b, total, options);
      }
      for (uint i = 0; i < 8; ++i) sum[Sum::index_of(own, i)] = typename Sum::value_type(total[i]);
    }
  }
};

}  // namespace tensor_ops
}  // namespace mpp
