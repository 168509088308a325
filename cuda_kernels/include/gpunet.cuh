// What every kernel source includes: type names, index loops, conversions, block and warp reductions.
//
// The same sources are compiled by NVRTC for GPUs and by a C++ compiler for the simulated device (GPUNET_SIM), which
// supplies threadIdx, __syncthreads, shuffles, atomics and half types itself (sim/gpunet_sim.h).
#pragma once

#ifdef GPUNET_SIM
#include "gpunet_sim.h"
#define GPUNET_NOT_UNROLLED
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef signed char int8;
typedef unsigned char uint8;
typedef short int16;
typedef unsigned short uint16;
typedef int int32;
typedef unsigned int uint32;
typedef long long int64;
typedef unsigned long long uint64;
typedef __half float16;
typedef __nv_bfloat16 bfloat16;
#define GPUNET_NOT_UNROLLED _Pragma("unroll 1")
#endif

// Places up to this one are worked out in 32 bits, whose divisions are several times as fast as those of 64. Tests set less.
#ifndef GPUNET_NARROW
#define GPUNET_NARROW 0x7fffffff
#endif

// A loop in which all threads of a one-dimensional grid share the indices 0 .. count-1. Grids are large, so it goes round once or
// a few times; copies of its body would only make code larger and its compilation slower.
#define GPUNET_LOOP(i, count)                                                                          \
  GPUNET_NOT_UNROLLED                                                                                  \
  for (int64 i = (int64)blockIdx.x * blockDim.x + threadIdx.x; i < (int64)(count);                     \
       i += (int64)gridDim.x * blockDim.x)

// The type to compute in: float for float16 and bfloat16, T itself otherwise.
template <typename T>
struct Accumulate {
  typedef T type;
};
template <>
struct Accumulate<float16> {
  typedef float type;
};
template <>
struct Accumulate<bfloat16> {
  typedef float type;
};

template <typename T>
__device__ inline typename Accumulate<T>::type load(const T* p, int64 i) {
  return (typename Accumulate<T>::type)p[i];
}
template <>
__device__ inline float load<float16>(const float16* p, int64 i) {
  return __half2float(p[i]);
}
template <>
__device__ inline float load<bfloat16>(const bfloat16* p, int64 i) {
  return __bfloat162float(p[i]);
}

template <typename T>
__device__ inline void store(T* p, int64 i, typename Accumulate<T>::type value) {
  p[i] = (T)value;
}
template <>
__device__ inline void store<float16>(float16* p, int64 i, float value) {
  p[i] = __float2half(value);
}
// To the nearest, ties to even; a NaN stays one.
template <>
__device__ inline void store<bfloat16>(bfloat16* p, int64 i, float value) {
  p[i] = __float2bfloat16(value);
}

// Instantiation lists: M(suffix, type) for each element type. There are arrays of bfloat16 only where Python has the type.
#ifdef GPUNET_BFLOAT16
#define GPUNET_IF_BFLOAT16(...) __VA_ARGS__
#else
#define GPUNET_IF_BFLOAT16(...)
#endif
#define GPUNET_FLOATS(M) M(f32, float) M(f16, float16) GPUNET_IF_BFLOAT16(M(bf16, bfloat16)) M(f64, double)
#define GPUNET_HALVES(M) M(f16, float16) GPUNET_IF_BFLOAT16(M(bf16, bfloat16))
#define GPUNET_INTEGERS(M) M(i8, int8) M(u8, uint8) M(i16, int16) M(u16, uint16) M(i32, int32) M(i64, int64)
#define GPUNET_NUMBERS(M) GPUNET_FLOATS(M) GPUNET_INTEGERS(M)

// Sums over a block whose number of threads is a power of two and a multiple of 32. Every thread gets the result; the order of
// additions depends on the number of threads only. `scratch` holds one element for each warp (32 at most).
struct Sum {
  template <typename A>
  __device__ A operator()(A a, A b) const { return a + b; }
};
struct Maximum {
  template <typename A>
  __device__ A operator()(A a, A b) const { return a > b ? a : b; }
};
struct Minimum {
  template <typename A>
  __device__ A operator()(A a, A b) const { return a < b ? a : b; }
};

template <typename A, typename Op>
__device__ inline A block_reduce(A value, A* scratch, A identity, Op op) {
  for (int offset = 16; offset > 0; offset /= 2) value = op(value, __shfl_down_sync(0xffffffffu, value, offset));
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  __syncthreads();  // the scratch of an earlier reduction may still be read
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  A total = identity;
  for (int w = 0; w < warps; ++w) total = op(total, scratch[w]);
  return total;
}
