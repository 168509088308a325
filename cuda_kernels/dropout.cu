// Dropout. A mask is a uint8 of 0 or 1 for each element.
#include "philox.cuh"
#include "vector.cuh"

// y = x mask scale. Multiplied, as in the reference: what is not finite leaves NaN where it is dropped.
template <typename T>
__device__ void dropout_fwd(const T* x, T* y, uint8* mask, int64 n, double scale, uint64 threshold, uint64 seed,
                            uint32 operator_id, uint64 step) {
  typedef typename Accumulate<T>::type C;
  const C factor = (C)scale;
  const bool wide = aligned<4>(x) && aligned<4>(y) && aligned<4>(mask);
  GPUNET_LOOP(b, (n + 3) / 4) {
    const Words words = philox(b, seed, operator_id, step);
    if (wide && 4 * b + 4 <= n) {
      Pack<T, 4> values = load_pack<4>(x, b);
      Pack<uint8, 4> kept;
      for (int k = 0; k < 4; ++k) {
        kept.v[k] = words.w[k] < threshold;
        store(values.v, k, load(values.v, k) * factor * (C)kept.v[k]);
      }
      store_pack<4>(y, b, values);
      store_pack<4>(mask, b, kept);
    } else {
      for (int k = 0; k < 4 && 4 * b + k < n; ++k) {
        const int64 i = 4 * b + k;
        mask[i] = words.w[k] < threshold;
        store(y, i, load(x, i) * factor * (C)mask[i]);
      }
    }
  }
}

template <typename T>
__device__ void dropout_bwd(const T* dy, const uint8* mask, T* dx, int64 n, double scale) {
  typedef typename Accumulate<T>::type C;
  const C factor = (C)scale;
  constexpr int N = 16 / sizeof(T);
  const int64 packs = aligned<N>(dy) && aligned<N>(dx) && aligned<N>(mask) ? n / N : 0;
  GPUNET_LOOP(i, packs) {
    Pack<T, N> values = load_pack<N>(dy, i);
    const Pack<uint8, N> kept = load_pack<N>(mask, i);
    for (int k = 0; k < N; ++k) store(values.v, k, load(values.v, k) * factor * (C)kept.v[k]);
    store_pack<N>(dx, i, values);
  }
  GPUNET_LOOP(j, n - packs * N) {
    const int64 i = packs * N + j;
    store(dx, i, load(dy, i) * factor * (C)mask[i]);
  }
}

#define DROPOUT(S, T)                                                                                                   \
  extern "C" __global__ void dropout_fwd_##S(const T* x, T* y, uint8* mask, int64 n, double scale, uint64 threshold,   \
                                             uint64 seed, uint32 operator_id, const uint64* step) {                    \
    dropout_fwd<T>(x, y, mask, n, scale, threshold, seed, operator_id, *step);                                         \
  }                                                                                                                    \
  extern "C" __global__ void dropout_bwd_##S(const T* dy, const uint8* mask, T* dx, int64 n, double scale) {           \
    dropout_bwd<T>(dy, mask, dx, n, scale);                                                                            \
  }
GPUNET_FLOATS(DROPOUT)
