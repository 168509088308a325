// Buckets of gradients.
#include "vector.cuh"

// bucket += gathered, gathered = 0.
template <typename T>
__device__ void drain(T* bucket, T* gathered, int64 n) {
  typedef typename Accumulate<T>::type C;
  const T* const x[] = {bucket, gathered};
  T* const y[] = {bucket, gathered};
  map_all(x, y, n, [](const C(&in)[2], C(&out)[2]) {
    out[0] = in[0] + in[1];
    out[1] = 0;
  });
}

#define DRAIN(S, T)                                                              \
  extern "C" __global__ void drain_##S(T* bucket, T* gathered, int64 n) {        \
    drain<T>(bucket, gathered, n);                                               \
  }
GPUNET_FLOATS(DRAIN)
