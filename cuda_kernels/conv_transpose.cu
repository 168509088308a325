// What a transposed convolution adds to its result: a number for each channel.
#include "gpunet.cuh"

template <typename T>
__device__ inline void add_bias(const T* bias, T* y, int64 n, int64 channels, int64 positions) {
  GPUNET_LOOP(i, n) store(y, i, load(y, i) + load(bias, i / positions % channels));
}

#define CONV_TRANSPOSE(S, T)                                                                               \
  extern "C" __global__ void conv_transpose_bias_##S(const T* bias, T* y, int64 n, int64 channels,        \
                                                     int64 positions) {                                   \
    add_bias(bias, y, n, channels, positions);                                                             \
  }
GPUNET_FLOATS(CONV_TRANSPOSE)
