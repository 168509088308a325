// Planted faults of indexing, for the tests of the simulated device.
#include "gpunet.cuh"

// One thread writes or reads one element.
extern "C" __global__ void write_at(float* y, int64 index, int64 thread) {
  if ((int64)blockIdx.x * blockDim.x + threadIdx.x == thread) y[index] = 1.0f;
}

extern "C" __global__ void read_at(const float* x, float* y, int64 index) { y[0] = x[index]; }

extern "C" __global__ void divide(int32* y, int32 a, int32 b) { y[0] = a / b; }

extern "C" __global__ void stop(float* y) { assert(y[0] == 0.0f); }

extern "C" __global__ void shared_at(float* y, int32 index) {
  __shared__ float tile[8];
  tile[index] = 2.0f;
  y[0] = tile[index];
}

extern "C" __global__ void dynamic_at(float* y, int32 index) {
  extern __shared__ float dynamic[];
  dynamic[index] = 2.0f;
  y[0] = dynamic[index];
}

__device__ __noinline__ float descend(const float* above, int32 depth) {
  float frame[4096];
  frame[depth % 4096] = above[0];
  if (depth <= 0) return frame[0];
  return descend(frame, depth - 1) + frame[depth % 4096];
}

extern "C" __global__ void recurse(float* y, int32 depth) { y[0] = descend(y, depth); }
