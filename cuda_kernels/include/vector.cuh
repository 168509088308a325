// Elementwise loops that move up to 16 bytes at once where all pointers allow it.
#pragma once

#include "gpunet.cuh"

// N neighbouring elements. N is a power of two; more than 16 bytes are moved in pieces of 16.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T v[N];
};

// How many elements of the larger of two types 16 bytes hold.
template <typename T, typename R>
__device__ constexpr int pack_size() {
  return 16 / (sizeof(T) > sizeof(R) ? sizeof(T) : sizeof(R));
}

template <int N, typename T>
__device__ inline bool aligned(const T* p) {
  return (uint64)p % alignof(Pack<T, N>) == 0;
}

template <int N, typename T>
__device__ inline Pack<T, N> load_pack(const T* p, int64 i) {
  return ((const Pack<T, N>*)p)[i];
}

template <int N, typename T>
__device__ inline void store_pack(T* p, int64 i, const Pack<T, N>& pack) {
  ((Pack<T, N>*)p)[i] = pack;
}

// y[i] = f(x[i]). y may be x.
template <typename T, typename R, typename F>
__device__ inline void map(const T* x, R* y, int64 n, F f) {
  constexpr int N = pack_size<T, R>();
  const int64 packs = aligned<N>(x) && aligned<N>(y) ? n / N : 0;
  GPUNET_LOOP(i, packs) {
    const Pack<T, N> a = load_pack<N>(x, i);
    Pack<R, N> result;
    for (int k = 0; k < N; ++k) store(result.v, k, f(load(a.v, k)));
    store_pack<N>(y, i, result);
  }
  GPUNET_LOOP(j, n - packs * N) {
    const int64 i = packs * N + j;
    store(y, i, f(load(x, i)));
  }
}

// y[i] = f(a[i], b[i]). y may be a or b.
template <typename T, typename R, typename F>
__device__ inline void map2(const T* a, const T* b, R* y, int64 n, F f) {
  constexpr int N = pack_size<T, R>();
  const int64 packs = aligned<N>(a) && aligned<N>(b) && aligned<N>(y) ? n / N : 0;
  GPUNET_LOOP(i, packs) {
    const Pack<T, N> p = load_pack<N>(a, i), q = load_pack<N>(b, i);
    Pack<R, N> result;
    for (int k = 0; k < N; ++k) store(result.v, k, f(load(p.v, k), load(q.v, k)));
    store_pack<N>(y, i, result);
  }
  GPUNET_LOOP(j, n - packs * N) {
    const int64 i = packs * N + j;
    store(y, i, f(load(a, i), load(b, i)));
  }
}

// Calls f(in, out) for each position, with the numbers of all x there; what f leaves in `out` goes to all y. Of an x that is null the
// numbers are 0, and a y that is null is not wanted. Each y may be any x.
template <typename T, int IN, int OUT, typename F>
__device__ inline void map_all(const T* const (&x)[IN], T* const (&y)[OUT], int64 n, F f) {
  typedef typename Accumulate<T>::type C;
  constexpr int N = pack_size<T, T>();
  bool wide = true;
#pragma unroll
  for (int a = 0; a < IN; ++a) wide = wide && aligned<N>(x[a]);
#pragma unroll
  for (int b = 0; b < OUT; ++b) wide = wide && aligned<N>(y[b]);
  const int64 packs = wide ? n / N : 0;
  GPUNET_LOOP(i, packs) {
    Pack<T, N> in[IN], out[OUT];
#pragma unroll
    for (int a = 0; a < IN; ++a)
      if (x[a] != nullptr) in[a] = load_pack<N>(x[a], i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      C numbers[IN], results[OUT];
#pragma unroll
      for (int a = 0; a < IN; ++a) numbers[a] = x[a] != nullptr ? load(in[a].v, k) : (C)0;
      f(numbers, results);
#pragma unroll
      for (int b = 0; b < OUT; ++b) store(out[b].v, k, results[b]);
    }
#pragma unroll
    for (int b = 0; b < OUT; ++b)
      if (y[b] != nullptr) store_pack<N>(y[b], i, out[b]);
  }
  GPUNET_LOOP(j, n - packs * N) {
    const int64 i = packs * N + j;
    C numbers[IN], results[OUT];
#pragma unroll
    for (int a = 0; a < IN; ++a) numbers[a] = x[a] != nullptr ? load(x[a], i) : (C)0;
    f(numbers, results);
#pragma unroll
    for (int b = 0; b < OUT; ++b)
      if (y[b] != nullptr) store(y[b], i, results[b]);
  }
}

// For sums, differences and products, which have the same bits with and without a sign: launchers pass uint8 as int8 and uint16
// as int16.
#define GPUNET_SIGNLESS(M) GPUNET_FLOATS(M) M(i8, int8) M(i16, int16) M(i32, int32) M(i64, int64)

// A functor of one or two numbers, and its kernels for each floating point type: NAME_f32, NAME_f16, NAME_bf16, NAME_f64.
#define GPUNET_UNARY_KERNEL(NAME, S, T) \
  extern "C" __global__ void NAME##_##S(const T* x, T* y, int64 n) { map(x, y, n, NAME##_op()); }
#define GPUNET_UNARY_OP(NAME, EXPRESSION)            \
  struct NAME##_op {                                 \
    template <typename C>                            \
    __device__ C operator()(C x) const {             \
      return EXPRESSION;                             \
    }                                                \
  };
#define GPUNET_UNARY(NAME, EXPRESSION)        \
  GPUNET_UNARY_OP(NAME, EXPRESSION)           \
  GPUNET_UNARY_KERNEL(NAME, f32, float)       \
  GPUNET_UNARY_KERNEL(NAME, f16, float16)     \
  GPUNET_IF_BFLOAT16(GPUNET_UNARY_KERNEL(NAME, bf16, bfloat16)) \
  GPUNET_UNARY_KERNEL(NAME, f64, double)

#define GPUNET_BINARY_KERNEL(NAME, S, T) \
  extern "C" __global__ void NAME##_##S(const T* a, const T* b, T* y, int64 n) { map2(a, b, y, n, NAME##_op()); }
#define GPUNET_BINARY_OP(NAME, A, B, EXPRESSION)     \
  struct NAME##_op {                                 \
    template <typename C>                            \
    __device__ C operator()(C A, C B) const {        \
      return EXPRESSION;                             \
    }                                                \
  };
#define GPUNET_BINARY(NAME, A, B, EXPRESSION)  \
  GPUNET_BINARY_OP(NAME, A, B, EXPRESSION)     \
  GPUNET_BINARY_KERNEL(NAME, f32, float)       \
  GPUNET_BINARY_KERNEL(NAME, f16, float16)     \
  GPUNET_IF_BFLOAT16(GPUNET_BINARY_KERNEL(NAME, bf16, bfloat16)) \
  GPUNET_BINARY_KERNEL(NAME, f64, double)
