// Loss scaling: gradients over the scale, and whether all of them are finite.
#include "gpunet.cuh"

extern "C" __global__ void finite_set(int32* finite, int32 value) {
  if (blockIdx.x == 0 && threadIdx.x == 0) finite[0] = value;
}

template <typename T>
__device__ void unscale(const float* scale, T* gradient, int32* finite, int64 n) {
  typedef typename Accumulate<T>::type C;
  const C divisor = (C)scale[0];
  bool good = true;
  GPUNET_LOOP(i, n) {
    const C value = load(gradient, i) / divisor;
    // Infinite and NaN values differ from themselves less themselves.
    good = good && value - value == 0;
    store(gradient, i, value);
  }
  // All threads that write at all write the same.
  if (!good) finite[0] = 0;
}

#define UNSCALE(S, T)                                                                                       \
  extern "C" __global__ void unscale_##S(const float* scale, T* gradient, int32* finite, int64 n) {        \
    unscale<T>(scale, gradient, finite, n);                                                                \
  }
GPUNET_FLOATS(UNSCALE)
