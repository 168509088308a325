// Buckets of gradients.
#include "gpunet.cuh"

// bucket += gathered, gathered = 0.
template <typename T>
__device__ void drain(T* bucket, T* gathered, int64 n) {
  typedef typename Accumulate<T>::type C;
  GPUNET_LOOP(i, n) {
    store(bucket, i, (C)(load(bucket, i) + load(gathered, i)));
    store(gathered, i, (C)0);
  }
}

#define DRAIN(S, T)                                                              \
  extern "C" __global__ void drain_##S(T* bucket, T* gathered, int64 n) {        \
    drain<T>(bucket, gathered, n);                                               \
  }
GPUNET_FLOATS(DRAIN)
