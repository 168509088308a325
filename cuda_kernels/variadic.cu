// Elementwise combinations of up to 8 tensors at a time, and their gradients.
#include "sums.cuh"

// The largest (smallest) number, or NaN if there is one.
struct Largest {
  template <typename C>
  __device__ C operator()(C a, C b) const {
    return a >= b || a != a ? a : b;
  }
};
struct Smallest {
  template <typename C>
  __device__ C operator()(C a, C b) const {
    return a <= b || a != a ? a : b;
  }
};
struct Plus {
  template <typename C>
  __device__ C operator()(C a, C b) const {
    return (C)(a + b);
  }
};

// Folds carry (if read), x[0], ..., x[count-1] from left to right. The result goes to y or, in the type that is computed in, to
// carry, which takes it to the launch for the next tensors. y may be any x.
template <typename T>
struct Tensors {
  const T* x[8];
  int count;
};

template <typename T, typename F>
__device__ inline void fold(const Tensors<T>& in, T* y, uint8* carry, int64 n, int first, int last, F f) {
  typedef typename Accumulate<T>::type C;
  constexpr int N = 16 / sizeof(T);
  bool wide = first && last && aligned<N>(y);
  for (int k = 0; k < 8; ++k) wide = wide && (k >= in.count || aligned<N>(in.x[k]));
  const int64 packs = wide ? n / N : 0;
  GPUNET_LOOP(i, packs) {
    Pack<T, N> p = load_pack<N>(in.x[0], i);
    C total[N];
    for (int e = 0; e < N; ++e) total[e] = load(p.v, e);
    for (int k = 1; k < 8; ++k) {
      if (k >= in.count) break;
      p = load_pack<N>(in.x[k], i);
      for (int e = 0; e < N; ++e) total[e] = f(total[e], load(p.v, e));
    }
    for (int e = 0; e < N; ++e) store(p.v, e, total[e]);
    store_pack<N>(y, i, p);
  }
  GPUNET_LOOP(j, n - packs * N) {
    const int64 i = packs * N + j;
    C total = first ? load(in.x[0], i) : f(((const C*)carry)[i], load(in.x[0], i));
    for (int k = 1; k < 8; ++k) {
      if (k >= in.count) break;
      total = f(total, load(in.x[k], i));
    }
    if (last)
      store(y, i, total);
    else
      ((C*)carry)[i] = total;
  }
}

#define FOLD(NAME, F, S, T)                                                                                          \
  extern "C" __global__ void NAME##_fwd_##S(const T* x0, const T* x1, const T* x2, const T* x3, const T* x4,        \
                                            const T* x5, const T* x6, const T* x7, T* y, uint8* carry, int64 n,     \
                                            int32 count, int32 first, int32 last) {                                 \
    fold(Tensors<T>{{x0, x1, x2, x3, x4, x5, x6, x7}, count}, y, carry, n, first, last, F());                       \
  }
#define SUM(S, T) FOLD(sum, Plus, S, T)
#define EXTREMA(S, T) FOLD(max, Largest, S, T) FOLD(min, Smallest, S, T)
GPUNET_SIGNLESS(SUM)
GPUNET_NUMBERS(EXTREMA)

// dx = dy where x is the extremum y.
template <typename T>
__device__ void extremum_bwd(const T* y, const T* dy, const T* x, T* dx, int64 n) {
  typedef typename Accumulate<T>::type C;
  const T* const from[] = {y, dy, x};
  T* const to[] = {dx};
  map_all(from, to, n, [](const C(&in)[3], C(&out)[1]) { out[0] = in[2] == in[0] ? in[1] : (C)0; });
}

#define EXTREMUM(S, T)                                                                                       \
  extern "C" __global__ void extremum_bwd_##S(const T* y, const T* dy, const T* x, T* dx, int64 n) {        \
    extremum_bwd<T>(y, dy, x, dx, n);                                                                       \
  }
GPUNET_FLOATS(EXTREMUM)

// Weighted sums of up to 4 tensors, each with its weight in device memory; carry as above.
template <typename T, typename W>
struct Weighted {
  const T* x[4];
  const W* w[4];
  int count;
};

template <typename T, typename W>
__device__ inline void weighted_sum(const Weighted<T, W>& in, T* y, uint8* carry, int64 n, int first, int last) {
  typedef typename Accumulate<T>::type C;
  C weights[4];
  for (int k = 0; k < 4; ++k) weights[k] = k < in.count ? (C)load(in.w[k], 0) : (C)0;
  constexpr int N = 16 / sizeof(T);
  bool wide = first && last && aligned<N>(y);
  for (int k = 0; k < 4; ++k) wide = wide && (k >= in.count || aligned<N>(in.x[k]));
  const int64 packs = wide ? n / N : 0;
  GPUNET_LOOP(i, packs) {
    Pack<T, N> p = load_pack<N>(in.x[0], i);
    C total[N];
    for (int e = 0; e < N; ++e) total[e] = load(p.v, e) * weights[0];
    for (int k = 1; k < 4; ++k) {
      if (k >= in.count) break;
      p = load_pack<N>(in.x[k], i);
      for (int e = 0; e < N; ++e) total[e] += load(p.v, e) * weights[k];
    }
    for (int e = 0; e < N; ++e) store(p.v, e, total[e]);
    store_pack<N>(y, i, p);
  }
  GPUNET_LOOP(j, n - packs * N) {
    const int64 i = packs * N + j;
    C total = load(in.x[0], i) * weights[0];
    if (!first) total += ((const C*)carry)[i];
    for (int k = 1; k < 4; ++k) {
      if (k >= in.count) break;
      total += load(in.x[k], i) * weights[k];
    }
    if (last)
      store(y, i, total);
    else
      ((C*)carry)[i] = total;
  }
}

template <typename C>
struct Times {
  C factor;
  __device__ C operator()(C x) const { return x * factor; }
};

#define WEIGHTED(S, T, WS, W)                                                                                         \
  extern "C" __global__ void weighted_sum_fwd_##S##_##WS(const T* x0, const W* w0, const T* x1, const W* w1,         \
                                                         const T* x2, const W* w2, const T* x3, const W* w3, T* y,   \
                                                         uint8* carry, int64 n, int32 count, int32 first,            \
                                                         int32 last) {                                               \
    weighted_sum(Weighted<T, W>{{x0, x1, x2, x3}, {w0, w1, w2, w3}, count}, y, carry, n, first, last);               \
  }                                                                                                                  \
  extern "C" __global__ void weighted_sum_bwd_##S##_##WS(const T* dy, const W* w, T* dx, int64 n) {                  \
    typedef Accumulate<T>::type C;                                                                                   \
    map(dy, dx, n, Times<C>{(C)load(w, 0)});                                                                         \
  }
#define WEIGHTED_BY_ANY(S, T)                                  \
  WEIGHTED(S, T, f32, float) WEIGHTED(S, T, f16, float16)      \
  GPUNET_IF_BFLOAT16(WEIGHTED(S, T, bf16, bfloat16)) WEIGHTED(S, T, f64, double)
GPUNET_FLOATS(WEIGHTED_BY_ANY)
