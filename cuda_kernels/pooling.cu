// Pooling. Images are (outer, space, inner): channels first, outer counts images and channels and inner is 1; channels last, outer
// counts images and inner channels.
#include "window.cuh"

// Of two numbers the larger one; a NaN wins.
struct NanMaximum {
  template <typename A>
  __device__ A operator()(A a, A b) const {
    return a > b || a != a ? a : b;
  }
};

template <typename A>
struct MaxPool {
  __device__ static A start() { return (A)__int_as_float((int)0xff800000u); }
  __device__ static NanMaximum combine() { return NanMaximum(); }
  __device__ static A finish(A value, int32, int32, int32) { return value; }
};

template <typename A>
struct AveragePool {
  __device__ static A start() { return 0; }
  __device__ static Sum combine() { return Sum(); }
  // A window without any pixel sums to 0.
  __device__ static A finish(A value, int32 inside, int32 taps, int32 include_padding) {
    const int32 count = include_padding ? taps : inside;
    return value * ((A)1 / (A)(count > 1 ? count : 1));
  }
};

// Where an element of an (outer, space, inner) tensor lies.
template <typename I>
struct Element {
  I outer, inner;
  Place place;
  __device__ Element(I index, I inner_size, const int32* size) {
    inner = index % inner_size;
    index /= inner_size;
    const I space = (I)size[0] * size[1] * size[2];
    outer = index / space;
    place = place_of((int32)(index - outer * space), size);
  }
};

// A thread for each window.
template <typename Pool, typename I, typename T>
__device__ inline void pool_windows(const T* x, T* y, int64 outer, int64 inner, const Window& w, int32 include_padding) {
  typedef typename Accumulate<T>::type A;
  GPUNET_LOOP(at, outer * inner * w.positions()) {
    const Element<I> e((I)at, (I)inner, w.output);
    const Range r0 = window_range(w, 0, e.place.at[0]), r1 = window_range(w, 1, e.place.at[1]);
    const Range r2 = window_range(w, 2, e.place.at[2]);
    A value = Pool::start();
    for (int32 i0 = r0.first; i0 < r0.last; ++i0)
      for (int32 i1 = r1.first; i1 < r1.last; ++i1) {
        const int64 row = (((int64)e.outer * w.image[0] + i0) * w.image[1] + i1) * w.image[2];
        for (int32 i2 = r2.first; i2 < r2.last; ++i2)
          value = Pool::combine()(value, load(x, (row + i2) * inner + (int64)e.inner));
      }
    store(y, at, Pool::finish(value, r0.count() * r1.count() * r2.count(), w.taps(), include_padding));
  }
}

// A block for each window, for large ones.
template <typename Pool, typename T>
__device__ inline void pool_blocks(const T* x, T* y, int64 outer, int64 inner, const Window& w, int32 include_padding) {
  typedef typename Accumulate<T>::type A;
  __shared__ A scratch[32];
  for (int64 at = blockIdx.x; at < outer * inner * w.positions(); at += gridDim.x) {
    const Element<int64> e(at, inner, w.output);
    const Range r0 = window_range(w, 0, e.place.at[0]), r1 = window_range(w, 1, e.place.at[1]);
    const Range r2 = window_range(w, 2, e.place.at[2]);
    const int32 sizes[3] = {r0.count(), r1.count(), r2.count()};
    const int32 count = sizes[0] * sizes[1] * sizes[2];
    A value = Pool::start();
    for (int32 i = threadIdx.x; i < count; i += blockDim.x) {
      const Place p = place_of(i, sizes);
      const Place pixel = {{p.at[0] + r0.first, p.at[1] + r1.first, p.at[2] + r2.first}};
      value = Pool::combine()(value, load(x, (e.outer * w.pixels() + index_of(pixel, w.image)) * inner + e.inner));
    }
    value = block_reduce(value, scratch, Pool::start(), Pool::combine());
    if (threadIdx.x == 0) store(y, at, Pool::finish(value, count, w.taps(), include_padding));
  }
}

template <typename Pool, typename T>
__device__ inline void pool_fwd(const T* x, T* y, int64 outer, int64 inner, const Window& w, int32 include_padding) {
  const int64 most = w.pixels() > w.positions() ? w.pixels() : w.positions();
  if (outer * inner * most <= GPUNET_NARROW)
    pool_windows<Pool, uint32>(x, y, outer, inner, w, include_padding);
  else
    pool_windows<Pool, int64>(x, y, outer, inner, w, include_padding);
}

// What one window gives to one of its pixels.
template <typename T>
struct MaxGradient {
  typedef typename Accumulate<T>::type A;
  const T *x, *y, *dy;
  A value;
  __device__ void begin(int64 i) { value = load(x, i); }
  __device__ A give(int64 o, int32) const { return load(y, o) == value ? load(dy, o) : (A)0; }
};

template <typename T>
struct AverageGradient {
  typedef typename Accumulate<T>::type A;
  const T* dy;
  int32 taps, include_padding;
  __device__ void begin(int64) {}
  __device__ A give(int64 o, int32 inside) const {
    return AveragePool<A>::finish(load(dy, o), inside, taps, include_padding);
  }
};

// A thread for each pixel gathers from the windows that cover it, those in which it comes first last.
template <typename I, typename T, typename G>
__device__ inline void gather_windows(G gradient, T* dx, int64 outer, int64 inner, const Window& w) {
  typedef typename Accumulate<T>::type A;
  GPUNET_LOOP(at, outer * inner * w.pixels()) {
    const Element<I> e((I)at, (I)inner, w.image);
    const Range r0 = covering_range(w, 0, e.place.at[0]), r1 = covering_range(w, 1, e.place.at[1]);
    const Range r2 = covering_range(w, 2, e.place.at[2]);
    gradient.begin(at);
    A total = 0;
    for (int32 o0 = r0.last - 1; o0 >= r0.first; --o0)
      for (int32 o1 = r1.last - 1; o1 >= r1.first; --o1) {
        const int32 inside = window_range(w, 0, o0).count() * window_range(w, 1, o1).count();
        const int64 row = (((int64)e.outer * w.output[0] + o0) * w.output[1] + o1) * w.output[2];
        for (int32 o2 = r2.last - 1; o2 >= r2.first; --o2)
          total += gradient.give((row + o2) * inner + (int64)e.inner, inside * window_range(w, 2, o2).count());
      }
    store(dx, at, total);
  }
}

template <typename T, typename G>
__device__ inline void pool_bwd(G gradient, T* dx, int64 outer, int64 inner, const Window& w) {
  const int64 most = w.pixels() > w.positions() ? w.pixels() : w.positions();
  if (outer * inner * most <= GPUNET_NARROW)
    gather_windows<uint32>(gradient, dx, outer, inner, w);
  else
    gather_windows<int64>(gradient, dx, outer, inner, w);
}

#define POOL(NAME, POOLING, S, T)                                                                                     \
  extern "C" __global__ void NAME##_fwd_##S(const T* x, T* y, int64 outer, int64 inner, int32 include_padding,        \
                                            GPUNET_WINDOW_PARAMETERS) {                                              \
    pool_fwd<POOLING<Accumulate<T>::type>>(x, y, outer, inner, GPUNET_WINDOW, include_padding);                      \
  }                                                                                                                  \
  extern "C" __global__ void NAME##_large_##S(const T* x, T* y, int64 outer, int64 inner, int32 include_padding,     \
                                              GPUNET_WINDOW_PARAMETERS) {                                            \
    pool_blocks<POOLING<Accumulate<T>::type>>(x, y, outer, inner, GPUNET_WINDOW, include_padding);                   \
  }
#define POOLS(S, T)                                                                                                   \
  POOL(max_pool, MaxPool, S, T)                                                                                       \
  POOL(average_pool, AveragePool, S, T)                                                                               \
  extern "C" __global__ void max_pool_bwd_##S(const T* x, const T* y, const T* dy, T* dx, int64 outer, int64 inner,  \
                                              GPUNET_WINDOW_PARAMETERS) {                                            \
    pool_bwd(MaxGradient<T>{x, y, dy, 0}, dx, outer, inner, GPUNET_WINDOW);                                          \
  }                                                                                                                  \
  extern "C" __global__ void average_pool_bwd_##S(const T* dy, T* dx, int64 outer, int64 inner,                      \
                                                  int32 include_padding, GPUNET_WINDOW_PARAMETERS) {                 \
    const Window w = GPUNET_WINDOW;                                                                                  \
    pool_bwd(AverageGradient<T>{dy, w.taps(), include_padding}, dx, outer, inner, w);                                \
  }
GPUNET_FLOATS(POOLS)
