// Batch norms folded into convolutions.
#include "gpunet.cuh"

// W f and (b - mean) f + bias, f = scale / sqrt(var + epsilon), in double precision: it is done once. W has `inner` elements a channel.
template <typename T>
__device__ void fold_batch_norm(const T* w, const T* scale, const T* bias, const T* mean, const T* var, const T* b, T* folded_w,
                                T* folded_b, int64 channels, int64 inner, double epsilon) {
  typedef typename Accumulate<T>::type A;
  GPUNET_LOOP(i, channels * inner) {
    const int64 c = i / inner;
    const double factor = (double)load(scale, c) / sqrt((double)load(var, c) + epsilon);
    store(folded_w, i, (A)((double)load(w, i) * factor));
  }
  GPUNET_LOOP(c, channels) {
    const double factor = (double)load(scale, c) / sqrt((double)load(var, c) + epsilon);
    const double shift = b == nullptr ? 0.0 : (double)load(b, c);
    store(folded_b, c, (A)((shift - (double)load(mean, c)) * factor + (double)load(bias, c)));
  }
}

#define FOLD(S, T)                                                                                                         \
  extern "C" __global__ void fold_batch_norm_##S(const T* w, const T* scale, const T* bias, const T* mean, const T* var,   \
                                                 const T* b, T* folded_w, T* folded_b, int64 channels, int64 inner,        \
                                                 double epsilon) {                                                         \
    fold_batch_norm(w, scale, bias, mean, var, b, folded_w, folded_b, channels, inner, epsilon);                           \
  }
GPUNET_FLOATS(FOLD)
