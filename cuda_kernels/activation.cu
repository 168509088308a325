// Activation functions and their gradients.
#include "gpunet.cuh"

template <typename T>
__device__ void relu_fwd(const T* x, T* y, int64 n) {
  // A NaN passes through, as in the reference.
  GPUNET_LOOP(i, n) {
    auto v = load(x, i);
    store(y, i, v < 0 ? 0 : v);
  }
}

template <typename T>
__device__ void relu_bwd(const T* y, const T* dy, T* dx, int64 n) {
  GPUNET_LOOP(i, n) store(dx, i, load(y, i) > 0 ? load(dy, i) : 0);
}

#define RELU(S, T)                                                                                                   \
  extern "C" __global__ void relu_fwd_##S(const T* x, T* y, int64 n) { relu_fwd<T>(x, y, n); }                      \
  extern "C" __global__ void relu_bwd_##S(const T* y, const T* dy, T* dx, int64 n) { relu_bwd<T>(y, dy, dx, n); }
GPUNET_FLOATS(RELU)
