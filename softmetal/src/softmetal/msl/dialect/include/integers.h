// Functions of integers, and packing of normalized values. Each type and width has its own overload, as in math.h.
#pragma once

#define SM_INTEGER_1(name) SM_ON_INTEGERS(SM_F1, name)
#define SM_INTEGER_2(name) SM_ON_INTEGERS(SM_F2, name)
#define SM_INTEGER_3(name) SM_ON_INTEGERS(SM_F3, name)

namespace metal {

SM_INTEGER_1(abs)
SM_INTEGER_1(popcount)
SM_INTEGER_1(clz)
SM_INTEGER_1(ctz)
SM_INTEGER_1(reverse_bits)
SM_INTEGER_2(min)
SM_INTEGER_2(max)
SM_INTEGER_2(mulhi)
SM_INTEGER_2(rotate)
SM_INTEGER_2(addsat)
SM_INTEGER_2(subsat)
SM_INTEGER_2(absdiff)
SM_INTEGER_2(hadd)
SM_INTEGER_2(rhadd)
SM_INTEGER_3(clamp)
SM_INTEGER_3(madhi)
SM_INTEGER_3(madsat)
SM_INTEGER_3(min3)
SM_INTEGER_3(max3)
SM_INTEGER_3(median3)
#define SM_BITS(T, name)         \
  T extract_bits(T, uint, uint); \
  T insert_bits(T, T, uint, uint);
SM_ON_INTEGERS(SM_BITS, )
#undef SM_BITS
SM_WIDTHS(int, SM_F2, mul24)
SM_WIDTHS(uint, SM_F2, mul24)
SM_WIDTHS(int, SM_F3, mad24)
SM_WIDTHS(uint, SM_F3, mad24)

#define SM_PACK(kind, N, Word)                  \
  vec<float, N> unpack_##kind##_to_float(Word); \
  vec<half, N> unpack_##kind##_to_half(Word);   \
  Word pack_float_to_##kind(vec<float, N>);     \
  Word pack_half_to_##kind(vec<half, N>);
SM_PACK(unorm4x8, 4, uint)
SM_PACK(snorm4x8, 4, uint)
SM_PACK(unorm2x16, 2, uint)
SM_PACK(snorm2x16, 2, uint)
#undef SM_PACK

}  // namespace metal
