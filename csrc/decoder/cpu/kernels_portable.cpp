// Plain C++ instances of the layer operators' functions.
#include "csrc/cpu/portable/vec_portable.h"
#include "csrc/decoder/cpu/activation_kernel.h"

MARLIN_DECODER_FUNCTIONS(portable_decoder_functions, Portable)
