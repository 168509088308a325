// What generated kernels of fused elementwise operators use (fused.py).
#pragma once

#include "broadcast.cuh"
#include "sums.cuh"

// What is left of a number that is stored as float16, or as bfloat16, which is made of a float.
__device__ inline float rounded_f16(float x) { return __half2float(__float2half(x)); }
__device__ inline float rounded_f16(double x) { return __half2float(__double2half(x)); }
__device__ inline float rounded_bf16(float x) { return __bfloat162float(__float2bfloat16(x)); }

// The larger (smaller) number, or NaN if there is one.
template <typename C>
__device__ inline C larger(C a, C b) {
  return a >= b || a != a ? a : b;
}
template <typename C>
__device__ inline C smaller(C a, C b) {
  return a <= b || a != a ? a : b;
}
