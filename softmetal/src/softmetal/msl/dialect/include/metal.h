// Metal's standard library for clang's "C++ for OpenCL" dialect: only declarations, to check the source's syntax and
// types. Address spaces have the dialect's names: __global is device, __local threadgroup, __private thread.
// SM_METAL_VERSION is the language version in the form of __METAL_VERSION__: 310 is MSL 3.1.
#pragma once
#pragma clang system_header
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable

// clang-format off: each file uses the files above it, so the order is fixed.
#include "types.h"
#include "traits.h"
#include "vectors.h"
#include "math.h"
#include "integers.h"
#include "relational.h"
#include "threads.h"
#include "lanes.h"
#include "atomics.h"
#include "simdgroup_matrix.h"
#include "internals.h"
