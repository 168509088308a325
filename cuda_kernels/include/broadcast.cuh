// Functions of two broadcast operands. How an operand lies along the result is worked out by the launcher (broadcast.py).
#pragma once

#include "vector.cuh"

// Index into an operand of `count` elements, each of which covers `inner` neighbours of the n of the result, over and over.
template <typename I>
__device__ inline I along(I i, I n, I inner, I count) {
  if (count == 1) return 0;
  if (count == n) return i;
  return (inner == 1 ? i : i / inner) % count;
}

template <typename I, typename T, typename R, typename F>
__device__ inline void loop_along(const T* a, const T* b, R* c, I n, I a_inner, I a_count, I b_inner, I b_count, F f) {
  GPUNET_LOOP(at, n) {
    const I i = (I)at;
    store(c, at, f(load(a, along<I>(i, n, a_inner, a_count)), load(b, along<I>(i, n, b_inner, b_count))));
  }
}

// Either operand: scalar, rows, columns, channels, or as large as the result.
template <typename T, typename R, typename F>
__device__ inline void map_along(const T* a, const T* b, R* c, int64 n, int64 a_inner, int64 a_count, int64 b_inner,
                                 int64 b_count, F f) {
  // Divisions of 32 bits are several times as fast.
  if (n <= GPUNET_NARROW)
    loop_along<uint32>(a, b, c, n, a_inner, a_count, b_inner, b_count, f);
  else
    loop_along<int64>(a, b, c, n, a_inner, a_count, b_inner, b_count, f);
}

// Strides in elements, the last dimension innermost; the size of the first is not needed.
struct Strides {
  int64 size[6], a[6], b[6];
};

template <typename I, typename T, typename R, typename F>
__device__ inline void loop_strided(const T* a, const T* b, R* c, int64 n, const Strides& strides, F f) {
  GPUNET_LOOP(at, n) {
    I rest = (I)at;
    int64 p = 0, q = 0;
    for (int d = 5; d > 0; --d) {
      const I size = (I)strides.size[d], next = rest / size, index = rest - next * size;
      p += index * strides.a[d];
      q += index * strides.b[d];
      rest = next;
    }
    store(c, at, f(load(a, p + rest * strides.a[0]), load(b, q + rest * strides.b[0])));
  }
}

template <typename T, typename R, typename F>
__device__ inline void map_strided(const T* a, const T* b, R* c, int64 n, const Strides& strides, F f) {
  if (n <= GPUNET_NARROW)
    loop_strided<uint32>(a, b, c, n, strides, f);
  else
    loop_strided<int64>(a, b, c, n, strides, f);
}

// The parameters of the kernels of either form.
#define GPUNET_ALONG_PARAMETERS int64 n, int64 a_inner, int64 a_count, int64 b_inner, int64 b_count
#define GPUNET_ALONG n, a_inner, a_count, b_inner, b_count
#define GPUNET_STRIDED_PARAMETERS                                                                                   \
  int64 n, int64 n1, int64 n2, int64 n3, int64 n4, int64 n5, int64 a0, int64 a1, int64 a2, int64 a3, int64 a4, int64 a5, \
      int64 b0, int64 b1, int64 b2, int64 b3, int64 b4, int64 b5
#define GPUNET_STRIDED \
  n, Strides { {0, n1, n2, n3, n4, n5}, {a0, a1, a2, a3, a4, a5}, { b0, b1, b2, b3, b4, b5 } }
